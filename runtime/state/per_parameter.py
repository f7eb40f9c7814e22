"""Tries on copies whether an optimizer updates each parameter by itself, which buckets rely on.

    a alone          -> a'
    a and b together -> a' again?     b's gradient is huge: a norm over both would show

Those of torch do, but for LBFGS. Others may clip by a norm of all gradients within their step, or
go by a parameter's place among the others; nothing in them says so.
"""

import copy
from collections.abc import Sequence
from typing import Any

import torch

from teraplan.errors import UnsupportedError
from teraplan.runtime.state.stand_in import (
    has_tensors_in_containers,
    stand_in,
    values_to_host,
)

Optimizer = torch.optim.Optimizer

_LOUDER = 1e4
_TRIED_ON = "cpu"
"""Copies of two parameters are in host memory, whatever the device: no memory of it is needed."""


def updates_each_by_itself(
    optimizer: Optimizer, args: Sequence[Any], kwargs: dict[str, Any], *, remedy: str
) -> bool:
    """False if the update of one parameter depends on another; needs the memory of two small ones.

    True without a trial where there is nothing to try: one parameter, an optimizer of torch, or one
    that knows its parameters by their identities.

    Raises:
        UnsupportedError: the step fails where others of its parameters are missing; it says what
            `remedy` says.
    """
    if type(optimizer).__module__.startswith("torch.optim"):
        return True
    group = max(optimizer.param_groups, key=lambda g: len(_with_gradients(g)))
    found = sorted(_with_gradients(group), key=lambda p: p.nbytes)[:2]
    if len(found) < 2 or has_tensors_in_containers(optimizer):
        return True
    number = next(i for i, g in enumerate(optimizer.param_groups) if g is group)
    a, b = found
    random = torch.get_rng_state()
    try:
        alone = _updated(optimizer, number, [a], a, args, kwargs)
        draws = not torch.equal(random, torch.get_rng_state())
        torch.set_rng_state(random)
        # Random numbers are drawn in the order of the parameters: a has to stay the first.
        order = [a, b] if draws else [b, a]
        return alone == _updated(optimizer, number, order, a, args, kwargs)
    except Exception as error:
        raise UnsupportedError(
            f"the step of {type(optimizer).__name__} fails for one or two of its parameters alone "
            f"({type(error).__name__}: {error}), so it cannot run in parts; {remedy}"
        ) from error
    finally:
        torch.set_rng_state(random)


def draws_random_numbers(optimizer: Optimizer, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """True if an update uses random numbers; tried on a copy of a small parameter.

    False without a trial for optimizers of torch, none of which does.
    """
    if type(optimizer).__module__.startswith("torch.optim"):
        return False
    random = torch.get_rng_state()
    try:
        for number, group in enumerate(optimizer.param_groups):
            found = sorted(_with_gradients(group), key=lambda p: p.nbytes)[:1]
            if found:
                _updated(optimizer, number, found, found[0], args, kwargs)
        return not torch.equal(random, torch.get_rng_state())
    finally:
        torch.set_rng_state(random)


def _with_gradients(group: dict[str, Any]) -> list[torch.Tensor]:
    return [
        p
        for p in group["params"]
        if p.grad is not None and p.grad.layout == p.layout == torch.strided
    ]


def _updated(
    optimizer: Optimizer,
    group: int,
    parameters: Sequence[torch.Tensor],
    target: torch.Tensor,
    args: Sequence[Any],
    kwargs: dict[str, Any],
) -> bytes:
    """The bytes of `target` and its state after a step of copies of `parameters` alone.

    The state tells more: where an update is a gradient's sign, a norm does not show in it.
    """
    made = stand_in(optimizer, frozenset())
    twins = {parameter: _twin(parameter) for parameter in parameters}
    for parameter, twin in twins.items():
        assert parameter.grad is not None
        louder = 1.0 if parameter is target else _LOUDER
        twin.grad = parameter.grad.detach().to(_TRIED_ON) * louder
        if parameter in optimizer.state:
            made.state[twin] = {
                name: value.to(_TRIED_ON, copy=True)
                if isinstance(value, torch.Tensor)
                else copy.copy(value)
                for name, value in optimizer.state[parameter].items()
            }
    made.param_groups[group]["params"] = list(twins.values())
    values_to_host(made)
    plain_step(made)(made, *args, **kwargs)
    changed = [twins[target], *made.state.get(twins[target], {}).values()]
    tensors = [t.detach().contiguous() for t in changed if isinstance(t, torch.Tensor)]
    return b"".join(t.flatten().view(torch.uint8).numpy().tobytes() for t in tensors)


def _twin(parameter: torch.Tensor) -> torch.Tensor:
    twin = parameter.detach().to(_TRIED_ON, copy=True)
    if isinstance(parameter, torch.nn.Parameter):
        return torch.nn.Parameter(twin, requires_grad=parameter.requires_grad)
    return twin.requires_grad_(parameter.requires_grad)


def plain_step(optimizer: Optimizer) -> Any:  # noqa: ANN401
    """The function that its class calls `step`, without torch's hooks around it."""
    return getattr(type(optimizer).step, "__wrapped__", type(optimizer).step)
