"""Gradients outside of compiled graphs: what autograd adds up, and what eager code makes."""

import weakref
from typing import TYPE_CHECKING

import torch
from torch.utils.hooks import RemovableHandle

from teraplan.runtime.process.untraced import untraced
from teraplan.runtime.state.memory.block import Block

if TYPE_CHECKING:
    from teraplan.runtime.state.memory.training_state import TrainingState


def watch_gradient(
    state: "TrainingState", parameter: torch.Tensor
) -> tuple[RemovableHandle, RemovableHandle]:
    """See that a gradient which is added to is in memory, and that any other is taken in."""
    found, target = weakref.ref(state), weakref.ref(parameter)
    pinned: list[Block] = []

    def before(new: torch.Tensor) -> None:
        alive, owner = found(), target()
        if alive is None or alive.closed or owner is None or owner.grad is None:
            return
        alive.arena.user_may_have_run()  # in a hook of the user, between two gradients
        for gradient in (owner.grad, new):
            block = alive.arena.block_of(gradient) if alive.arena.takes(gradient) else None
            if block is not None:
                alive.begin_use([block], changes=gradient is owner.grad)
                pinned.append(block)

    def after(owner: torch.Tensor) -> None:
        alive = found()
        if alive is not None:
            alive.arena.user_may_have_run()
        while pinned:
            block = pinned.pop()
            if alive is not None and not alive.closed:
                alive.end_use([block])
        gradient = owner.grad
        if alive is None or alive.closed or gradient is None:
            return
        if alive.arena.takes(gradient) and alive.arena.block_of(gradient) is None:
            owner.grad = alive.settle(gradient)
        if alive.at_gradients is not None:
            alive.at_gradients.arrived(owner)

    # A compiled function of the user may call `backward`.
    return (
        parameter.register_hook(untraced(before)),  # type: ignore[no-untyped-call]
        parameter.register_post_accumulate_grad_hook(untraced(after)),  # type: ignore[no-untyped-call]
    )


def has_hooks_of_the_user(parameter: torch.Tensor) -> bool:
    """True if there are more hooks on its gradients than those of its training state."""
    before, after = parameter._backward_hooks, parameter._post_accumulate_grad_hooks
    return len(before or ()) > 1 or len(after or ()) > 1


def is_accumulated(parameter: torch.Tensor) -> bool:
    """False within `torch.autograd.grad`, or a backward for other `inputs`."""
    node = torch.autograd.graph.get_gradient_edge(parameter).node
    try:
        return bool(torch._C._will_engine_execute_node(node))
    except RuntimeError:  # for leaves, in `torch.autograd.grad`
        return False
