"""Which tensors are in which block: one of its own, or several that share it (`chunks`)."""

import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial

from teraplan.runtime.process.locks import if_free
from teraplan.runtime.state.memory.block import Block


class Tenants:
    """Used by one thread at a time, but for tensors that end."""

    def __init__(self) -> None:
        self._block_at: dict[int, Block] = {}
        """By what a tensor's memory is known by: no other's is known so while it is there."""
        self._ended: deque[Block] = deque()
        self._release: Callable[[], None] | None = None
        self._lock = threading.Lock()
        """Held while `_release` runs."""

    def block_at(self, number: int) -> Block | None:
        """The block of the tensor whose memory is known by this; None if it is in none."""
        return self._block_at.get(number)

    def enter(self, block: Block, number: int) -> Callable[[], None]:
        """Another tensor is in a block; returns what to call when its memory is nobody's.

        It may be called in any thread, also in the middle of anything.
        """
        self._block_at[number] = block
        block.num_tensors += 1
        return partial(self._end, block, number)

    def close(self, release: Callable[[], None]) -> None:
        """Nobody will ask what is `emptied`: `release` does now, and whenever a tensor ends."""
        self._release = release
        if_free(self._lock, release)
        self._release_ended()

    def _end(self, block: Block, number: int) -> None:
        self._block_at.pop(number, None)  # now: the next tensor's may be known by it
        self._ended.append(block)
        self._release_ended()

    def _release_ended(self, at_exit: Callable[[], bool] = sys.is_finalizing) -> None:
        while self._release and self._ended and not at_exit():
            if not if_free(self._lock, self._release):
                return

    def emptied(self) -> Iterator[Block]:
        """The blocks whose last tensor has ended since the last call."""
        for _ in range(len(self._ended)):
            block = self._ended.popleft()
            block.num_tensors -= 1
            if not block.num_tensors:
                yield block
