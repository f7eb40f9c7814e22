"""Optimizer state that nobody can read while it is away, for who has to: what there is instead."""

from typing import Any

import torch

from teraplan.runtime.state.memory.arena import StateArena


def readable(arena: StateArena, state_dict: dict[str, Any]) -> dict[str, Any]:
    """An optimizer's `state_dict` whose tensors can be read for as long as they last."""
    memory = arena.memory

    def shown(values: Any) -> Any:  # noqa: ANN401  a dict, for most optimizers
        if not isinstance(values, dict):
            return values
        return {
            name: memory.readable(v) if isinstance(v, torch.Tensor) else v
            for name, v in values.items()
        }

    with memory.lock:
        state = {key: shown(values) for key, values in state_dict["state"].items()}
    return {**state_dict, "state": state}


def bring_home(arena: StateArena, optimizer: torch.optim.Optimizer) -> None:
    """Give all of an optimizer's state memory that nothing takes away, if it may be hidden else."""
    if not arena.memory.hides:
        return
    for values in optimizer.state.values():
        for name, value in values.items() if isinstance(values, dict) else ():
            block = arena.block_of(value) if isinstance(value, torch.Tensor) else None
            if block is not None:
                arena.use(block)
                values[name] = value.clone()
                arena.done(block, leaves=False)
