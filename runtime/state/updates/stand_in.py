"""An optimizer with some of another one's parameters, for the step of one bucket.

    theirs    param_groups [{params: p0 p1 p2, lr}]    state {p0: p1: p2:}    numbers, tensors
    stand-in  param_groups [{params:    p1,    lr}]    state {    p1:    }    copies

The user's own object is whole at any time, whatever a step raises. What belongs to no parameter (a
counter, say, in an attribute, in a group, or in `state` under a name) is taken over once, when all
buckets are done: each begins with what there was before the first.
"""

import copy
import enum
import weakref
from collections import OrderedDict, defaultdict
from collections.abc import Collection, Iterator, Mapping, Set
from itertools import chain, takewhile
from types import FunctionType
from typing import Any, TypeVar, cast

import torch

Optimizer = torch.optim.Optimizer
_T = TypeVar("_T")
Values = list[dict[str, object]]
Copies = dict[int, Any]
"""By identity of what was copied, as `copy.deepcopy` has it."""

_SHARED = ("state", "param_groups", "defaults")
_CHANGEABLE = (list, dict, set)
_PLAIN = (int, float, complex, str, bytes, type(None), enum.Enum, torch.dtype, torch.device)

_stand_ins: "weakref.WeakKeyDictionary[Optimizer, Optimizer]" = weakref.WeakKeyDictionary()
"""Each with the optimizer that it stands in for."""
_copied_for: "weakref.WeakKeyDictionary[Optimizer, Copies]" = weakref.WeakKeyDictionary()
"""What of that each has copied."""


def parameters_of(optimizer: Optimizer) -> Iterator[torch.Tensor]:
    """The parameters of all groups, in order."""
    for group in optimizer.param_groups:
        yield from group["params"]


def is_of_torch(optimizer: Optimizer) -> bool:
    """True if it is one of torch's own, whose steps are known."""
    return type(optimizer).__module__.startswith("torch.optim")


def stand_in(optimizer: Optimizer, bucket: Set[int]) -> Optimizer:
    """`optimizer` as it is now, with those parameters whose ids are in `bucket`."""
    made: Optimizer = object.__new__(type(optimizer))
    copies: Copies = {}
    made.__dict__.update(optimizer.__dict__)
    made.__dict__.update(_copied_values(attributes_of(optimizer), copies))
    made._optimizer_step_pre_hooks = OrderedDict()  # the user's are for the step as a whole
    made._optimizer_step_post_hooks = OrderedDict()
    made.param_groups = [
        _copied_values(group, copies) | {"params": [p for p in group["params"] if id(p) in bucket]}
        for group in optimizer.param_groups
    ]
    made.state = defaultdict(dict, _copies_of(_loose(optimizer)))
    made.state.update((p, optimizer.state[p]) for p in parameters_of(made) if p in optimizer.state)
    _stand_ins[made], _copied_for[made] = optimizer, copies
    return made


def share_state(made: Optimizer) -> None:
    """Let whatever `made` stands in for have the state that its step has made of its parameters."""
    optimizer = _stand_ins.get(made)
    while optimizer is not None:
        for parameter in parameters_of(made):
            if parameter in made.state:
                optimizer.state[parameter] = made.state[parameter]
            else:
                optimizer.state.pop(parameter, None)
        optimizer = _stand_ins.get(optimizer)


def is_stand_in(optimizer: Optimizer) -> bool:
    """True if the optimizer is one of ours."""
    return optimizer in _stand_ins


def values_beside_state(optimizer: Optimizer) -> Values:
    """What a step may write that is no parameter's, copied.

    Attributes, what is in `state` under a name, and then what is in each group.
    """
    copies: Copies = {}
    attributes, loose = attributes_of(optimizer), _copies_of(_loose(optimizer))
    groups = (_copied_values(group, copies) for group in optimizer.param_groups)
    return [_copied_values(attributes, copies), loose, *groups]


