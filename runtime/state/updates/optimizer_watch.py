"""Tells a session when an optimizer has stepped."""

import weakref
from typing import Protocol

from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook
from torch.utils.hooks import RemovableHandle

from teraplan.runtime.process.untraced import untraced
from teraplan.runtime.state.updates.stand_in import is_stand_in


class Watching(Protocol):
    """Who is told."""

    def optimizer_stepped(self) -> None:
        """Some optimizer has updated its parameters."""
        ...


def watch_optimizers(who: Watching) -> RemovableHandle:
    """Call `who` after every `Optimizer.step` in this process; keeps nothing alive."""
    watching = weakref.ref(who)

    def after(optimizer: Optimizer, *_: object) -> None:
        alive = watching()
        if alive is not None and not is_stand_in(optimizer):  # a part of a step, in any thread
            alive.optimizer_stepped()

    return register_optimizer_step_post_hook(untraced(after))
