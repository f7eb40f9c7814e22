"""An optimizer with some of another one's parameters, for the step of one bucket.

    theirs    param_groups [{params: p0 p1 p2, lr}]    state    numbers, tensors
    stand-in  param_groups [{params:    p1,    lr}]    the same    copies

The user's own object is whole at any time, whatever a step raises. What a step writes beside
`state` (a counter, say) is taken over once, when all buckets are done: each begins with what there
was before the first.
"""

import weakref
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Set
from contextlib import contextmanager
from typing import Any

import torch

Optimizer = torch.optim.Optimizer
Values = list[dict[str, object]]

_SHARED = ("state", "param_groups", "defaults")
_PLAIN = (int, float, complex, str, bytes, type(None))

_stand_ins: "weakref.WeakSet[Optimizer]" = weakref.WeakSet()


def stand_in(optimizer: Optimizer, bucket: Set[int]) -> Optimizer:
    """`optimizer` as it is now, with those parameters whose ids are in `bucket`."""
    made: Optimizer = object.__new__(type(optimizer))
    made.__dict__.update(optimizer.__dict__)
    made.__dict__.update({name: _copied(value) for name, value in _attributes(optimizer).items()})
    made.param_groups = [
        {name: _copied(value) for name, value in group.items() if name != "params"}
        | {"params": [p for p in group["params"] if id(p) in bucket]}
        for group in optimizer.param_groups
    ]
    _stand_ins.add(made)
    return made


@contextmanager
def own_state(made: Optimizer) -> Iterator[Optimizer]:
    """Within it a stand-in has the state of its own parameters alone, which stays the user's.

    For a step that runs beside another thread's: one that goes through all of `state` would change
    what the other works on.
    """
    everything = made.state
    own = (p for group in made.param_groups for p in group["params"] if p in everything)
    made.state = defaultdict(dict, ((p, everything[p]) for p in own))
    try:
        yield made
    finally:
        everything.update(made.state)
        made.state = everything


def is_stand_in(optimizer: Optimizer) -> bool:
    """True if the optimizer is one of ours."""
    return optimizer in _stand_ins


def values_beside_state(optimizer: Optimizer) -> Values:
    """What a step may write beside `state`: attributes, then groups; tensors are copied."""
    found = [_attributes(optimizer)]
    for group in optimizer.param_groups:
        found.append({name: value for name, value in group.items() if name != "params"})
    return [{name: _copied(value) for name, value in values.items()} for values in found]


def equal(first: Values, second: Values) -> bool:
    """True if all numbers, texts and tensors are equal; what else there is does not count."""
    return all(
        a.keys() == b.keys() and all(_is_equal(a[name], b[name]) for name in a)
        for a, b in zip(first, second, strict=True)
    )


def take_over(optimizer: Optimizer, made: Optimizer) -> None:
    """Let `optimizer` have what the step of `made` has written; tensors are written in place."""
    shared = {*_SHARED, *(name for name in vars(optimizer) if name.startswith("_optimizer_"))}
    _write(vars(optimizer), vars(made), shared)
    optimizer.state = made.state
    for group, values in zip(optimizer.param_groups, made.param_groups, strict=True):
        _write(group, values, {"params"})


def values_to_host(made: Optimizer) -> None:
    """Let what a stand-in has beside parameters and `state` be in host memory."""
    for values in (vars(made), *made.param_groups):
        for name, value in values.items():
            if isinstance(value, torch.Tensor) and not value.is_cpu:
                values[name] = value.cpu()


def has_tensors_in_containers(optimizer: Optimizer) -> bool:
    """True if it keeps something of its parameters in containers of its own."""
    values = _attributes(optimizer).values()
    return any(not _is_plain(v) and not isinstance(v, torch.Tensor) for v in values)


def keeps_tensors_beside_state(optimizer: Optimizer) -> bool:
    """True if containers of its own have tensors in them, which are its parameters' perhaps."""
    return any(_contains_tensors(value) for value in _attributes(optimizer).values())


def _contains_tensors(value: object) -> bool:
    if isinstance(value, torch.Tensor) or not isinstance(value, (list, tuple, Set, Mapping)):
        return False
    inner = [*value, *(value.values() if isinstance(value, Mapping) else ())]
    return any(isinstance(item, torch.Tensor) or _contains_tensors(item) for item in inner)


def _write(target: dict[str, Any], source: dict[str, Any], left_out: Set[str]) -> None:
    for name in target.keys() - source.keys() - left_out:
        del target[name]
    for name, value in source.items():
        if name in left_out:
            continue
        current = target.get(name)
        if isinstance(current, torch.Tensor) and isinstance(value, torch.Tensor):
            if current is value or torch.equal(current, value):
                continue
            if current.shape == value.shape and current.dtype == value.dtype:
                with torch.no_grad():
                    current.copy_(value)
                continue
        target[name] = value


def _attributes(optimizer: Optimizer) -> dict[str, object]:
    return {
        name: value
        for name, value in vars(optimizer).items()
        if name not in _SHARED and not name.startswith("_optimizer_")
    }


def _copied(value: object) -> object:
    if isinstance(value, torch.Tensor) and not isinstance(value, torch.nn.Parameter):
        return value.detach().clone()
    # An empty container may be for parameters' own things, which have to last.
    if isinstance(value, (list, dict, set)) and value and _is_plain(value):
        return value.copy()
    return value


def _is_plain(value: object) -> bool:
    return isinstance(value, _PLAIN) or (
        isinstance(value, (list, tuple, set, dict)) and all(map(_is_plain, _items(value)))
    )


def _items(container: "Collection[object]") -> Iterator[object]:
    yield from container
    if isinstance(container, dict):
        yield from container.values()


def _is_equal(first: object, second: object) -> bool:
    if isinstance(first, torch.Tensor) and isinstance(second, torch.Tensor):
        return torch.equal(first.cpu(), second.cpu())
    if _is_plain(first) and _is_plain(second):
        return bool(first == second) or bool(first != first and second != second)
    return _is_plain(first) == _is_plain(second)
