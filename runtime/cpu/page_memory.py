"""Blocks on a CPU: whole pages of this process, at addresses that stay.

    in memory   address -> pages of the process
    away        address -> the file in which the bytes lie, in host memory or storage (see `pages`)

Unchanged bytes are not written again: a digest of what was written is compared with what is there.
That is exact, whoever may have written to the tensor meanwhile.
"""

import ctypes
from collections import OrderedDict
from collections.abc import Callable

import torch

from teraplan.errors import MappingError, StorageError
from teraplan.runtime.cpu.trimmer import Trimmer
from teraplan.runtime.process import pages
from teraplan.runtime.state.memory.block import Block, Place
from teraplan.runtime.state.memory.block_memory import BlockMemory
from teraplan.runtime.state.memory.digests import came_back_changed, has_landed, is_as_written
from teraplan.runtime.state.memory.lease import span_nbytes, tensor_at
from teraplan.runtime.storage.memory import digest
from teraplan.runtime.storage.tiers import Away, Return, Source, Tiers
from teraplan.values.hardware import Hardware, Link


class PageMemory(BlockMemory):
    """See `BlockMemory`."""

    device = torch.device("cpu")
    transfer_ns = 400_000
    """Measured as the difference between steps that move 2,700 tensors of 64 KiB out and back, and
    none."""

    def __init__(self, tiers: Tiers) -> None:
        super().__init__(pages, keeps=True)
        self.tiers = tiers
        """What is away stays readable when they are closed, as long as the tensor lives."""
        self.shown: OrderedDict[Block, None] = OrderedDict()
        """Where a file is shown."""
        self._coming: set[Block] = set()
        """Of these, those that are being read into fresh pages, and some that have been."""
        self._trimmer: Trimmer | None = None

    # -- tensors -----------------------------------------------------------------------------------

    def size_of(self, nbytes: int) -> int:
        return pages.round_up(nbytes)

    def block_of(self, tensor: torch.Tensor) -> Block | None:
        return self.tenants.block_at(tensor.untyped_storage().data_ptr())

    def holds(self, address: int) -> bool | None:
        block = self.tenants.block_at(address)
        return block.held if block is not None else None

    def place(self, block: Block, like: torch.Tensor, offset: int) -> torch.Tensor:
        address = block.address + offset
        ended = self.tenants.enter(block, address)
        return tensor_at(address, span_nbytes(like), like, ended)

    def cut(self, block: Block, nbytes: int) -> None:
        pages.release(block.address + nbytes, block.nbytes - nbytes)
        self.held.count(nbytes - block.nbytes)
        block.nbytes = nbytes

    def end(self, block: Block) -> None:
        address, block.address = block.address, 0
        landing, block.landing = block.landing, 0
        if block.place is Place.MEMORY:
            self._give(address, block)
            return
        self.shown.pop(block, None)
        if address:
            pages.release(address, block.nbytes)
        if block.place is Place.COMING:
            self._give(landing, block)

    def _give(self, address: int, block: Block) -> None:
        if address:
            self.held.give(address, block.nbytes)

    def tidy(self) -> None:
        if self._trimmer is not None:
            self._trimmer.drop_all()

    def watch(self) -> None:
        self._trimmer = Trimmer(self)

    def close(self, release: Callable[[], None]) -> None:
        if self._trimmer is not None:
            self._trimmer.close()
        super().close(release)

    # -- out ---------------------------------------------------------------------------------------

    def start_out(self, block: Block, host_bytes: int | None) -> None:
        address, nbytes = block.address, block.nbytes
        block.digest = digest(address, nbytes)
        if host_bytes is None:
            goes = self.tiers.has_host_room(nbytes, beside_bytes=self.planned_host_bytes)
            host_bytes = nbytes if goes else 0
        source = Source(address, nbytes, owner=block, label=block.label, is_compared=True)
        block.record = away = self.tiers.put_where_there_is_room(source, host_bytes)
        self.log.count(away.writes)

    def is_as_written(self, block: Block, *, since_user_ran: bool) -> bool:
        return is_as_written(block)

    def wait_out(self, block: Block) -> None:
        try:
            self.log.wait(self.tiers, block, _record(block).writes, "to leave")
        except StorageError:  # no store could take it: host memory, or once more
            self.drop(block)
            self.start_out(block, block.nbytes)
            self.log.wait(self.tiers, block, _record(block).writes, "to leave")

    def take_out(self, block: Block) -> None:
        if block not in self.shown:
            block.landing = pages.take(block.nbytes)
            self.shown[block] = None  # first: what is there later may be the file
            try:
                pages.move(block.address, block.landing, block.nbytes)
            except MappingError:
                self._stay(block)
                raise
        try:
            self._show(block)
        except MappingError:
            ctypes.memmove(block.address, block.landing, block.nbytes)
            self._stay(block)
            raise
        block.touched = False
        landing, block.landing = block.landing, 0
        self._give(landing, block)

    def _show(self, block: Block) -> None:
        address = block.address
        for fd, offset, nbytes in self.pieces(block):
            pages.show_file(address, nbytes, fd, offset)
            address += nbytes
        assert address == block.address + block.nbytes, "a block is whole pages: it has no ends"

    def _stay(self, block: Block) -> None:
        """The block's bytes are in its own memory again, or still."""
        self.shown.pop(block, None)
        landing, block.landing = block.landing, 0
        pages.release(landing, block.nbytes)

    def pieces(self, block: Block) -> list[tuple[int, int, int]]:
        """Where a block that is away lies: (descriptor, offset in the file, bytes) each."""
        return self.tiers.pieces(_record(block))

    def drop(self, block: Block) -> None:
        self.tiers.drop(_record(block))

    # -- back --------------------------------------------------------------------------------------

    def start_back(self, block: Block, *, is_touched: bool, urgent: bool) -> None:
        record = _record(block)
        block.arrival = back = self.tiers.get(record, block.landing, owner=block, urgent=urgent)
        if not is_touched:
            self._coming.add(block)
        self.log.count(back.reads)

    def land(self, block: Block, *, since_user_ran: bool) -> None:
        if block in self.shown:
            assert isinstance(block.arrival, Return), "it was started here"
            self.log.wait(self.tiers, block, block.arrival.reads, "to come back")
            if not has_landed(block):
                self._read_again(block)
            pages.move(block.landing, block.address, block.nbytes)
            self.shown.pop(block, None)
        landing, block.landing = block.landing, 0
        if landing:
            pages.release(landing, block.nbytes)

    def _read_again(self, block: Block) -> None:
        """What has changed on its way, and not on the disk, is right the second time."""
        record = _record(block)
        again = self.tiers.get(record, block.landing, owner=block, urgent=True)
        self.log.count(again.reads)
        self.log.wait(self.tiers, block, again.reads, "to come back")
        if not has_landed(block):
            raise came_back_changed(block, self.tiers.where(record))

    @property
    def coming_bytes(self) -> int:
        with self.lock:
            self._coming = {b for b in self._coming if b.arrival is not None and not b.arrival.done}
            return sum(block.nbytes for block in self._coming)

    def link(self, hardware: Hardware) -> Link | None:
        return hardware.storage_link


def _record(block: Block) -> Away:
    assert isinstance(block.record, Away), "it was made here"
    return block.record
