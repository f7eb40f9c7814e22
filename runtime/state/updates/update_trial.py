"""An optimizer's step on copies of a few parameters, in host memory, with nothing else in reach.

    theirs    groups [a b c] [d]    lists, dicts of the optimizer's own
    trial     groups [a'   ] [d']   what belongs to a or d, by them or their identity: to a' or d'

Whatever else the step touches of the real parameters, or writes into, ends it: what it does then no
part of it can do alone, and nothing real has changed. Of a large parameter a corner is enough, with
the same corner of its state.
"""

import copy
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any, final

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from teraplan.runtime.state.memory.movable import memory_of
from teraplan.runtime.state.updates.host_state import shares_memory
from teraplan.runtime.state.updates.stand_in import (
    Values,
    attributes_of,
    deep_copied,
    parameters_of,
    stand_in,
    tensors_in_containers,
    values_beside_state,
    values_to_host,
)

Optimizer = torch.optim.Optimizer

_TRIED_ON = "cpu"
"""Copies are in host memory, whatever the device: no memory of it is needed."""
LOUD, QUIET, NOT_FINITE = 1e4, 1e-6, float("nan")
"""What the largest element of the other gradients is."""
_SEEN = 1e-4
"""What the largest element of a gradient is at least, for its update to be more than rounding."""
_CORNER = 16
"""Of a matrix's rows and columns."""


class OutOfReachError(Exception):
    """The step has used what belongs to none of its parameters."""


class ClosureTwiceError(Exception):
    """The step has called its closure again."""


