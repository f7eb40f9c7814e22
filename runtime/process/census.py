"""Which tensors a process holds: the state of training, counted once per profile."""

import gc
from collections.abc import Iterable, Iterator
from itertools import chain, compress, starmap
from typing import Any, TypeVar, cast

import torch
from torch._subclasses import FakeTensor
from torch.utils.weak import WeakIdKeyDictionary

_T = TypeVar("_T")
_FEW_CLASSES = 64
"""Of tensors and optimizers there are some twenty, of modules hundreds."""


def storages(device_type: str) -> list[torch.UntypedStorage]:
    """The distinct storages on devices of `device_type` that Python code can see.

    Parameters, their gradients, optimizer state, buffers, batches. Walks all objects that the
    garbage collector tracks: about 0.1 s in a process that has compiled.
    """
    found: dict[int, torch.UntypedStorage] = {}
    for tensor in _tensors():
        for candidate in (tensor, tensor.grad if tensor.is_leaf else None):
            if candidate is not None and candidate.device.type == device_type:
                storage = _memory_of(candidate)
                if storage is not None:
                    found[storage._cdata] = storage
    return list(found.values())


def _memory_of(tensor: torch.Tensor) -> torch.UntypedStorage | None:
    """None if it has no memory of its own: compilers trace with such, and some are left over."""
    try:
        storage = tensor.untyped_storage()
        storage.data_ptr()
    except RuntimeError:  # also what is not implemented
        return None
    return storage


def tensor_nbytes(device_type: str) -> int:
    """Bytes of all `storages`."""
    return sum(storage.nbytes() for storage in storages(device_type))


def missing_nbytes(device_type: str, *, below: int | None = None) -> tuple[int, int]:
    """Bytes that training will have and has not yet.

    Those are gradients, and the state that the first `step()` of known optimizers will create.

    Args:
        device_type: where.
        below: count smaller parameters alone.
    """

    def counts(parameter: torch.Tensor) -> bool:
        wanted = parameter.requires_grad and parameter.device.type == device_type
        return wanted and (below is None or parameter.nbytes < below)

    optimizers_here = optimizers()
    dense = _dense_parameters(optimizers_here)
    gradients = sum(p.nbytes for p in dense if counts(p) and p.grad is None)
    states = sum(
        count * p.nbytes
        for optimizer in optimizers_here
        for p, count in states_to_come(optimizer, unknown=0)
        if counts(p)
    )
    return gradients, states


def trained_nbytes(device_type: str) -> int:
    """Bytes of all parameters that have, or will have, a dense gradient."""
    dense = _dense_parameters(optimizers())
    return sum(p.nbytes for p in dense if p.requires_grad and p.device.type == device_type)


def _dense_parameters(optimizers_here: list[torch.optim.Optimizer]) -> list[torch.Tensor]:
    """Those that optimizers have; where there is none, there will be one for all."""
    parameters = {id(p): p for o in optimizers_here for g in o.param_groups for p in g["params"]}
    if not optimizers_here:
        found = (t for t in _tensors() if isinstance(t, torch.nn.Parameter))
        parameters = {id(p): p for p in found}
    return [p for p in parameters.values() if not has_sparse_gradient(p)]


_with_sparse_gradients = WeakIdKeyDictionary()


def note_sparse_gradients(modules: Iterable[torch.nn.Module]) -> None:
    """Of the modules whose backward makes sparse gradients, as large as what was used of them."""
    for part in chain.from_iterable(module.modules() for module in modules):
        if isinstance(part, torch.nn.Embedding | torch.nn.EmbeddingBag) and part.sparse:
            _with_sparse_gradients[part.weight] = True


def has_sparse_gradient(parameter: torch.Tensor) -> bool:
    """True if `note_sparse_gradients` has met it: there is no tensor of its size but its state."""
    return parameter in _with_sparse_gradients


