"""Tensors in a pool of host memory, which they give back when nobody uses them any more."""

from functools import partial

import torch

from teraplan.runtime.process.pinned_pool import Lease, PinnedPool
from teraplan.runtime.state.memory.lease import span_nbytes, tensor_at


def host_tensor(pool: PinnedPool, like: torch.Tensor) -> torch.Tensor | None:
    """An uninitialized CPU tensor of the type, shape and strides of `like`; None without room.

    `like` has to be dense, on any device.
    """
    nbytes = span_nbytes(like)
    lease = pool.try_take(nbytes)
    if lease is None:
        return None
    return tensor_at(lease.parts[0].address, nbytes, like, partial(_end, lease))


def host_bytes(pool: PinnedPool, nbytes: int) -> torch.Tensor | None:
    """`nbytes` of host memory, (nbytes,), uint8; None without room."""
    return host_tensor(pool, torch.empty(nbytes, dtype=torch.uint8, device="meta"))


def _end(lease: Lease) -> None:
    """The tensor is gone, and with this call's own reference the lease."""
