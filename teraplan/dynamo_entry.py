"""What `backend="teraplan"` names; says so where a model was to be compiled and nothing has been.

PyTorch itself skips a bare `nn.Sequential` or `nn.Linear` that is compiled in place: the backend is
looked up and never called, and the model trains as if nobody had asked for anything. So importing
this module, which is what looking it up does, means that something is to be compiled.
"""

import logging
from collections.abc import Callable

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from teraplan.backend import has_compiled, teraplan, train_uncompiled, trains_compiled
from teraplan.runtime.state.updates.first_closure import call_first_closures_early

__all__ = ["teraplan"]

log = logging.getLogger(__name__)

_NOTHING_COMPILED = (
    "an optimizer steps, and no graph has been compiled: the memory budget holds for nothing. "
    "PyTorch skips some models: a bare nn.Sequential or nn.Linear with model.compile(...) (use "
    'torch.compile(model, backend="teraplan") or a module of your own), recurrent ones such as '
    "nn.LSTM, and a function with a graph break in a loop; TORCH_LOGS=graph_breaks tells why"
)


def warn_at_first_step(is_in_use: Callable[[], bool]) -> None:
    """Warn when the next optimizer steps, of whatever model, if there is no compiled graph yet.

    That step raises a FallbackRefusedError where its model was to be compiled with `strict`.
    """
    told = waited = False

    def before(
        optimizer: torch.optim.Optimizer, args: tuple[object, ...], kwargs: dict[str, object]
    ) -> None:
        nonlocal told, waited
        if told:
            return
        if all(group.get("lr", 1) == 0 for group in optimizer.param_groups):
            return  # trains nothing: torch.distributed.checkpoint lets it make its state
        if not waited and any(map(callable, (*args[1:], *kwargs.values()))):
            waited = True  # a closure: its forward is still to come
            return
        if not is_in_use():
            log.warning("%s. If this step is another model's, all is well", _NOTHING_COMPILED)
            train_uncompiled(optimizer, _NOTHING_COMPILED)
        told = True

    register_optimizer_step_pre_hook(before)


warn_at_first_step(has_compiled)
call_first_closures_early(trains_compiled)
