"""Which tensors are in which block: one of its own, or several that share it (`chunks`)."""

from collections import deque
from collections.abc import Iterator
from functools import partial

import torch

from teraplan.runtime.state.block import Block
from teraplan.runtime.state.lease import span_nbytes, tensor_at


class Tenants:
    """Used by one thread at a time, but for tensors that end."""

    def __init__(self) -> None:
        self._block_at: dict[int, Block] = {}
        """By address of a tensor's memory."""
        self._ended: deque[tuple[Block, int]] = deque()

    def block_of(self, tensor: torch.Tensor) -> Block | None:
        """The block of a tensor that is in one, None for any other."""
        return self._block_at.get(tensor.untyped_storage().data_ptr())

    def add(self, block: Block, like: torch.Tensor, offset: int) -> torch.Tensor:
        """An uninitialized tensor as `like`, `offset` bytes from the block's beginning."""
        address = block.address + offset
        self._block_at[address] = block
        block.num_tensors += 1
        ended = partial(self._ended.append, (block, address))
        return tensor_at(address, span_nbytes(like), like, ended)

    def emptied(self) -> Iterator[Block]:
        """The blocks whose last tensor has ended since the last call."""
        for _ in range(len(self._ended)):
            block, address = self._ended.popleft()
            del self._block_at[address]
            block.num_tensors -= 1
            if not block.num_tensors:
                yield block
