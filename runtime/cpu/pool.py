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
from teraplan.runtime.cpu.page_pool import PagePool
from teraplan.runtime.process.pages import HUGE_PAGE_BYTES, round_up

_R = TypeVar("_R")


class CpuPool:
    """Blocks for large tensors. All methods are safe from any thread.

    A process has one budget, so those who train in it share one pool: `join` and `leave` it.
    """

    def __init__(self) -> None:
        self._pages: PagePool | None = None
        """None until somebody needs it: it is compiled."""
        self.num_blocks_made = 0
        """So far, of memory that was elsewhere or is fresh: that may be touched only later."""
        self.slack_bytes = 0
        """So much more may be mapped while something waits."""
        self.room_bytes: int | None = None
        """At most so much, where something else takes what is not in use here; None: nothing."""

    def serve(self) -> str:
        """Be where PyTorch has the memory of large tensors from; why not, if that cannot be."""
        return cpu_allocator.serve(self)

    def close(self) -> None:
        """Unmap what waits; what is in use is unmapped when its tensor goes."""
        cpu_allocator.stop(self)
        self._change(PagePool.close)

    @property
    def handle(self) -> int:
        """In the library."""
        return self._made_pages.handle

    @property
    def held_bytes(self) -> int:
        """In use and waiting together."""
        return self.in_use_bytes + self.waiting_bytes

    @property
    def in_use_bytes(self) -> int:
        """Of blocks that tensors have."""
        return self._pages.in_use_bytes if self._pages is not None else 0

    @property
    def waiting_bytes(self) -> int:
        """Of blocks that no tensor has."""
        return self._pages.nbytes if self._pages is not None else 0

    def owns(self, address: int) -> bool:
        """True if a tensor that starts at `address` has its memory from here."""
        return self._pages is not None and self._pages.owns(address)

    def settle(self) -> None:
        """What has been freed is one with what waits beside it."""
        if self._pages is not None:
            self._pages.join()

    def make(self, nbytes: int) -> bool:
        """Let a block of `nbytes`, whole pages, wait for its tensor; False: there is no memory.

        It is made of what waits, as far as slack and room do not reach; what it does not need of
        that is unmapped.
        """
        waiting = self._made_pages
        in_use_bytes = waiting.in_use_bytes + nbytes
        most_bytes = max(waiting.most_in_use_bytes, in_use_bytes)
        beyond_bytes = in_use_bytes + waiting.nbytes - most_bytes - self.slack_bytes
        if self.room_bytes is not None:
            beyond_bytes = max(beyond_bytes, nbytes - self.room_bytes)
        _unmap(waiting, beyond_bytes - nbytes)
        self.num_blocks_made += 1
        before = waiting.nbytes
        try:
            waiting.make(nbytes, _reused(nbytes, beyond_bytes))
        except OSError:
            return False
        fresh_bytes = waiting.nbytes - before
        if fresh_bytes:
            self.slack_bytes = max(0, self.slack_bytes - fresh_bytes)
            if self.room_bytes is not None:
                self.room_bytes = max(0, self.room_bytes - fresh_bytes)
        return True

    def trim(self) -> None:
        """Unmap every waiting block, and forget how much has been in use at once."""

        def trim(waiting: PagePool) -> None:
            waiting.clear()
            waiting.lower_most(waiting.most_in_use_bytes)

        self._change(trim)

    def lower(self, nbytes: int) -> None:
        """Hold `nbytes` less from now on, in use and waiting, than the most in use so far."""

        def lower(waiting: PagePool) -> None:
            waiting.lower_most(nbytes)
            _unmap(waiting, waiting.in_use_bytes + waiting.nbytes - waiting.most_in_use_bytes)

        self._change(lower)

    def shrink(self, nbytes: int) -> int:
        """Unmap waiting blocks of at least `nbytes` if there are so many; bytes unmapped."""
        if nbytes <= 0:
            return 0

        def shrink(waiting: PagePool) -> int:
            before = waiting.nbytes
            _unmap(waiting, nbytes)
            return before - waiting.nbytes

        return self._change(shrink) or 0

    def lend(self, nbytes: int) -> int | None:
        """See `SparePages`: memory that waits for a tensor."""
        return self._change(lambda waiting: waiting.take_piece(nbytes))

    def hand_in(self, address: int, nbytes: int) -> None:
        """See `SparePages`: from now on it waits for a tensor."""
        self._made_pages.give_piece(address, nbytes)

    @property
    def _made_pages(self) -> PagePool:
        if self._pages is None:
            self._pages = PagePool()
            weakref.finalize(self, self._pages.close).atexit = False
        return self._pages

    def _change(self, action: Callable[[PagePool], _R]) -> _R | None:
        """What `action` returns, with the lock that PyTorch's requests take; None: nothing is here.

        No context manager of our own: an interrupt at the end of its beginning would leave the lock
        taken for as long as somebody keeps the traceback.
        """
        if self._pages is None:
            return None
        with cpu_allocator.lock:
            return action(self._pages)


def _unmap(waiting: PagePool, nbytes: int) -> None:
    if nbytes > 0:
        waiting.shrink(round_up(nbytes, UNIT_BYTES))


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