STATES_OF_UNKNOWN = 2
"""What an optimizer that nobody knows is taken to keep where too little would not do."""
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
    return _instances(torch.optim.Optimizer)


def modules() -> list[torch.nn.Module]:
    """Every module of this process. Walks all objects, too."""
    return _instances(torch.nn.Module)


def gradient_scalers() -> list[torch.amp.GradScaler]:
    """Every GradScaler of this process. Walks all objects, too."""
    return _instances(torch.amp.GradScaler)


def states_to_come(
    optimizer: torch.optim.Optimizer, *, unknown: int
) -> Iterator[tuple[torch.Tensor, int]]:
    """Parameters without state, each with the tensors of its size that `step()` will keep of it.

    `unknown` counts for optimizers that are not torch's own.
    """
    always = _STATES_PER_PARAMETER.get(type(optimizer).__name__, unknown)
    for group in optimizer.param_groups:
        count = always + _further_states(group)
        for parameter in group["params"]:
            if not optimizer.state.get(parameter):
                yield parameter, count


def nbytes_with_state(parameter: torch.Tensor) -> int:
    """Of a parameter, its gradient and the state that some optimizer may keep of it."""
    return parameter.nbytes * (2 + STATES_OF_UNKNOWN if parameter.requires_grad else 1)


def most_states(optimizer: torch.optim.Optimizer) -> int:
    """Tensors of a parameter's size that the optimizer keeps of one, at most."""
    always = _STATES_PER_PARAMETER.get(type(optimizer).__name__, STATES_OF_UNKNOWN)
    return max((always + _further_states(group) for group in optimizer.param_groups), default=0)


def _further_states(group: dict[str, Any]) -> int:
    return sum(bool(group.get(option)) for option in ("amsgrad", "momentum", "centered"))


def unfreeze() -> None:
    """What a program has frozen (`gc.freeze`) is in no list of objects: it is frozen no longer."""
    if gc.get_freeze_count():
        gc.unfreeze()


def _instances(kind: type[_T]) -> list[_T]:
    """All objects of this class and its subclasses that the garbage collector tracks.

    By identities of classes: some tracked objects answer `__class__` with surprises, and some
    classes have no hash.

    What is listed must not be there while another thread runs: CPython raises a SystemError where a
    tuple that is still being filled is held by somebody else. So no bytecode runs from when the
    list is made to when it is gone, only functions that keep the GIL.
    """
    unfreeze()
    return cast("list[_T]", list(_of_classes(list(_with_subclasses(kind)))))


def _of_classes(classes: list[type]) -> Iterator[object]:
    """Their instances. What may be one is listed while it is gone through."""
    everything: list[object] = []
    objects, again = iter(everything), iter(everything)
    fill = map(everything.extend, _with_instances_of(classes))
    wanted = set(map(id, classes))
    found = compress(objects, map(wanted.__contains__, map(id, map(type, again))))
    clear = map(list[object].clear, (everything,))
    return chain(filter(None, fill), found, filter(None, clear))


def _with_instances_of(classes: list[type]) -> Iterator[list[Any]]:
    """One list, made when it is asked for, with more than their instances.

    Instances refer to their class. To look for what does takes two thirds of the time that a list
    of everything takes, and none of its memory: that grows to 5 MB by being copied over and over,
    which leaves six times as much in a heap with holes. With many classes it takes longer.
    """
    if len(classes) <= _FEW_CLASSES:
        return starmap(gc.get_referrers, (classes,))
    return map(gc.get_objects, (None,))


def _with_subclasses(kind: type) -> Iterator[type]:
    yield kind
    below: list[type] = type.__subclasses__(kind)
    for one in below:
        yield from _with_subclasses(one)


def _tensors() -> list[torch.Tensor]:
    return [
        tensor
        for tensor in _instances(torch.Tensor)
        if not issubclass(type(tensor), FakeTensor)
        and tensor.layout == torch.strided
        and tensor.device.type != "meta"
    ]
