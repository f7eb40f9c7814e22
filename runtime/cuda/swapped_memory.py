"""Blocks on a GPU: what is away shows pinned host memory, or raises where somebody looks at it.

    in memory         tensors -> device memory
    in host memory    tensors -> pinned memory, right for whoever reads or writes there, and slower
    in storage        tensors -> nothing: an error says where to read them

In storage is optimizer state alone, and, where host memory is full, gradients of parameters that
have been updated: nothing but the program may still want them, and hardly ever does.

A tensor keeps its storage, and what that points to is swapped, so all views follow, those of the
user too. Work that has been queued keeps the address that it was given: device memory goes back to
the allocator in the order of the computation's stream, which waits for copies to host memory. For
storage the host waits, until what is there cannot be lost any more.

No bytes are looked at, since the host would have to wait for them: a record counts as that of a
block's bytes only if no code but graphs has run since it was made or read, and none of these was to
change the block. Where other code may run, nothing may be on its way back from host memory, or what
is written there then would be lost.

Tested on a CPU with streams that run as threads (`tests/fakes`); not run on a GPU.
"""

import logging
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch

from teraplan.errors import StorageError, StorageFullError
from teraplan.runtime.cuda.copies import CudaArrival, CudaCopy, HostCopy
from teraplan.runtime.cuda.runtime import CudaRuntime
from teraplan.runtime.cuda.storage_pointers import let_raise, point_to, storage_at
from teraplan.runtime.cuda.stored_view import view_of
from teraplan.runtime.cuda.tiers import CudaTiers
from teraplan.runtime.process.pages import PAGE_BYTES, round_up
from teraplan.runtime.state.memory.block import Block, Place
from teraplan.runtime.state.memory.block_memory import BlockMemory
from teraplan.runtime.state.memory.lease import span_nbytes
from teraplan.values.hardware import Hardware, Link, Tier
from teraplan.values.run_record import Direction
from teraplan.values.step_trace import TensorKind

_log = logging.getLogger(__name__)

_GRADIENT_TOO = 2
"""A parameter, which has to have room in host memory, and its gradient."""
_HIDDEN_STATE = (
    "{} is in storage, where a GPU does not reach it. optimizer.state_dict() has tensors that show "
    "what is there; teraplan.detach(optimizer) brings it back at the next step; with a larger "
    "host_budget it is in host memory instead"
)
_HIDDEN_GRADIENT = (
    "{}, with which its parameter has been updated, is in storage, where a GPU does not reach it, "
    "since host memory is full. Look at gradients before optimizer.step(), and let zero_grad "
    "forget them (set_to_none=True), or raise host_budget"
)


class _Shown(NamedTuple):
    """A tensor's storage, and where in its block that begins."""

    storage: "weakref.ref[torch.UntypedStorage]"
    offset: int


class _Hold:
    """A copy below the device, until neither its block nor a view needs it."""

    def __init__(self, copy: CudaCopy) -> None:
        self.copy = copy

    def __del__(self) -> None:
        self.copy.drop()  # documented as safe in finalizers


@dataclass(slots=True, eq=False)
class _Away:
    hold: _Hold

    @property
    def done(self) -> bool:
        return self.hold.copy.written

    @property
    def failed(self) -> bool:
        return self.hold.copy.failed

    @property
    def takes_host(self) -> bool:
        return self.hold.copy.host_bytes > 0


class _DeviceMemory:
    """Device memory by address, of the stream that is current."""

    def __init__(self, cuda: CudaRuntime, alignment: int) -> None:
        self._cuda, self._alignment = cuda, alignment
        self._tensors: dict[int, torch.Tensor] = {}

    def take(self, nbytes: int) -> int:
        memory = self._cuda.empty(nbytes + self._alignment - 1)
        offset = -memory.data_ptr() % self._alignment
        address = memory.data_ptr() + offset
        self._tensors[address] = memory.narrow(0, offset, nbytes)
        return address

    def at(self, address: int, nbytes: int) -> torch.Tensor:
        """The first bytes of what begins there, (nbytes,), uint8."""
        return self._tensors[address].narrow(0, 0, nbytes)

    def release(self, address: int, nbytes: int) -> None:
        memory = self._tensors.pop(address)
        self._cuda.used_by(memory, self._cuda.current_stream())


