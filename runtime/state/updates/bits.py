"""Tensors as they were, to see later whether anybody has changed them, however it was done.

Counters of versions do not tell of writes through `.data` or an array; digests of the bytes do.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, final

import torch

from teraplan.runtime.process import pages
from teraplan.runtime.state.memory.arena import StateArena
from teraplan.runtime.state.memory.digests import is_as_it_left
from teraplan.runtime.state.memory.movable import is_dense
from teraplan.runtime.state.updates.stand_in import equal
from teraplan.runtime.storage.memory import digest


def digest_of(tensor: torch.Tensor) -> int:
    """XXH3 of the tensor's bytes, of a copy's where its elements have gaps between them."""
    dense = tensor if is_dense(tensor) else tensor.detach().contiguous()
    return digest(dense.data_ptr(), dense.nbytes)


def digest_in(arena: StateArena, tensor: torch.Tensor) -> int:
    """The same, and what is away is not read if nobody has touched it: its digest is known.

    Else a step in which all of the state is looked at would map all of it.
    """
    block = arena.block_of(tensor)
    if block is None or not is_as_it_left(block):
        return digest_of(tensor)
    if (block.address, block.nbytes) == (tensor.data_ptr(), tensor.nbytes):
        return block.digest
    found = digest_of(tensor)
    pages.drop_mapped(block.address, block.nbytes)
    return found


@final
@dataclass(frozen=True, slots=True)
class Bits:
    """Of one tensor."""

    tensor: torch.Tensor
    digest: int

    @classmethod
    def of(cls, tensor: torch.Tensor, arena: StateArena) -> "Bits":
        """As it is now."""
        return cls(tensor, digest_in(arena, tensor))

    def are_those_of(self, found: object, arena: StateArena) -> bool:
        """True if `found` is the same tensor with the same bits."""
        if found is not self.tensor:
            return False
        return digest_in(arena, self.tensor) == self.digest


@final
@dataclass(frozen=True, slots=True)
class StateBits:
    """Of one parameter's optimizer state."""

    tensors: Mapping[str, Bits]
    """Those on the CPU, by name."""
    others: Mapping[str, object]
    """All else, by name."""

    @classmethod
    def of(cls, state: Mapping[str, Any], arena: StateArena) -> "StateBits":
        """As it is now."""
        return cls(
            {name: Bits.of(value, arena) for name, value in state.items() if _is_read(value)},
            {name: value for name, value in state.items() if not _is_read(value)},
        )

    def are_those_of(self, state: Mapping[str, Any], arena: StateArena) -> bool:
        """True if nothing of the state has changed."""
        others = {name: value for name, value in state.items() if name not in self.tensors}
        return equal([dict(self.others)], [others]) and all(
            bits.are_those_of(state.get(name), arena) for name, bits in self.tensors.items()
        )


def _is_read(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.is_cpu and value.layout == torch.strided
