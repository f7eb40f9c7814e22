"""Which tensors are in which block: one of its own, or several that share it (`chunks`)."""

import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial

import torch

from teraplan.runtime.locks import if_free
from teraplan.runtime.state.block import Block
from teraplan.runtime.state.lease import span_nbytes, tensor_at


class Tenants:
    """Used by one thread at a time, but for tensors that end."""

    def __init__(self) -> None:
        self._block_at: dict[int, Block] = {}
        """By address of a tensor's memory."""
        self._ended: deque[tuple[Block, int]] = deque()
        self._release: Callable[[], None] | None = None
        self._lock = threading.Lock()
        """Held while `_release` runs."""

    def block_of(self, tensor: torch.Tensor) -> Block | None:
        """The block of a tensor that is in one, None for any other."""
        return self.block_at(tensor.untyped_storage().data_ptr())

    def block_at(self, address: int) -> Block | None:
        """The same by the address of the tensor's memory."""
        return self._block_at.get(address)

    def add(self, block: Block, like: torch.Tensor, offset: int) -> torch.Tensor:
        """An uninitialized tensor as `like`, `offset` bytes from the block's beginning."""
        address = block.address + offset
        self._block_at[address] = block
        block.num_tensors += 1
        ended = partial(self._end, block, address)
        return tensor_at(address, span_nbytes(like), like, ended)

    def close(self, release: Callable[[], None]) -> None:
        """Nobody will ask what is `emptied`: `release` does now, and whenever a tensor ends."""
        self._release = release
        if_free(self._lock, release)
        self._release_ended()

    def _end(self, block: Block, address: int) -> None:
        """A tensor's memory is nobody's. Called in any thread, also in the middle of anything."""
        self._ended.append((block, address))
        self._release_ended()

    def _release_ended(self, at_exit: Callable[[], bool] = sys.is_finalizing) -> None:
        while self._release and self._ended and not at_exit():
            if not if_free(self._lock, self._release):
                return

    def emptied(self) -> Iterator[Block]:
        """The blocks whose last tensor has ended since the last call."""
        for _ in range(len(self._ended)):
            block, address = self._ended.popleft()
            del self._block_at[address]
            block.num_tensors -= 1
            if not block.num_tensors:
                yield block
