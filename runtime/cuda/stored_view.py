"""Tensors in host memory that show what lies in storage, as far as somebody looks at it."""

import ctypes
from collections.abc import Callable

import torch

from teraplan.runtime.cuda.copies import CudaCopy, HostCopy, SplitCopy
from teraplan.runtime.process import pages
from teraplan.runtime.state.memory.lease import span_nbytes, tensor_at
from teraplan.runtime.storage import Storage


def view_of(
    copy: CudaCopy, like: torch.Tensor, offset: int, storage: Storage, ended: Callable[[], None]
) -> torch.Tensor:
    """A CPU tensor as `like` of the bytes from `offset` of a copy that has been written.

    What is written to it is its own. The copy has to last until `ended` is called, in whichever
    thread that happens.
    """
    address = pages.take(pages.round_up(copy.nbytes))
    end = address
    if isinstance(copy, SplitCopy):
        end = _copied(copy.first, end)
    for record in copy.records:
        for fd, start, nbytes in storage.pieces(record):
            pages.show_file(end, nbytes, fd, start, keeps_writes=False)
            end += nbytes
    assert end == address + copy.nbytes, "what is in storage is whole pages: it has no ends"

    def unmap() -> None:
        pages.release(address, pages.round_up(copy.nbytes))
        ended()

    return tensor_at(address + offset, span_nbytes(like), like, unmap)


def _copied(copy: HostCopy, address: int) -> int:
    """Copy what is in host memory to `address`; where that ends."""
    lease = copy.inner.lease
    assert lease is not None, "the copy lasts"
    copy.inner.left.synchronize()
    for part in lease.parts:
        ctypes.memmove(address, part.address, part.nbytes)
        address += part.nbytes
    return address
