"""What runs around `Optimizer.step`: hooks that torch keeps, and the calls between them."""

import sys
import weakref
from collections import OrderedDict
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any

import torch
from torch._C._dynamo.eval_frame import get_eval_frame_callback
from torch.utils.hooks import RemovableHandle

from teraplan.errors import UnsupportedError
from teraplan.runtime.process.untraced import untraced
from teraplan.runtime.state.updates.stand_in import found_in, is_stand_in, parameters_of

Optimizer = torch.optim.Optimizer


def put_innermost(optimizer: Optimizer, before: RemovableHandle, after: RemovableHandle) -> None:
    """Let these hooks be the last before the optimizer's step and the first after it."""
    _ordered(optimizer._optimizer_step_pre_hooks).move_to_end(before.id)
    _ordered(optimizer._optimizer_step_post_hooks).move_to_end(after.id, last=False)


def _ordered(hooks: object) -> "OrderedDict[int, Any]":
    assert isinstance(hooks, OrderedDict), "torch keeps hooks in the order of their registration"
    return hooks


def is_nested(optimizer: Optimizer) -> bool:
    """True within a step that a step of the same optimizer has called: of a base class, or ours."""
    if is_stand_in(optimizer):
        return True
    depth = 0
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code is _STEP_WITH_HOOKS and frame.f_locals.get("self") is optimizer:
            depth += 1
        frame = frame.f_back
    return depth > 1


_STEP_WITH_HOOKS = next(
    constant
    for constant in Optimizer.profile_hook_step.__code__.co_consts
    if isinstance(constant, CodeType)
)
"""Code of the function that torch puts around every optimizer's `step`."""


def steps_another(optimizer: Optimizer) -> bool:
    """True for one around another, such as Lookahead: what is moved is that other one's."""
    kept = found_in(list(vars(optimizer).values()), Optimizer)
    return any(one is not optimizer for one in kept)


def put_in_order(optimizer: Optimizer) -> None:
    """Let `state` have its entries in the order in which a plain step would have made them."""
    for parameter in parameters_of(optimizer):
        if parameter in optimizer.state:
            optimizer.state[parameter] = optimizer.state.pop(parameter)


def closure_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[[], object] | None:
    """The closure among a step's arguments (the optimizer first).

    None without one, also where it is something else that a step of a user's own is given.
    """
    given = kwargs.get("closure", args[1] if len(args) > 1 else None)
    return given if callable(given) else None


def called_once(
    args: tuple[Any, ...], kwargs: dict[str, Any], *, again: bool = False
) -> tuple[Any, dict[str, Any]]:
    """The step's arguments with the closure called, and its result kept for whoever calls it.

    `again`: for the first call alone; later ones call it again.
    """
    closure = closure_of(args, kwargs)
    if closure is None:
        return args, kwargs
    with torch.enable_grad():
        kept = [closure()]

    def result() -> object:
        if not again:
            return kept[0]
        return kept.pop() if kept else closure()

    if "closure" in kwargs:
        return args, {**kwargs, "closure": result}
    return (*args[:1], result, *args[2:]), kwargs


def calling(owner: "weakref.ref[Any]", method: str) -> Callable[..., Any]:
    """A hook that keeps its owner alive no longer than others do; Dynamo does not look into it."""

    def hook(*args: Any) -> Any:  # noqa: ANN401
        alive = owner()
        return getattr(alive, method)(*args) if alive is not None else None

    return untraced(hook)


Hook = Callable[..., Any]


def hooks_of(owner: object, remedy: str) -> tuple[Hook, Hook, Hook]:
    """What calls `_before`, `_after` and `_loaded` of `owner` at an optimizer's step and loading.

    The first raises an UnsupportedError in code that `torch.compile` compiles: it would compile
    what is left to the user's call anew in each step, and round otherwise than the parts before.
    """
    names = ("_before", "_after", "_loaded")
    before, after, loaded = (calling(weakref.ref(owner), name) for name in names)

    def plain_before(optimizer: Optimizer, *args: Any) -> Any:  # noqa: ANN401
        if callable(get_eval_frame_callback()):
            raise UnsupportedError(
                f"{type(optimizer).__name__}.step() is called by code that torch.compile compiles, "
                f"which is not possible where it runs in parts: call it outside, or {remedy}"
            )
        return before(optimizer, *args)

    return untraced(plain_before, recursive=False), after, loaded
