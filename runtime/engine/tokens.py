"""Tokens: the 8-byte tensors that travel from forward to backward instead of activations.

A token's memory belongs to a Python object, so that we learn when autograd lets go of it: after the
backward, or because a forward's result was thrown away and there will be no backward.
"""

import ctypes
import itertools
import weakref
from collections.abc import Iterable
from typing import Protocol

import torch

from teraplan.errors import UnsupportedError


class TokenOwner(Protocol):
    """Who made a token."""

    def release(self, key: int) -> None:
        """The token's memory is gone. Called from whichever thread that happens in."""


_keys = itertools.count(1)
_owners: dict[int, tuple[TokenOwner, "weakref.ref[_Buffer]"]] = {}
"""Of live tokens only: what a backward op has in its hands is the token and nothing else."""
_keys_at: dict[int, int] = {}
"""By address: quicker than reading the key there, which takes two objects of ctypes."""


class _Buffer(ctypes.c_int64 * 1):  # type: ignore[misc]  # a ctypes array type, made by `*`
    """The memory of one token; says so when it is freed."""

    def __del__(self) -> None:
        _keys_at.pop(ctypes.addressof(self), None)
        owner, _ = _owners.pop(self[0], _NOBODY)
        if owner is not None:
            owner.release(self[0])


_NOBODY = (None, None)


def release_lost(keys: Iterable[int]) -> None:
    """Release those of an owner's tokens that are gone and have not said so.

    Python drops what is raised in a finalizer, an interrupt too, and with it the rest of that.
    """
    for key in list(keys):
        owner, buffer = _owners.get(key, _NOBODY)
        if owner is None or buffer is None or buffer() is not None:
            continue
        del _owners[key]
        for address in [address for address, there in list(_keys_at.items()) if there == key]:
            del _keys_at[address]
        owner.release(key)


def make_token(owner: TokenOwner) -> tuple[int, torch.Tensor]:
    """A new key and its token, an int64 tensor of shape (1,) on the CPU."""
    key = next(_keys)
    buffer = _Buffer(key)
    token = torch.frombuffer(buffer, dtype=torch.int64)
    _owners[key], _keys_at[token.data_ptr()] = (owner, weakref.ref(buffer)), key
    return key, token


def owner_of(token: torch.Tensor) -> tuple[TokenOwner, int]:
    """Who made `token`, and its key.

    Raises:
        UnsupportedError: if it is no live token, e.g. a copy that a hook has made of one.
    """
    key = _keys_at.get(token.data_ptr())
    if key is None:  # a hook has put it elsewhere
        key = int(token.item())
    owner, _ = _owners.get(key, _NOBODY)
    if owner is None:
        raise UnsupportedError(
            "what stands for a saved activation has been copied, by hooks for saved tensors "
            "(torch.autograd.graph.saved_tensors_hooks) or through a file; hooks that keep "
            "something else than the tensor do not work around compiled graphs"
        )
    return owner, key
