"""Tensors over memory of our own that tell when nobody uses them any more."""

import ctypes
from collections.abc import Callable
from typing import Any, ClassVar

import torch


class _Leases:
    """One ctypes class per size, because a ctypes array type has its length."""

    kinds: ClassVar[dict[int, Any]] = {}

    @classmethod
    def at(cls, address: int, nbytes: int, ended: Callable[[], None]) -> Any:  # noqa: ANN401
        kind: Any = cls.kinds.get(nbytes)
        if kind is None:
            kind = type("_StateLease", (ctypes.c_char * nbytes,), {"__del__": _end})
            cls.kinds[nbytes] = kind
        lease = kind.from_address(address)
        lease.ended = ended
        return lease


def _end(lease: Any) -> None:  # noqa: ANN401
    lease.ended()


def tensor_at(
    address: int, nbytes: int, like: torch.Tensor, ended: Callable[[], None]
) -> torch.Tensor:
    """A tensor of the type, shape and strides of `like` whose memory begins at `address`.

    `ended` is called, in whichever thread that happens, when its storage is gone.
    """
    lease = _Leases.at(address, nbytes, ended)
    flat = torch.frombuffer(lease, dtype=like.dtype, count=nbytes // like.dtype.itemsize)
    # In place: a view keeps `flat`, and autograd adds in place only to memory that one tensor has.
    return flat.as_strided_(like.shape, like.stride())


def span_nbytes(tensor: torch.Tensor) -> int:
    """Bytes from the first to the last element of `tensor`, whatever its storage holds besides."""
    last = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size() if tensor.numel() else 0
