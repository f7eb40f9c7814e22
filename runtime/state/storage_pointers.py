"""Where a tensor's storage points to: read, made and swapped. Private interfaces of PyTorch."""

from typing import Any

import torch


def why_not() -> str:
    """Why pointers cannot be swapped here; "" if they can."""
    if hasattr(torch.UntypedStorage, "_swap_data_ptr_"):
        return ""
    return f"torch {torch.__version__} cannot swap what storages point to"


def storage_at(address: int, nbytes: int, device: torch.device) -> torch.UntypedStorage:
    """A storage over memory that somebody else owns, as one of `device`."""
    made: Any = torch._C._construct_storage_from_data_pointer(address, device, nbytes)
    assert isinstance(made, torch.UntypedStorage)
    return made


def point_to(storage: torch.UntypedStorage, address: int) -> None:
    """Let a storage that `storage_at` has made look at other memory, with all of its tensors."""
    target: Any = storage_at(address, storage.nbytes(), storage.device)
    swapped: Any = storage
    swapped._swap_data_ptr_(target)
