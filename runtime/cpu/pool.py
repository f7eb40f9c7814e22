"""Memory of large CPU tensors, reused while it is warm and given back when it would be too much.

glibc's heap is no place for tensors that come and go under a budget: after one step its free holes
held as much as the tensors did (1,001 MiB of heap for 626 MiB in use), and blocks that are mappings
of their own cost a page fault per 4 KiB. Here freed memory waits for the next tensors, and repeated
layers ask for the same sizes again and again. In use and waiting together never exceed the most
that has been in use at once, unless there is slack under the budget: where no free range is long
enough, a tensor gets pages of several. PyTorch asks and gives back through `allocator`.
"""

import weakref
from collections.abc import Callable
from typing import TypeVar

from teraplan.runtime.cpu import allocator as cpu_allocator
from teraplan.runtime.cpu.allocator import UNIT_BYTES
from teraplan.runtime.cpu.free_ranges import PageBlock
from teraplan.runtime.cpu.page_pool import PagePool
from teraplan.runtime.process.pages import HUGE_PAGE_BYTES, round_up

_R = TypeVar("_R")


class CpuPool:
    """Blocks for large tensors. All methods are safe from any thread.

    A process has one budget, so those who train in it share one pool: `join` and `leave` it.
    """

    def __init__(self) -> None:
        self._waiting = PagePool()
        self._taken: dict[int, PageBlock] = {}
        self._in_use_bytes = 0
        self._most_bytes = 0
        self.num_blocks_made = 0
        """So far, of memory that was elsewhere or is fresh: that may be touched only later."""
        self.slack_bytes = 0
        """So much more may be mapped while something waits."""
        self.room_bytes: int | None = None
        """At most so much, where something else takes what is not in use here; None: nothing."""
        weakref.finalize(self, self._waiting.clear).atexit = False

    def serve(self) -> str:
        """Be where PyTorch has the memory of large tensors from; why not, if that cannot be."""
        return cpu_allocator.serve(self)

    def close(self) -> None:
        """Unmap what waits; what is in use is unmapped when its tensor goes."""
        cpu_allocator.stop(self)
        self._change(self._clear)

    @property
    def held_bytes(self) -> int:
        """In use and waiting together."""
        return self._in_use_bytes + self._waiting.nbytes

    @property
    def in_use_bytes(self) -> int:
        """Of blocks that tensors have."""
        cpu_allocator.take_back()
        return self._in_use_bytes

    @property
    def waiting_bytes(self) -> int:
        """Of blocks that no tensor has."""
        cpu_allocator.take_back()
        return self._waiting.nbytes

    def owns(self, address: int) -> bool:
        """True if a tensor that starts at `address` has its memory from here."""
        return address in self._taken

    def take(self, nbytes: int) -> int:
        """Address of a block for a tensor of `nbytes`, 0 if the system has no memory."""
        nbytes = round_up(nbytes)
        try:
            block = self._take(nbytes)
            self._taken[block.address] = block
            self._in_use_bytes += nbytes
        except OSError:
            return 0
        except BaseException:
            self._recover()
            raise
        return block.address

    def give_back(self, address: int) -> None:
        """A block's tensor is gone, if it had one."""
        block = self._taken.get(address)
        if block is None:
            return
        try:
            del self._taken[address]
            self._in_use_bytes -= block.nbytes
            self._waiting.give(block)
        except BaseException:
            self._recover()
            raise

    def trim(self) -> None:
        """Unmap every waiting block, and forget how much has been in use at once."""

        def trim() -> None:
            self._unmap(self._waiting.nbytes)
            self._most_bytes = self._in_use_bytes

        self._change(trim)

    def lower(self, nbytes: int) -> None:
        """Hold `nbytes` less from now on, in use and waiting, than the most in use so far."""

        def lower() -> None:
            self._most_bytes = max(self._in_use_bytes, self._most_bytes - nbytes)
            self._unmap(self._in_use_bytes + self._waiting.nbytes - self._most_bytes)

        self._change(lower)

    def shrink(self, nbytes: int) -> int:
        """Unmap waiting blocks of at least `nbytes` if there are so many; bytes unmapped."""
        if nbytes <= 0:
            return 0

        def shrink() -> int:
            before = self._waiting.nbytes
            self._unmap(nbytes)
            return before - self._waiting.nbytes

        return self._change(shrink)

    def lend(self, nbytes: int) -> int | None:
        """See `SparePages`: memory that waits for a tensor."""
        return self._change(lambda: self._waiting.take_piece(nbytes))

    def hand_in(self, address: int, nbytes: int) -> None:
        """See `SparePages`: from now on it waits for a tensor."""
        self._change(lambda: self._waiting.give_piece(address, nbytes))

    def _change(self, action: Callable[[], _R]) -> _R:
        """What `action` returns, with the lock that PyTorch's requests take, and what was freed.

        No context manager of our own: an interrupt at the end of its beginning would leave the lock
        taken for as long as somebody keeps the traceback.
        """
        cpu_allocator.take_back()
        with cpu_allocator.lock:
            return self._recovering(action)

    def _recovering(self, action: Callable[[], _R]) -> _R:
        try:
            return action()
        except BaseException:
            self._recover()
            raise

    def _clear(self) -> None:
        self._taken.clear()
        self._most_bytes = self._in_use_bytes = 0
        self._waiting.clear()

    def _recover(self) -> None:
        """Count anew after an interrupt: what was in its hands may be lost, all else is right."""
        self._in_use_bytes = sum(block.nbytes for block in self._taken.values())
        self._waiting.recover()

    def _take(self, nbytes: int) -> PageBlock:
        block = self._waiting.take(nbytes)
        if block is None:
            cpu_allocator.take_back_now()  # not earlier: alone a block can serve its own size again
            block = self._waiting.take(nbytes)
        in_use_bytes = self._in_use_bytes + nbytes - cpu_allocator.num_returned_bytes()
        self._most_bytes = max(self._most_bytes, in_use_bytes)
        if block is None:
            beyond = in_use_bytes + self._waiting.nbytes - self._most_bytes
            beyond -= self.slack_bytes
            if self.room_bytes is not None:
                beyond = max(beyond, nbytes - self.room_bytes)
            block = self._new_block(nbytes, beyond)
        return block

    def _new_block(self, nbytes: int, beyond_bytes: int) -> PageBlock:
        """A block from `beyond_bytes` of what waits; what it does not need of that is unmapped."""
        self._unmap(beyond_bytes - nbytes)
        self.num_blocks_made += 1
        before = self._waiting.nbytes
        block = self._waiting.make(nbytes, _reused(nbytes, beyond_bytes))
        fresh_bytes = nbytes - (before - self._waiting.nbytes)
        if fresh_bytes:
            self.slack_bytes = max(0, self.slack_bytes - fresh_bytes)
            if self.room_bytes is not None:
                self.room_bytes = max(0, self.room_bytes - fresh_bytes)
        return block

    def _unmap(self, nbytes: int) -> None:
        self._waiting.shrink(max(0, round_up(nbytes, UNIT_BYTES)))


_shared = CpuPool()
_users: weakref.WeakSet[object] = weakref.WeakSet()


def join(user: object) -> tuple[CpuPool, str]:
    """The process's pool, which serves from now on; why not, if it cannot."""
    _users.add(user)
    return _shared, _shared.serve()


def leave(user: object) -> None:
    """`user` needs it no more; the last to leave closes it."""
    _users.discard(user)
    if not _users:
        _shared.close()


def _reused(nbytes: int, beyond_bytes: int) -> int:
    """Bytes of a new block that come out of what waits: whole huge pages, where the block has any.

    Else the seam between them and fresh memory would take a huge page from both.
    """
    unit = HUGE_PAGE_BYTES if nbytes >= HUGE_PAGE_BYTES else UNIT_BYTES
    return min(nbytes, max(0, round_up(beyond_bytes, unit)))
