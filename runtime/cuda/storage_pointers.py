"""Where a tensor's storage points to: read, made, swapped. Private interfaces of PyTorch."""

import ctypes
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from teraplan.runtime.process import compiled_source

_SOURCE = Path(__file__).with_name("storage_pointers.cpp")


def why_not() -> str:
    """Why pointers cannot be swapped here; "" if they can."""
    if hasattr(torch.UntypedStorage, "_swap_data_ptr_"):
        return ""
    return f"torch {torch.__version__} cannot swap what storages point to"


@functools.cache
def why_not_raising() -> str:
    """Why tensors cannot raise where their bytes are looked at; "" if they can. Compiles once."""
    try:
        _let_raise()
    except Exception as error:  # noqa: BLE001  no compiler, another one than it was made for, ..
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        return f"what lets tensors raise could not be compiled: {reason}"
    return ""


def storage_at(address: int, nbytes: int, device: torch.device) -> torch.UntypedStorage:
    """A storage over memory that somebody else owns, as one of `device`."""
    made: Any = torch._C._construct_storage_from_data_pointer(address, device, nbytes)
    assert isinstance(made, torch.UntypedStorage)
    return made


def point_to(storage: torch.UntypedStorage, address: int) -> None:
    """Let a storage that `storage_at` has made look at other memory, with all of its tensors."""
    target: Any = storage_at(address, storage.nbytes(), storage.device)
    swapped: Any = storage
    swapped._swap_data_ptr_(target)  # and whether it raises


def let_raise(storage: torch.UntypedStorage, message: str) -> None:
    """Let whoever looks at a storage's bytes get a RuntimeError, until it points to others."""
    _let_raise()(storage._cdata, message.encode())


@functools.cache
def _let_raise() -> Callable[[int, bytes], None]:
    found = compiled_source.load(_SOURCE).let_raise
    found.argtypes, found.restype = (ctypes.c_void_p, ctypes.c_char_p), None
    return found