@final
class UpdateTrial:
    """One step of copies; afterwards `target_bytes` and `values` say what has become of them."""

    def __init__(
        self,
        optimizer: Optimizer,
        parameters: Sequence[torch.Tensor],
        target: torch.Tensor,
        *,
        others: float = LOUD,
        cut: Set[int] = frozenset(),
    ) -> None:
        """Copies.

        Args:
            optimizer: whose step it is.
            parameters: some of its parameters, in the order in which it is to find them.
            target: one of them.
            others: the largest element of the gradients of those beside it.
            cut: identities of those of which a corner is taken.
        """
        shapes = [_corner_shape(p) if id(p) in cut else tuple(p.shape) for p in parameters]
        twins = [
            _Twin(p, _copy_of(p, shape, None if p is target else others), shape)
            for p, shape in zip(parameters, shapes, strict=True)
        ]
        self._target = next(twin.made for twin in twins if twin.of is target)
        self._identities = {id(p) for p in (*parameters_of(optimizer), *(t.made for t in twins))}
        self._guard, self._others = _Guard(optimizer), others
        made = self._made = stand_in(optimizer, frozenset())
        containers = attributes_of(made).items()
        self._empty = [n for n, v in containers if isinstance(v, (dict, list, set)) and not v]
        for name, value in containers:
            if isinstance(value, (dict, list, set)):
                setattr(made, name, _translated(value, twins))
        for group, theirs in zip(made.param_groups, optimizer.param_groups, strict=True):
            own = {id(p) for p in theirs["params"]}
            group["params"] = [twin.made for twin in twins if id(twin.of) in own]
        for twin in twins:
            if twin.of in optimizer.state:
                made.state[twin.made] = twin.copied(optimizer.state[twin.of])
        values_to_host(made)

    def run(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Do the step.

        Raises:
            OutOfReachError: it uses what is no copy.
            ClosureTwiceError: it calls its closure more than once.
        """
        given, named = list(args), dict(kwargs)
        if "closure" in named:
            named["closure"] = _once(named["closure"])
        elif given:
            given[0] = _once(given[0])
        # Copies are no shapes to compile anything for.
        try:
            with torch.compiler.set_stance("force_eager"), self._guard:
                plain_step(self._made)(self._made, *given, **named)
        except Exception as error:
            if self._others is NOT_FINITE:
                error.add_note("tried on copies, where another one's gradient is not finite")
            raise

    @property
    def fills(self) -> str:
        """Name of an attribute, empty before, in which it keeps what is no parameter's own."""
        kept = (
            (name, _without(getattr(self._made, name, None), self._identities))
            for name in self._empty
        )
        return next((name for name, left in kept if left), "")

    @property
    def target_bytes(self) -> bytes:
        """Of the target and its state: where an update is a gradient's sign, the state tells more
        than the parameter."""
        changed = [self._target, *self._made.state.get(self._target, {}).values()]
        tensors = [t.detach().contiguous() for t in changed if isinstance(t, torch.Tensor)]
        return b"".join(t.flatten().view(torch.uint8).numpy().tobytes() for t in tensors)

    @property
    def state_shares_memory(self) -> bool:
        """True if the target's state is not tensors each with memory of its own."""
        return shares_memory(self._made.state.get(self._target, {}), self._target)

    @property
    def values(self) -> Values:
        """What the step has left that is no parameter's."""
        return [
            {name: _without(value, self._identities) for name, value in values.items()}
            for values in values_beside_state(self._made)
        ]


def plain_step(optimizer: Optimizer) -> Any:  # noqa: ANN401
    """The function that its class calls `step`, without torch's hooks around it."""
    return getattr(type(optimizer).step, "__wrapped__", type(optimizer).step)


def _once(closure: Any) -> Any:  # noqa: ANN401
    """A closure whose second call ends the trial; what is none, as it is."""
    if not callable(closure):
        return closure
    called: list[bool] = []

    def call() -> object:
        if called:
            raise ClosureTwiceError
        called.append(True)
        return closure()

    return call


@final
class _Guard(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Lets no operation use real parameters, gradients and state, or write what containers have."""

    def __init__(self, optimizer: Optimizer) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._theirs = {memory_of(t) for t in _tensors_of(optimizer)}
        self._readable = {memory_of(t) for t in tensors_in_containers(optimizer)} - self._theirs

    def __torch_dispatch__(
        self,
        func: Any,  # noqa: ANN401
        types: Any,  # noqa: ANN401
        args: Any = (),  # noqa: ANN401
        kwargs: Any = None,  # noqa: ANN401
    ) -> Any:  # noqa: ANN401
        kwargs = kwargs or {}
        for number, declared in enumerate(func._schema.arguments):
            alias = declared.alias_info
            value = args[number] if number < len(args) else kwargs.get(declared.name)
            writes = alias is not None and alias.is_write
            for tensor in tree_leaves(value):
                if isinstance(tensor, torch.Tensor) and self._forbids(memory_of(tensor), writes):
                    raise OutOfReachError
        return func(*args, **kwargs)

    def _forbids(self, memory: int, writes: bool) -> bool:
        return memory in self._theirs or (writes and memory in self._readable)


def _without(value: object, identities: Set[int]) -> object:
    """Without what a dict has for parameters, or for their identities."""
    if not isinstance(value, dict):
        return value
    return {
        key: inner
        for key, inner in value.items()
        if not isinstance(key, torch.Tensor) and not (type(key) is int and key in identities)
    }


def _tensors_of(optimizer: Optimizer) -> Iterator[torch.Tensor]:
    for p in parameters_of(optimizer):
        yield p
        if p.grad is not None:
            yield p.grad
        yield from (v for v in optimizer.state.get(p, {}).values() if isinstance(v, torch.Tensor))


def _corner_shape(p: torch.Tensor) -> tuple[int, ...]:
    """Of the part of a parameter that is enough to try its update."""
    return tuple(min(size, _CORNER) for size in p.shape)


@dataclass(frozen=True, slots=True, eq=False)
class _Twin:
    """A copy of a parameter, or of a corner of it."""

    of: torch.Tensor
    made: torch.Tensor
    shape: tuple[int, ...]

    def copied(self, value: Any) -> Any:  # noqa: ANN401
        """Something of the parameter's own, such as its state, for the copy."""
        if isinstance(value, torch.Tensor):
            return _corner(value, self.shape if value.shape == self.of.shape else value.shape)
        if isinstance(value, dict):
            return {key: self.copied(inner) for key, inner in value.items()}
        if type(value) in (list, tuple):
            return type(value)(map(self.copied, value))
        return deep_copied(value)


def _copy_of(p: torch.Tensor, shape: Sequence[int], largest: float | None) -> torch.Tensor:
    made = _corner(p, shape)
    if isinstance(p, torch.nn.Parameter):
        made = torch.nn.Parameter(made, requires_grad=p.requires_grad)
    else:
        made.requires_grad_(p.requires_grad)
    assert p.grad is not None
    gradient = _corner(p.grad, shape)
    if float(gradient.abs().max()) < _SEEN:  # fresh adapters' are zero: no sum would show them
        numbers = torch.arange(gradient.numel(), device=_TRIED_ON)
        gradient.copy_((numbers % 7 + 1).mul(1e-2).view(gradient.shape))
    if largest is not None:
        gradient.mul_(largest / float(gradient.abs().max()))
    made.grad = gradient
    return made


def _corner(tensor: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    return tensor.detach()[tuple(map(slice, shape))].to(_TRIED_ON, copy=True)


def _translated(container: Any, twins: Sequence[_Twin]) -> Any:  # noqa: ANN401
    """A copy; in a dict what belongs to a parameter, or to its identity, belongs to its twin."""
    made = copy.copy(container)
    if isinstance(made, dict):
        made.clear()
        for key, value in container.items():
            for twin in twins:
                if key is twin.of:
                    made[twin.made] = twin.copied(value)
                    break
                if type(key) is int and key == id(twin.of):
                    made[id(twin.made)] = twin.copied(value)
                    break
            else:
                made[key] = value
    return made
