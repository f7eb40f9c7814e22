"""Which tensors a process holds: the state of training, counted once per profile."""

import gc
from collections.abc import Mapping

import torch
from torch._subclasses import FakeTensor


def storages(device_type: str) -> list[torch.UntypedStorage]:
    """The distinct storages on devices of `device_type` that Python code can see.

    Parameters, their gradients, optimizer state, buffers, batches. Walks all objects that the
    garbage collector tracks: about 0.1 s in a process that has compiled.
    """
    found: dict[int, torch.UntypedStorage] = {}
    for tensor in _tensors():
        for candidate in (tensor, tensor.grad if tensor.is_leaf else None):
            if candidate is not None and candidate.device.type == device_type:
                storage = candidate.untyped_storage()
                found[storage._cdata] = storage
    return list(found.values())


def tensor_nbytes(device_type: str) -> int:
    """Bytes of all `storages`."""
    return sum(storage.nbytes() for storage in storages(device_type))


def missing_gradient_nbytes(device_type: str) -> int:
    """Bytes of the gradients that parameters will have and have not yet."""
    parameters = {
        id(t): t.nbytes
        for t in _tensors()
        if isinstance(t, torch.nn.Parameter)
        and t.requires_grad
        and t.grad is None
        and t.device.type == device_type
    }
    return sum(parameters.values())


_STATES_PER_PARAMETER = {
    "Adam": 2,
    "AdamW": 2,
    "NAdam": 2,
    "RAdam": 2,
    "Adamax": 2,
    "Adagrad": 1,
    "RMSprop": 1,
    "Adadelta": 2,
    "Rprop": 2,
    "ASGD": 1,
    "SGD": 0,
}


def optimizers() -> list[torch.optim.Optimizer]:
    """Every optimizer of this process. Walks all objects, as `storages` does."""
    return [item for item in gc.get_objects() if issubclass(type(item), torch.optim.Optimizer)]


def states_per_parameter(
    optimizer: torch.optim.Optimizer, group: Mapping[str, object], *, unknown: int
) -> int:
    """Tensors of a parameter's size that `step()` keeps for each parameter of a group.

    `unknown` counts for optimizers that are not torch's own.
    """
    always = _STATES_PER_PARAMETER.get(type(optimizer).__name__, unknown)
    return always + bool(group.get("amsgrad")) + bool(group.get("momentum"))


def missing_optimizer_nbytes(device_type: str) -> int:
    """Bytes of optimizer state that the first `step()` of known optimizers will create."""
    missing = 0
    for optimizer in optimizers():
        for group in optimizer.param_groups:
            missing += states_per_parameter(optimizer, group, unknown=0) * sum(
                p.nbytes
                for p in group["params"]
                if p.requires_grad and p.device.type == device_type and not optimizer.state.get(p)
            )
    return missing


def _tensors() -> list[torch.Tensor]:
    found = []
    for item in gc.get_objects():
        # type(), not isinstance(): some tracked objects answer __class__ with surprises
        kind = type(item)
        if not issubclass(kind, torch.Tensor) or issubclass(kind, FakeTensor):
            continue
        if item.layout == torch.strided and item.device.type != "meta":
            found.append(item)
    return found