def equal(first: Values, second: Values) -> bool:
    """True if all numbers, texts and tensors are equal, within lists and dicts, too.

    What else there is does not count.
    """
    return all(
        a.keys() == b.keys() and all(_is_equal(a[name], b[name]) for name in a)
        for a, b in zip(first, second, strict=True)
    )


def take_over(optimizer: Optimizer, made: Optimizer) -> None:
    """Let `optimizer` have what the step of `made` has written; tensors are written in place."""
    share_state(made)
    take_values_over(optimizer, made)
    loose, found = _loose(optimizer), _loose(made)
    if not loose and not found:
        return
    state = _of_all(optimizer)
    _write(state, found, state.keys() - loose.keys(), {})
    first = list(takewhile(found.__contains__, made.state))
    if not loose.keys() >= set(first):  # as the plain step would have made them
        ordered = {key: state[key] for key in first} | state
        optimizer.state = defaultdict(dict, ordered)


def take_values_over(optimizer: Optimizer, made: Optimizer) -> None:
    """The same of attributes and groups alone."""
    shared = {*_SHARED, *(name for name in vars(optimizer) if name.startswith("_optimizer_"))}
    copies = _copied_for.get(made, {})
    _write(vars(optimizer), vars(made), shared, copies)
    for group, values in zip(optimizer.param_groups, made.param_groups, strict=True):
        _write(group, values, {"params"}, copies)


def values_to_host(made: Optimizer) -> None:
    """Let what a stand-in has beside parameters and their state be in host memory."""
    for values in (vars(made), _of_all(made), *made.param_groups):
        for name, value in values.items():
            if isinstance(value, torch.Tensor) and not value.is_cpu:
                values[name] = value.cpu()


def attributes_of(optimizer: Optimizer) -> dict[str, object]:
    """What it keeps in attributes, beside what every optimizer of torch has there."""
    return {
        name: value
        for name, value in vars(optimizer).items()
        if name not in _SHARED and not name.startswith("_optimizer_")
    }


def keeps_tensors_beside_state(optimizer: Optimizer) -> bool:
    """True if containers of its own have tensors in them, which are its parameters' perhaps."""
    return next(tensors_in_containers(optimizer), None) is not None


def tensors_in_containers(optimizer: Optimizer) -> Iterator[torch.Tensor]:
    """The tensors in lists, dicts and the like that are attributes of it."""
    for value in attributes_of(optimizer).values():
        if not isinstance(value, torch.Tensor):
            yield from found_in(value, torch.Tensor)


def found_in(value: object, kind: type[_T]) -> Iterator[_T]:
    """The objects of a kind that a value is, or has in containers."""
    if isinstance(value, kind):
        yield value
    elif isinstance(value, (list, tuple, Set, Mapping)):
        for item in (*value, *(value.values() if isinstance(value, Mapping) else ())):
            yield from found_in(item, kind)


def keeps_anything_in(optimizer: Optimizer) -> str:
    """Where it has an object that may count, or change, with each call; "" if nowhere.

    Parts of a step have copies of numbers, texts and tensors, and share what belongs to a
    parameter. Other objects cannot be copied, and nobody sees what the step does with them.
    """
    if is_of_torch(optimizer):
        return ""
    identities = {id(p) for p in parameters_of(optimizer)}
    kept = attributes_of(optimizer).items()
    unknown = (n for n, v in kept if n != "step" and not _is_known(v, identities))
    in_groups = (
        f"param_groups[..][{name!r}]"
        for group in optimizer.param_groups
        for name, value in group.items()
        if name != "params" and not (_is_plain(value) or isinstance(value, torch.Tensor))
    )
    return next(chain(unknown, in_groups), "")


def _is_known(value: object, identities: Set[int]) -> bool:
    if isinstance(value, FunctionType):
        return value.__closure__ is None
    if isinstance(value, dict):
        own = all(isinstance(k, torch.Tensor) or k in identities for k in value)
        return own or _is_plain(value)
    return _is_plain(value) or _are_tensors(value)


