"""Steps whose closure runs the first graph: it is called before the step begins, not within it.

    hooks of the user | closure: graphs are compiled, the state moves | buckets | the user's call

Lightning gives every step a closure. What moves the training state puts its hooks around a step
when the step is called, so for that first step it would come too late: the optimizer would make all
of its state at once. In later steps the hooks call the closure themselves.
"""

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from teraplan.runtime.process.untraced import untraced
from teraplan.runtime.state.updates import attachment, optimizer_steps
from teraplan.runtime.state.updates.stand_in import is_of_torch
from teraplan.runtime.state.updates.step_hooks import (
    called_once,
    closure_of,
    is_nested,
    put_innermost,
)

Optimizer = torch.optim.Optimizer

_met: "weakref.WeakSet[Optimizer]" = weakref.WeakSet()
"""Optimizers whose first step with a closure has been seen."""
_begins: "weakref.WeakSet[Optimizer]" = weakref.WeakSet()
"""Of these, those in whose first step the closure has not been called."""


def call_first_closures_early(is_ours: Callable[[Optimizer], bool]) -> None:
    """Do so in this process from now on, for optimizers that are known to begin with the closure.

    `is_ours`: says whether one trains a model that is compiled by this backend. Those of others are
    left alone, and so are optimizers that are not torch's: they may do something before.
    """

    def before(optimizer: Optimizer, args: Any, kwargs: Any) -> None:  # noqa: ANN401
        if optimizer in _met or closure_of(args, kwargs) is None or is_nested(optimizer):
            return
        if not is_of_torch(optimizer) or attachment.is_detached(optimizer):
            return
        _met.add(optimizer)
        if is_ours(optimizer):
            _begins.add(optimizer)
            # Not called in this one: hooks of sessions that it opens would join those under way.
            first = optimizer.register_step_pre_hook(untraced(_before_step))
            last = optimizer.register_step_post_hook(untraced(_after_step))
            put_innermost(optimizer, first, last)

    register_optimizer_step_pre_hook(untraced(before))


def _before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> Any:  # noqa: ANN401
    if optimizer not in _begins:
        return None
    _begins.discard(optimizer)
    begin = [steps for steps in optimizer_steps.alive() if steps.has_hooks(optimizer)]
    args, kwargs = called_once(args, kwargs, again=True)
    for steps in optimizer_steps.alive():
        begun = None if steps in begin else steps.begin_late(optimizer, args, kwargs)
        if begun is not None:
            return begun
    return args, kwargs


def _after_step(optimizer: Optimizer, *_: object) -> None:
    for steps in optimizer_steps.alive():
        steps.end_late(optimizer)
