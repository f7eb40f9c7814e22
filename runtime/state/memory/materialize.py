"""Gives a model on the meta device memory and values, straight where they will live."""

from collections.abc import Callable

import torch
from torch import nn

from teraplan.errors import UnsupportedError
from teraplan.runtime.state.memory.training_state import TrainingState

Initialize = Callable[[nn.Module], object]


def meta_nbytes(model: nn.Module) -> int:
    """Bytes of the model's parameters that have no memory yet."""
    return sum(p.nbytes for p in model.parameters() if p.is_meta)


def materialize(
    model: nn.Module, state: TrainingState | None, initialize: Initialize | None, device: str
) -> None:
    """Give all parameters and buffers on the meta device memory and values, module by module.

    Args:
        model: changed in place. What is not on the meta device is left alone.
        state: takes the parameters in; None: they get memory of their own.
        initialize: called with each module that had a parameter or buffer of its own on the meta
            device, uninitialized by then. None: the module's `reset_parameters`.
        device: where the memory is.

    Raises:
        UnsupportedError: there is no `initialize`, and a module has no `reset_parameters`; or what
            it has is on the meta device when it has been initialized.
    """
    made: dict[int, nn.Parameter] = {}
    for name, module in model.named_modules():
        own = [p for p in module.parameters(recurse=False) if p.is_meta]
        buffers = {n: b for n, b in module.named_buffers(recurse=False) if b.is_meta}
        if not own and not buffers:
            continue
        shared = bool(own) and not buffers and all(id(p) in made for p in own)
        for key, parameter in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            if parameter.is_meta:
                if id(parameter) not in made:
                    made[id(parameter)] = _with_memory(parameter, state, device)
                setattr(module, key, made[id(parameter)])
        for key, buffer in buffers.items():
            module._buffers[key] = torch.empty_like(buffer, device=device)
        if not shared:  # tied: its parameters have their values already
            _initialize(name, module, initialize)
            _require_memory(name, module)


def _with_memory(parameter: nn.Parameter, state: TrainingState | None, device: str) -> nn.Parameter:
    data = state.empty_parameter(parameter) if state is not None else None
    if data is None:
        data = torch.empty_like(parameter, device=device, requires_grad=False)
    made = nn.Parameter(data, requires_grad=parameter.requires_grad)
    if state is not None:
        state.adopt_parameters([made])
    return made


def _initialize(name: str, module: nn.Module, initialize: Initialize | None) -> None:
    if initialize is not None:
        initialize(module)
        return
    reset = getattr(module, "reset_parameters", None)
    if reset is None:
        raise UnsupportedError(
            f"{name or 'the model'} ({type(module).__name__}) has parameters or buffers of its own "
            "and no reset_parameters(): give materialize a function that sets them, "
            "initialize=function_of_a_module"
        )
    reset()


def _require_memory(name: str, module: nn.Module) -> None:
    own = (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False))
    left = ", ".join(key for key, tensor in own if tensor.is_meta)
    if left:
        raise UnsupportedError(
            f"{name or 'the model'} ({type(module).__name__}) has {left} on the meta device after "
            "it was initialized: initialize is to write into the parameters that it is given, with "
            "copy_() or load_state_dict() without assign, and not to put others in their places"
        )
