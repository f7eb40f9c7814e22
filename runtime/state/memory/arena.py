"""The memory of the training state: which tensors are in it, which are away.

    allocate -> use .. done -> leave -> prefetch -> use ..        the tensor is freed -> forgotten

Between `use` and `done` a block is in memory. Otherwise it may be away, in host memory or storage,
and its tensors show what is there. At no time do blocks and waiting memory take more than
`limit_bytes`, unless what is in use at once does. Unchanged bytes are not written again. How bytes
get from one place to another is the device's matter (`BlockMemory`); when, is decided here.
"""

from collections import Counter, deque
from collections.abc import Callable, Iterable
from functools import partial

import torch

from teraplan.errors import StorageFullError
from teraplan.runtime.process.whole import whole
from teraplan.runtime.state.memory.block import Block, Key, Place
from teraplan.runtime.state.memory.block_memory import BlockMemory
from teraplan.runtime.state.memory.block_moves import BlockMoves
from teraplan.runtime.state.memory.movable import is_movable, is_plain
from teraplan.runtime.state.memory.timeline import NEVER, Timeline


class StateArena(BlockMoves):
    """Blocks in memory and below it. One thread at a time, but for tensors that end."""

    def __init__(self, memory: BlockMemory, limit_bytes: int) -> None:
        super().__init__(memory)
        memory.limit_bytes = limit_bytes
        self.blocks, self.log = memory.blocks, memory.log
        self.sizes: dict[Key, int] = {}
        """Bytes of everything that has ever been here."""
        self.make_room: Callable[[int], object] | None = None
        """Called before so many bytes more are held, where something else may be in their place."""
        self.timeline = Timeline()
        self.overrun_bytes = 0
        """The most that blocks in use at once have taken beyond the limit."""
        self.why_stayed = ""
        """Why a block that was to leave stayed, the last time that one did."""
        self._lock = memory.lock
        self._alive: Counter[Key] = Counter()
        self._emptied: deque[Block] = deque()

    # -- blocks ----------------------------------------------------------------------------------

    def block_of(self, tensor: torch.Tensor) -> Block | None:
        """The block of a tensor that lives here, None for any other."""
        return self.memory.block_of(tensor) if is_plain(tensor) else None

    def takes(self, tensor: torch.Tensor) -> bool:
        """True if the tensor is worth moving, and its memory can be anywhere."""
        return is_movable(tensor, self.memory.device)

    def open(
        self, nbytes: int, key: Key, what: str, *, shape: tuple[int, ...], dtype: str
    ) -> Block:
        """A block in memory, with nothing in it yet."""
        size = self.memory.size_of(nbytes)
        with self._lock:
            self._settle()
            address, _ = self._take(size)
            block = Block(
                key=key, what=what, shape=shape, dtype=dtype, address=address, nbytes=size
            )
            self.blocks[block], self.sizes[key] = None, size
            self._alive[key] += 1
            self._in_memory[block] = None
        return block

    def place(self, block: Block, like: torch.Tensor, offset: int = 0) -> torch.Tensor:
        """An uninitialized tensor as `like` in a block, which ends with its last tensor."""
        with self._lock:
            return self.memory.place(block, like, offset)

    def close_block(self, block: Block) -> None:
        """The block is complete: it ends with its last tensor, and keeps what these take."""
        with self._lock:
            block.is_open = False
            nbytes = self.memory.size_of(block.filled_bytes)
            if not block.num_tensors:
                self._emptied.append(block)
            elif block.place is Place.MEMORY and block.record is None and nbytes < block.nbytes:
                self.memory.cut(block, nbytes)
                self.sizes[block.key] = block.nbytes

    def reserve(self, nbytes: int) -> None:
        """Keep `nbytes` of the limit for memory that is not from here, until `unreserve`."""
        with self._lock:
            self._settle()
            self._make_room(nbytes)
            self.memory.held.count(nbytes)

    def unreserve(self, nbytes: int) -> None:
        """So much of what was reserved is free again."""
        with self._lock:
            self.memory.held.count(-nbytes)

    def close(self) -> None:
        """Keep no memory for later: what a tensor has is unmapped when it ends. Idempotent."""
        self.make_room, self.memory.limit_bytes = None, 0  # so nothing waits from now on
        self.memory.held.spare = None
        self.memory.held.shrink_to(0)
        self.memory.close(self._forget_ended)

    @property
    def limit_bytes(self) -> int:
        """What the blocks may take now."""
        return self.memory.limit_bytes

    @property
    def total_bytes(self) -> int:
        """Of all blocks, wherever they are."""
        return self.memory.total_bytes

    @property
    def held_bytes(self) -> int:
        """In memory, waiting memory included."""
        return self.memory.held_bytes

    @property
    def in_use_bytes(self) -> int:
        """Of what is held, what blocks have."""
        return self.memory.held.in_use_bytes

    # -- uses ------------------------------------------------------------------------------------

    def use(self, block: Block, *, writes: bool = False, may_write: bool = False) -> None:
        """Bring the block into memory, to stay until `done`.

        Args:
            block: to be used.
            writes: its record is of no use any more.
            may_write: look whether it is before the block leaves.

        Raises:
            StorageError, IntegrityError, DeadlineError: its bytes could not be had.
        """
        with self._lock:
            self._settle()
            block.position = self.timeline.note(block.key)
            block.leaving = False
            if block.place is not Place.MEMORY:
                self._bring(block)
            if writes:
                block.changed = True
                self._free_host(block)
            if may_write:
                self.memory.changes(block)
            self._in_memory.move_to_end(block)
            block.uses += 1

    def bring_all(self, blocks: Iterable[Block]) -> None:
        """Start bringing back those that are away: all of `blocks` are about to be used at once."""
        blocks = list(blocks)
        with self._lock:
            self._settle()
            for block in blocks:  # none has to make room for another
                block.uses += 1
                block.leaving = False
            try:
                for block in blocks:
                    if block.place is Place.AWAY:
                        self._start_back(block, urgent=True)
            finally:
                for block in blocks:
                    block.uses -= 1

    def done(self, block: Block, *, leaves: bool) -> None:
        """The use is over; `leaves`: it is to leave before its next one."""
        with self._lock:
            block.uses -= 1
            if leaves and not block.uses and block.place is Place.MEMORY:
                self._start_leaving(block)
            self._settle()

    def end_uses(self) -> None:
        """No use goes on."""
        with self._lock:
            for block in self.blocks:
                block.uses = 0

    def prefetch(self) -> None:
        """Start bringing back what is used next, as far as there is room."""
        with self._lock:
            self._settle()
            room = self.limit_bytes - self.in_use_bytes
            for key in self.timeline.ahead():
                if room <= 0 or not self._away:
                    return
                block = self._away.get(key)
                if block is None:
                    if not self._alive[key]:  # a gradient that will be made
                        room -= self.sizes.get(key, 0)
                    continue
                room -= block.nbytes
                may_come = self.memory.may_come_beside_user_code(block)
                if room >= 0 and may_come and block.place is Place.AWAY:
                    self._start_back(block)

    # -- what a plan asks for --------------------------------------------------------------------

    def keep_to(self, limit_bytes: int) -> None:
        """From now on hold no more than this, if what is in use lets it."""
        with self._lock:
            self.memory.limit_bytes = limit_bytes
            self._settle()
            self._make_room(0)

    def send_out(self, block: Block, host_bytes: int = 0) -> None:
        """Start copying the block out, its first bytes to host memory, unless it is in use.

        Where a tier has no room for its part, all goes to the other; if that has none, it stays.
        """
        with self._lock:
            if self._is_here(block) and not block.uses and not block.leaving:
                try:
                    self._start_leaving(block, host_bytes)
                except StorageFullError as full:
                    self.why_stayed = str(full)

    def see_out(self, block: Block, host_bytes: int = 0) -> None:
        """Wait until the block has left, unless it is in use."""
        with self._lock:
            self.send_out(block, host_bytes)
            while self._is_here(block) and block.leaving:
                self._finish_leaving(block)

    def fetch(self, block: Block) -> None:
        """Start bringing the block back, if it is away."""
        with self._lock:
            if block in self.blocks and block.place is Place.AWAY:
                self._start_back(block)

    def _is_here(self, block: Block) -> bool:
        return block in self.blocks and block.place is Place.MEMORY

    def user_may_have_run(self) -> None:
        """Anything may have been written to any block since the last call."""
        self._epoch += 1

    def user_may_run(self) -> None:
        """A graph's last site: see to it that what is written to any block then is not lost."""
        with self._lock:
            for block in list(self._coming):
                if not self.memory.may_come_beside_user_code(block):
                    self._bring(block)

    # -- going out and coming back ---------------------------------------------------------------

    def _settle(self) -> None:
        """Take out what has been written; forget what has ended."""
        for _ in range(len(self._leaving)):
            block = self._leaving.popleft()
            if not block.leaving or block.record is None:
                continue
            if block.record.done:
                self._finish_leaving(block)
            else:
                self._leaving.append(block)
        self._forget_ended()

    def _start_back(self, block: Block, *, urgent: bool = False) -> None:
        landing, is_touched = self._take(block.nbytes)
        self._start_to(block, landing, is_touched=is_touched, urgent=urgent)

    def _bring(self, block: Block) -> None:
        if block.place is Place.AWAY:
            self._start_back(block, urgent=True)
        self._land(block)

    # -- memory ----------------------------------------------------------------------------------

    def _take(self, nbytes: int) -> tuple[int, bool]:
        """Address of memory for a block, after making room for it, and if it has been touched."""
        held = self.memory.held
        waiting = held.take_waiting(nbytes)
        if waiting is None:
            self._make_room(nbytes)
            waiting = held.take_waiting(nbytes) or held.take_spare(nbytes)
        if waiting is not None:
            return waiting, True
        if self.make_room is not None:
            self.make_room(nbytes)
        return held.take_fresh(nbytes), False

    def _make_room(self, nbytes: int) -> None:
        """Let blocks leave until `nbytes` more fit, those that are needed last first."""
        while (beyond := self.in_use_bytes + nbytes - self.limit_bytes) > 0:
            if not self._let_one_leave():
                self.overrun_bytes = max(self.overrun_bytes, beyond)
                break
        self.memory.held.shrink_to(self.limit_bytes - nbytes)

    def _let_one_leave(self) -> bool:
        while self._leaving:
            block = self._leaving.popleft()
            if block.leaving and block.record is not None:
                self._finish_leaving(block)
                return True
        idle = [block for block in self._in_memory if not block.uses]
        next_use, full = self.timeline.next_use, ""
        while idle:
            victim = max(idle, key=lambda block: NEVER + 1 if block.spent else next_use(block.key))
            try:
                self._start_leaving(victim)
            except StorageFullError as error:  # another may have somewhere to go
                full = full or str(error)
                idle.remove(victim)
            else:
                return True
        if full:
            raise StorageFullError(full)
        return self._take_one_that_comes()

    def _take_one_that_comes(self) -> bool:
        """Wait for a block that was to come back ahead; now it can leave."""
        coming = next((block for block in self._coming if not block.uses), None)
        if coming is None:
            return False
        self._bring(coming)
        return True

    def _forget_ended(self) -> None:
        """Give back the memory of blocks whose tensors are gone."""
        self._emptied.extend(b for b in self.memory.tenants.emptied() if not b.is_open)
        for _ in range(len(self._emptied)):
            block = self._emptied.popleft()
            busy = block.arrival is not None and not block.arrival.done
            if busy or (block.record is not None and not block.record.done):
                self._emptied.append(block)
                continue
            whole(partial(self._forget, block))

    def _forget(self, block: Block) -> None:
        if block in self.blocks:
            del self.blocks[block]
            self._alive[block.key] -= 1
        if self._away.get(block.key) is block:
            del self._away[block.key]
        self._in_memory.pop(block, None)
        self._coming.pop(block, None)
        self._drop_record(block)
        self.memory.end(block)
        self.memory.held.shrink_to(self.limit_bytes)
