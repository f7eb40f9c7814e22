"""Watches one plain step of an optimizer: could its parameters have been updated in the backward?

    settle      what a graph has computed        is all of the gradient
    arrived     p.grad after the backward        nobody has added to it
    end         p.grad, p, its state and         nobody has changed them since
                param_groups before the
                optimizer's own step

Bytes are compared by digests, so whoever changes something is seen, however it is done. Who writes
to gradients what was there, as clipping does below its limit, is seen by their counters.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

from teraplan.runtime.process import census
from teraplan.runtime.state.memory.arena import StateArena
from teraplan.runtime.state.updates.bits import Bits, StateBits, digest_in, digest_of
from teraplan.runtime.state.updates.stand_in import Values, equal, values_beside_state

Optimizer = torch.optim.Optimizer

BETWEEN = "between the backward and the optimizer's step"
_ADDED = (
    "gradients are added to others (several backwards for a step, or zero_grad(set_to_none=False))"
)


@dataclass(slots=True)
class _Seen:
    """Digests of one parameter's gradients in the step."""

    settled: list[int] = field(default_factory=list[int])
    arrived: list[int] = field(default_factory=list[int])
    version: int = -1
    """Of the gradient when it arrived, as torch counts writes."""
    value: Bits | None = None
    """The parameter when its gradient arrived."""
    state: StateBits | None = None
    """Its optimizer state then."""


class Rehearsal:
    """One step; `reason` says why not, as soon as it is known."""

    def __init__(self, arena: StateArena) -> None:
        self._arena = arena
        self.reason = ""
        self._values: Values | None = None
        self._seen = WeakIdKeyDictionary()

    @property
    def has_begun(self) -> bool:
        """True if a gradient has arrived."""
        return self._values is not None

    def refuse(self, reason: str) -> None:
        """It could not have been; the first reason counts."""
        self.reason = self.reason or reason

    def settle(self, parameter: torch.Tensor, gradient: torch.Tensor) -> None:
        """A graph has computed a gradient."""
        if parameter.grad is not None:
            self.refuse(_ADDED)
        self._of(parameter).settled.append(digest_of(as_gradient_of(parameter, gradient)))

    def arrived(self, optimizer: Optimizer, parameter: torch.Tensor) -> None:
        """The backward has given the parameter its gradient."""
        if self._values is None:
            self._values = values_beside_state(optimizer)
        seen = self._of(parameter)
        if parameter.grad is not None and self._arena.takes(parameter.grad):
            seen.arrived.append(digest_in(self._arena, parameter.grad))
            seen.version = parameter.grad._version
            seen.value = Bits.of(parameter, self._arena)
            seen.state = StateBits.of(optimizer.state.get(parameter, {}), self._arena)

    def end(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> list[torch.Tensor]:
        """The optimizer's own step begins; returns what it could have updated before."""
        for reason in self._reasons(optimizer, args, kwargs):
            self.refuse(reason)
        return [p for p in self._seen if self._of(p).settled == self._of(p).arrived]

    def _reasons(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Iterator[str]:
        if is_given_more(args, kwargs):
            yield "its step is given arguments that are no closure"
        if torch.is_autocast_enabled("cpu"):
            yield "its step runs under autocast"
        if any(group.get("differentiable") for group in optimizer.param_groups):
            yield "it is differentiable"
        if getattr(optimizer, "grad_scale", None) is not None or _is_unscaled(optimizer):
            yield "a GradScaler is used"
        if self._values is not None and not equal(self._values, values_beside_state(optimizer)):
            yield f"param_groups, such as the learning rate, are changed {BETWEEN}"
        for parameter in self._seen:
            seen = self._of(parameter)
            if len(seen.arrived) > 1:
                yield _ADDED
            if seen.arrived and (parameter.grad is None or not self._arena.takes(parameter.grad)):
                yield f"gradients are dropped or replaced {BETWEEN}"
            elif seen.arrived and self._is_written(parameter.grad, seen):
                yield f"gradients are changed {BETWEEN} (clipping, GradScaler, a hook)"
            if seen.value is not None and not seen.value.are_those_of(parameter, self._arena):
                yield f"parameters are changed {BETWEEN}"
            state = optimizer.state.get(parameter, {})
            if seen.state is not None and not seen.state.are_those_of(state, self._arena):
                yield f"optimizer state is changed {BETWEEN}"

    def _is_written(self, gradient: torch.Tensor, seen: _Seen) -> bool:
        """True if somebody has written to it, be it what was there."""
        if gradient._version != seen.version:
            return True
        return digest_in(self._arena, gradient) != seen.arrived[-1]

    def _of(self, parameter: torch.Tensor) -> _Seen:
        if parameter not in self._seen:
            self._seen[parameter] = _Seen()
        found: _Seen = self._seen[parameter]
        return found


def is_given_more(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """True if a step with these arguments is called with more than a closure, which is over."""
    found = (*args, *(kwargs[name] for name in kwargs if name != "closure"))
    return any(value is not None and not callable(value) for value in found)


def as_gradient_of(parameter: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    """The gradient with its parameter's strides, as autograd would leave it; a copy if need be."""
    if gradient.stride() == parameter.stride():
        return gradient
    return torch.empty_like(parameter, requires_grad=False).copy_(gradient)


def _is_unscaled(optimizer: Optimizer) -> bool:
    """True if a GradScaler has looked at its gradients; with a scale of 1 it writes nothing."""
    found = [getattr(s, "_per_optimizer_states", {}) for s in census.gradient_scalers()]
    return any(s[id(optimizer)]["found_inf_per_device"] for s in found if id(optimizer) in s)