def _are_tensors(value: object) -> bool:
    """A tensor, or containers of tensors alone, which a trial sees being changed."""
    if isinstance(value, (list, tuple, set, frozenset)):
        return all(map(_are_tensors, value))
    return isinstance(value, torch.Tensor)


def _write(
    target: dict[Any, Any], source: dict[Any, Any], left_out: Set[Any], copies: Copies
) -> None:
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
        if copies.get(id(current)) is value and isinstance(current, _CHANGEABLE):
            _refill(current, value)
        else:
            target[name] = value


def _refill(container: Any, values: Any) -> None:  # noqa: ANN401
    """Let a container have what is in a copy of it: the user may have it in hand, too."""
    if isinstance(container, list):
        container[:] = values
    else:
        container.clear()
        container.update(values)


def _loose(optimizer: Optimizer) -> dict[Any, object]:
    """What is in `state` and no parameter's."""
    state = _of_all(optimizer)
    return {k: value for k, value in state.items() if not isinstance(k, torch.Tensor)}


def _of_all(optimizer: Optimizer) -> dict[Any, Any]:
    """Its `state`, which torch takes for one of parameters alone."""
    return cast("dict[Any, Any]", optimizer.state)


def _copies_of(loose: dict[Any, object]) -> dict[Any, object]:
    """With all that is in containers, too: nothing in there is one parameter's own."""
    return {name: deep_copied(value) for name, value in loose.items()}


def deep_copied(value: object) -> object:
    """A deep copy, or the thing itself where there can be none."""
    try:
        return copy.deepcopy(value)
    except Exception:  # noqa: BLE001  a handle of something, which has no number in it
        return value


def _copied_values(values: Mapping[str, object], copies: Copies) -> dict[str, Any]:
    """Attributes, or a group but for its parameters; what two names have in common they still have.

    Args:
        values: by name.
        copies: of what was copied before; gets the new ones.
    """
    return {name: _copied(value, copies) for name, value in values.items() if name != "params"}


def _copied(value: object, copies: Copies) -> object:
    if isinstance(value, torch.Tensor) and not isinstance(value, torch.nn.Parameter):
        if id(value) not in copies:
            copies[id(value)] = value.detach().clone()
        return copies[id(value)]
    # An empty container may be for parameters' own things, which have to last.
    if isinstance(value, _CHANGEABLE) and value and _is_plain(value):
        return copy.deepcopy(value, copies)
    if isinstance(value, tuple) and any(map(_is_changeable, value)) and _is_plain(value):
        return copy.deepcopy(value, copies)
    return value


def _is_changeable(value: object) -> bool:
    """A tuple of numbers, such as an Adam's `betas` in each of a thousand groups, is no work."""
    return isinstance(value, (tuple, *_CHANGEABLE))


def _is_plain(value: object) -> bool:
    """Numbers, texts, and containers of these alone, of which each bucket has a copy."""
    return isinstance(value, _PLAIN) or (
        isinstance(value, (list, tuple, set, frozenset, dict))
        and all(map(_is_plain, _items(value)))
    )


def _items(container: "Collection[object]") -> Iterator[object]:
    yield from container
    if isinstance(container, dict):
        yield from container.values()


def _is_equal(first: object, second: object) -> bool:
    if first is second:
        return True
    if isinstance(first, torch.Tensor) and isinstance(second, torch.Tensor):
        return torch.equal(first.cpu(), second.cpu())
    if isinstance(first, dict) and isinstance(second, dict):
        same = first.keys() == second.keys()
        return same and all(_is_equal(first[name], second[name]) for name in first)
    if isinstance(first, (list, tuple)) and isinstance(second, (list, tuple)):
        same = len(first) == len(second)
        return same and all(map(_is_equal, first, second))
    if _is_plain(first) and _is_plain(second):
        return bool(first == second) or bool(first != first and second != second)
    return _is_plain(first) == _is_plain(second)
