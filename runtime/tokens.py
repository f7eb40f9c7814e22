"""Tokens: the 8-byte tensors that travel from forward to backward instead of activations.

A token's memory belongs to a Python object, so that we learn when autograd lets go of it: after the
backward, or because a forward's result was thrown away and there will be no backward.
"""

import ctypes
import itertools
from typing import Protocol

import torch

from teraplan.errors import UnsupportedError


class TokenOwner(Protocol):
    """Who made a token."""

    def release(self, key: int) -> None:
        """The token's memory is gone. Called from whichever thread that happens in."""


_KEY_BYTES = 8
_keys = itertools.count(1)
_owners: dict[int, TokenOwner] = {}
"""Of live tokens only: what a backward op has in its hands is the token and nothing else."""


class _Buffer(ctypes.c_int64 * 1):  # type: ignore[misc]  # a ctypes array type, made by `*`
    """The memory of one token; says so when it is freed."""

    def __del__(self) -> None:
        owner = _owners.pop(self[0], None)
        if owner is not None:
            owner.release(self[0])


def make_token(owner: TokenOwner) -> tuple[int, torch.Tensor]:
    """A new key and its token, an int64 tensor of shape (1,) on the CPU."""
    key = next(_keys)
    _owners[key] = owner
    return key, torch.frombuffer(_Buffer(key), dtype=torch.int64)


def key_of(token: torch.Tensor) -> int:
    """The key of a token.

    Read as memory: `item()` lets other threads run Python, and then waits for them, three times at
    each site.
    """
    if token.is_cpu and token.dtype is torch.int64 and token.nbytes == _KEY_BYTES:
        return ctypes.c_int64.from_address(token.data_ptr()).value
    return int(token.item())  # a hook has changed it


def owner_of(token: torch.Tensor) -> TokenOwner:
    """Who made `token`.

    Raises:
        UnsupportedError: if it is no live token, e.g. a copy that a hook has made of one.
    """
    owner = _owners.get(key_of(token))
    if owner is None:
        raise UnsupportedError(
            "what stands for a saved activation has been copied, by hooks for saved tensors "
            "(torch.autograd.graph.saved_tensors_hooks) or through a file; hooks that keep "
            "something else than the tensor do not work around compiled graphs"
        )
    return owner
