"""Blocks on a GPU: what is away shows pinned host memory, which kernels reach over the link.

    in memory   tensors -> device memory
    away        tensors -> pinned host memory, right for whoever reads or writes there, and slower

A tensor keeps its storage, and what that points to is swapped, so all views follow, those of the
user too. Work that has been queued keeps the address that it was given: device memory goes back to
the allocator in the order of the computation's stream, which waits for copies, not the host.

No bytes are looked at, since the host would have to wait for them: a record counts as that of a
block's bytes only if no code but graphs has run since it was made or read, and none of these was to
change the block. Where other code may run, nothing may be on its way back, or what is written to
host memory then would be lost.

Tested on a CPU with streams that run as threads (`tests/fakes`); not run on a GPU.
"""

import weakref
from dataclasses import dataclass
from typing import NamedTuple

import torch

from teraplan.errors import StorageFullError
from teraplan.hardware import Hardware, Link, Tier
from teraplan.run_record import Direction
from teraplan.runtime.cuda_runtime import CudaRuntime
from teraplan.runtime.host_tier import HostTier, InHost, Landing
from teraplan.runtime.pages import round_up
from teraplan.runtime.state.block import Block, Place
from teraplan.runtime.state.block_memory import BlockMemory
from teraplan.runtime.state.lease import span_nbytes
from teraplan.runtime.state.storage_pointers import point_to, storage_at

_GRANULE_BYTES = 512
"""PyTorch's allocator for GPUs gives multiples of it, at such addresses."""


class _Shown(NamedTuple):
    """A tensor's storage, and where in its block that begins."""

    storage: "weakref.ref[torch.UntypedStorage]"
    offset: int


@dataclass(frozen=True, slots=True, eq=False)
class _Away:
    inner: InHost
    takes_host = True
    failed = False

    @property
    def done(self) -> bool:
        return self.inner.left.query()


@dataclass(frozen=True, slots=True, eq=False)
class _Coming:
    inner: Landing

    @property
    def done(self) -> bool:
        return self.inner.arrived is None or self.inner.arrived.query()


class _DeviceMemory:
    """Device memory by address, of the stream that is current."""

    def __init__(self, cuda: CudaRuntime) -> None:
        self._cuda = cuda
        self.tensors: dict[int, torch.Tensor] = {}

    def take(self, nbytes: int) -> int:
        memory = self._cuda.empty(nbytes)
        address = memory.data_ptr()
        self.tensors[address] = memory
        return address

    def release(self, address: int, nbytes: int) -> None:
        memory = self.tensors.pop(address)
        self._cuda.used_by(memory, self._cuda.current_stream())


class SwappedMemory(BlockMemory):
    """See `BlockMemory`."""

    transfer_ns = 30_000
    """Assumed: a few calls of the driver, each some microseconds."""
    is_read_by_host = False
    is_told_by_device = True
    comes_beside_user_code = False

    def __init__(self, cuda: CudaRuntime, host: HostTier) -> None:
        self._memory = _DeviceMemory(cuda)
        super().__init__(self._memory, keeps=False)
        self.device = cuda.device
        self._cuda, self._host = cuda, host
        self._shown: dict[Block, list[_Shown]] = {}

    # -- tensors -----------------------------------------------------------------------------------

    def size_of(self, nbytes: int) -> int:
        return round_up(nbytes, _GRANULE_BYTES)

    def block_of(self, tensor: torch.Tensor) -> Block | None:
        return self.tenants.block_at(tensor.untyped_storage()._cdata)

    def place(self, block: Block, like: torch.Tensor, offset: int) -> torch.Tensor:
        storage = storage_at(block.address + offset, span_nbytes(like), self.device)
        ended = self.tenants.enter(block, storage._cdata)
        weakref.finalize(storage, ended).atexit = False
        self._shown.setdefault(block, []).append(_Shown(weakref.ref(storage), offset))
        made = torch.empty(0, dtype=like.dtype, device=self.device)
        return made.set_(storage, 0, tuple(like.shape), like.stride())

    def cut(self, block: Block, nbytes: int) -> None:
        """The allocator takes memory back as a whole."""

    def end(self, block: Block) -> None:
        self._shown.pop(block, None)
        if block.place is Place.MEMORY:
            self.held.give(block.address, block.nbytes)
        elif block.place is Place.COMING:
            block.arrival = None  # the stream of the memory waits for the copy to it
            self.held.give(block.landing, block.nbytes)

    def _show(self, block: Block, address: int) -> None:
        """Let the block's tensors look at what begins at `address`."""
        for storage, offset in self._shown.get(block, ()):
            alive = storage()
            if alive is not None:
                point_to(alive, address + offset)

    # -- out ---------------------------------------------------------------------------------------

    def start_out(self, block: Block, host_bytes: int | None) -> None:
        source = self._memory.tensors[block.address].narrow(0, 0, block.nbytes)
        block.record = _Away(self._sent(source, block.label))
        self.log.note(Tier.HOST, Direction.OUT, block.nbytes)

    def _sent(self, source: torch.Tensor, label: str) -> InHost:
        """On its way to host memory, in the place of second copies if there is no other."""
        while True:
            try:
                return self._host.send(source, label, is_shown=True)
            except StorageFullError:
                if not self._give_up_a_copy():
                    raise

    def _give_up_a_copy(self) -> bool:
        """Drop a record whose bytes are in device memory, too; False if there is none."""
        for block in self.blocks:
            if block.place is Place.MEMORY and block.record is not None and not block.leaving:
                self.drop(block)
                block.record, block.changed = None, True
                return True
        return False

    def is_as_written(self, block: Block, *, since_user_ran: bool) -> bool:
        return since_user_ran

    def wait_out(self, block: Block) -> None:
        self._host.let_go(_record(block))

    def take_out(self, block: Block) -> None:
        record = _record(block)
        self._host.let_go(record)
        assert record.lease is not None, "dropped records are shown nowhere"
        self._show(block, record.lease.parts[0].address)
        self.held.give(block.address, block.nbytes)
        block.address = 0

    def drop(self, block: Block) -> None:
        self._host.drop(_record(block))

    # -- back --------------------------------------------------------------------------------------

    def start_back(self, block: Block, *, is_touched: bool, urgent: bool) -> None:
        into = self._memory.tensors[block.landing].narrow(0, 0, block.nbytes)
        block.arrival = _Coming(self._host.fetch(_record(block), into=into))
        self.log.note(Tier.HOST, Direction.BACK, block.nbytes)

    def land(self, block: Block, *, since_user_ran: bool) -> None:
        record = _record(block)
        assert isinstance(block.arrival, _Coming), "it was started here"
        assert record.lease is not None, "what is coming has its record"
        memory = self._host.take(block.arrival.inner)
        if not since_user_ran:  # and may have written to where it came from
            self._cuda.copy(memory, record.lease.parts[0].tensor, self._cuda.current_stream())
        self._show(block, block.landing)
        block.address = block.landing

    # -- facts -------------------------------------------------------------------------------------

    @property
    def host_bytes(self) -> int:
        """What the blocks take of the host tier."""
        return sum(block.nbytes for block in list(self.blocks) if block.record is not None)

    def changes(self, block: Block) -> None:
        block.changed = True

    def link(self, hardware: Hardware) -> Link | None:
        return hardware.host_link


def _record(block: Block) -> InHost:
    assert isinstance(block.record, _Away), "it was made here"
    return block.record.inner
