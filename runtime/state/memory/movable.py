"""Which tensors have memory that can be anywhere: of their own, and worth moving."""

import functools
import sys
from collections.abc import Mapping

import torch

from teraplan.runtime.state.memory.lease import span_nbytes
from teraplan.values.graph_table import MIN_SLOT_BYTES


def is_movable(tensor: torch.Tensor, device: torch.device) -> bool:
    """True if the tensor is on `device`, worth moving, and its memory can be anywhere."""
    return (
        tensor.device == device
        and tensor.layout == torch.strided
        and not tensor.is_quantized
        and is_plain(tensor)
        and tensor.storage_offset() == 0
        and span_nbytes(tensor) >= MIN_SLOT_BYTES
        and span_nbytes(tensor) == tensor.nbytes
        and _whole_storage(tensor)
    )


def is_plain(tensor: torch.Tensor) -> bool:
    """False for subclasses: what has others within it has no memory to ask for."""
    return type(tensor) in (torch.Tensor, torch.nn.Parameter)


def is_dense(tensor: torch.Tensor) -> bool:
    """True if the tensor has one element at each place of the memory that it spans."""
    return (
        type(tensor) in (torch.Tensor, torch.nn.Parameter)
        and tensor.layout == torch.strided
        and not tensor.is_quantized
        and not tensor.is_complex()
        and not tensor.is_inference()
        and span_nbytes(tensor) == tensor.nbytes
    )


def memory_of(tensor: torch.Tensor) -> int:
    """Tells memories of tensors apart; of one that has none, the tensor itself."""
    strided = tensor.layout == torch.strided
    return int(tensor.untyped_storage()._cdata) if strided else id(tensor)


def is_shared(tensor: torch.Tensor) -> bool:
    """True if a view, another parameter, an array or another process has its memory, too."""
    storage = tensor.untyped_storage()
    holders: int = torch._C._storage_Use_Count(storage._cdata)
    return holders > _HOLDERS or storage.is_shared()


_HOLDERS = 2
"""The tensor and the object that Python has of its storage."""


def is_last_view(tensors: Mapping[str, object], name: str) -> bool:
    """True for a view, the last one of a base that nobody has, where nobody but `tensors` has it.

    Such are tensors that safetensors loads. In the place of one there may be a copy.
    """
    return _holders(tensors, name) == _holders_of_last_view()


@functools.cache
def _holders_of_last_view() -> tuple[int, int, int] | None:
    return _holders({"": torch.empty(1).view(1)}, "")


def _holders(tensors: Mapping[str, object], name: str) -> tuple[int, int, int] | None:
    """How many hold a tensor, its base and its memory, as this function sees it; None: no view."""
    tensor = tensors[name]
    if not isinstance(tensor, torch.Tensor) or not is_plain(tensor):
        return None
    base = tensor._base
    if base is None or tensor.layout != torch.strided:
        return None
    of_memory: int = torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)
    return sys.getrefcount(tensor), sys.getrefcount(base), of_memory


def _whole_storage(tensor: torch.Tensor) -> bool:
    return tensor.untyped_storage().nbytes() <= tensor.nbytes + _SLACK_BYTES


_SLACK_BYTES = 4096