class SwappedMemory(BlockMemory):
    """See `BlockMemory`."""

    transfer_ns = 30_000
    """Assumed: a few calls of the driver, each some microseconds."""
    is_read_by_host = False
    is_told_by_device = True

    def __init__(self, cuda: CudaRuntime, tiers: CudaTiers, *, stores_state: bool) -> None:
        """`stores_state`: optimizer state may go to storage, too."""
        direct = tiers.storage.takes_device_memory
        self._memory = _DeviceMemory(cuda, PAGE_BYTES if direct else 1)
        super().__init__(self._memory, keeps=False)
        self.device = cuda.device
        self.hides = stores_state
        self._cuda, self._tiers = cuda, tiers
        self._shown: dict[Block, list[_Shown]] = {}

    # -- tensors -----------------------------------------------------------------------------------

    def size_of(self, nbytes: int) -> int:
        return round_up(nbytes, PAGE_BYTES)

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
        address, block.address = block.address, 0
        landing, block.landing = block.landing, 0
        if block.place is Place.MEMORY and address:
            self.held.give(address, block.nbytes)
        elif block.place is Place.COMING and landing:
            block.arrival = None  # the stream of the memory waits for the copy to it
            self.held.give(landing, block.nbytes)

    def readable(self, tensor: torch.Tensor) -> torch.Tensor:
        block = self.block_of(tensor)
        if block is None or not self._is_hidden(block):
            return tensor
        hold, storage = _record(block).hold, tensor.untyped_storage()
        offset = next(s.offset for s in self._shown[block] if s.storage() is storage)
        # The view has the copy until it ends, whatever becomes of the block.
        return view_of(hold.copy, tensor, offset, self._tiers.storage, [hold].clear)

    def close(self, release: Callable[[], None]) -> None:
        with self.lock:
            for block in filter(self._is_hidden, list(self.blocks)):
                self._bring_home(block)
        super().close(release)

    def _bring_home(self, block: Block) -> None:
        """Let a block be in device memory, whatever room there is, since nobody can read it."""
        if self._tiers.storage.is_closed:  # as at the end of the process
            return
        try:
            if block.place is Place.AWAY:
                block.landing = self.held.take_fresh(block.nbytes)
                self.start_back(block, is_touched=False, urgent=True)
            self.land(block, since_user_ran=True)
        except Exception as error:  # noqa: BLE001  others may come
            _log.error("%s is lost with its session: %s", block.label, error)
        else:
            block.place = Place.MEMORY

    def _show(self, block: Block, address: int) -> None:
        """Let the block's tensors look at what begins at `address`."""
        for storage, offset in self._alive(block):
            point_to(storage, address + offset)

    def _alive(self, block: Block) -> Iterator[tuple[torch.UntypedStorage, int]]:
        """The storages of the block's tensors, and where in it they begin."""
        for storage, offset in self._shown.get(block, ()):
            alive = storage()
            if alive is not None:
                yield alive, offset

    # -- out ---------------------------------------------------------------------------------------

    def start_out(self, block: Block, host_bytes: int | None) -> None:
        copy = self._sent(block, host_bytes)
        block.record = _Away(_Hold(copy))
        self._note(copy, Direction.OUT)

    def _sent(self, block: Block, host_bytes: int | None) -> CudaCopy:
        if not self._may_be_stored(block):
            return self._to_host(block)
        if host_bytes is None:
            host_bytes = block.nbytes if self._has_host_room(block) else 0
        if host_bytes < block.nbytes:
            return self._to_storage(block, host_bytes)
        try:
            return self._to_host(block)
        except StorageFullError:
            return self._to_storage(block, 0)

    def _to_host(self, block: Block) -> HostCopy:
        """On its way to host memory, in the place of second copies if there is no other."""
        host, source = self._tiers.host, self._memory.at(block.address, block.nbytes)
        while True:
            try:
                return HostCopy(host, host.send(source, block.label, is_shown=True))
            except StorageFullError:
                if not self._give_up_a_copy():
                    raise

    def _to_storage(self, block: Block, host_bytes: int) -> CudaCopy:
        """On its way there, but for the first bytes; to host memory, if one of both is full."""
        source = self._memory.at(block.address, block.nbytes)
        try:
            return self._tiers.put_in_storage(source, block.label, host_bytes=host_bytes)
        except StorageFullError:
            return self._to_host(block)

    def _may_be_stored(self, block: Block) -> bool:
        """True if nothing but optimizers' steps, which bring it, is expected to look at it."""
        return self.hides and (block.spent or _is_optimizer_state(block))

    def _has_host_room(self, block: Block) -> bool:
        """True if that leaves room for what a plan wants there, and what can go nowhere else."""
        pool = self._tiers.host.pool
        wanted = max(self.planned_host_bytes, pool.in_use_bytes)
        if _is_optimizer_state(block):
            others = (b.record for b in self.blocks if _is_optimizer_state(b))
            wanted = max(wanted, self._shown_bytes + _host_bytes(others))
        return wanted + block.nbytes <= pool.limit_bytes

    @property
    def _shown_bytes(self) -> int:
        """Of what can go nowhere but to host memory, if no byte of it is in device memory."""
        parameters = (b for b in list(self.blocks) if b.key[0] is TensorKind.PARAMETER)
        return _GRADIENT_TOO * sum(block.nbytes for block in parameters)

    def _give_up_a_copy(self) -> bool:
        """Drop a record whose bytes are in device memory, too; False if there is none."""
        for block in self.blocks:
            is_second = block.place is Place.MEMORY and block.record is not None
            if is_second and not block.leaving and _record(block).takes_host:
                self.drop(block)
                block.record, block.changed = None, True
                return True
        return False

    def is_as_written(self, block: Block, *, since_user_ran: bool) -> bool:
        return since_user_ran

    def wait_out(self, block: Block) -> None:
        try:
            _record(block).hold.copy.wait_written()
        except StorageError:  # no store could take it
            self.drop(block)
            block.record = _Away(_Hold(self._to_host(block)))
            _record(block).hold.copy.wait_written()

    def take_out(self, block: Block) -> None:
        copy = _record(block).hold.copy
        copy.wait_written()
        if isinstance(copy, HostCopy):
            self._show(block, copy.shown.data_ptr())
        else:
            text = _HIDDEN_GRADIENT if block.spent else _HIDDEN_STATE
            for storage, _ in self._alive(block):
                let_raise(storage, text.format(block.label))
        address, block.address = block.address, 0
        if address:
            self.held.give(address, block.nbytes)

    def drop(self, block: Block) -> None:
        record, block.record = block.record, None
        del record  # a view may hold on to what it has

    # -- back --------------------------------------------------------------------------------------

    def start_back(self, block: Block, *, is_touched: bool, urgent: bool) -> None:
        copy, into = _record(block).hold.copy, self._memory.at(block.landing, block.nbytes)
        block.arrival = self._tiers.get(copy, urgent=urgent, into=into)
        self._note(copy, Direction.BACK)

    def land(self, block: Block, *, since_user_ran: bool) -> None:
        if block.address:
            return
        assert isinstance(block.arrival, CudaArrival), "it was started here"
        block.arrival.wait()
        copy = _record(block).hold.copy
        if isinstance(copy, HostCopy) and not since_user_ran:
            # and may have written to where it came from
            memory = self._memory.at(block.landing, block.nbytes)
            self._cuda.copy(memory, copy.shown, self._cuda.current_stream())
        self._show(block, block.landing)
        block.address = block.landing

    def may_come_beside_user_code(self, block: Block) -> bool:
        return not isinstance(_record(block).hold.copy, HostCopy)

    def _is_hidden(self, block: Block) -> bool:
        """True if its tensors raise where somebody looks at them."""
        away = block.place is not Place.MEMORY
        return away and not isinstance(_record(block).hold.copy, HostCopy)

    # -- facts -------------------------------------------------------------------------------------

    @property
    def needs_storage(self) -> bool:
        """True if host memory has no room for the whole state, and some of it can go elsewhere."""
        stored_bytes = sum(b.nbytes for b in list(self.blocks) if _is_optimizer_state(b))
        return self.hides and self._shown_bytes + stored_bytes > self._tiers.host.pool.limit_bytes

    @property
    def kept_free_bytes(self) -> int:
        """Of host memory, what plans leave to gradients whose parameters have been updated.

        They are the program's until the next `zero_grad`, which no plan knows of.
        """
        return self._shown_bytes // _GRADIENT_TOO if self.needs_storage else 0

    @property
    def host_bytes(self) -> int:
        """What the blocks take of the host tier."""
        return _host_bytes(block.record for block in list(self.blocks))

    def changes(self, block: Block) -> None:
        block.changed = True

    def link(self, hardware: Hardware) -> Link | None:
        return hardware.host_link

    def _note(self, copy: CudaCopy, direction: Direction) -> None:
        parts = {Tier.HOST: copy.host_bytes, Tier.STORAGE: copy.nbytes - copy.host_bytes}
        for tier, nbytes in parts.items():
            self.log.note(tier, direction, nbytes)


def _record(block: Block) -> _Away:
    assert isinstance(block.record, _Away), "it was made here"
    return block.record


def _host_bytes(records: Iterable[object]) -> int:
    return sum(r.hold.copy.host_bytes for r in records if isinstance(r, _Away))


def _is_optimizer_state(block: Block) -> bool:
    return block.key[0] is TensorKind.OPTIMIZER_STATE
