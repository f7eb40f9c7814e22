"""teraplan: a memory compiler for PyTorch training. Importing it imports no torch.

model.compile(backend="teraplan", options={"device_budget": "8GiB"})
...
print(teraplan.status())
"""

import importlib
import sys
from typing import TYPE_CHECKING

from teraplan.errors import TeraplanError
from teraplan.values.status import Status

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import torch
    from torch import nn

    from teraplan import backend as _backend

__all__ = [
    "Status",
    "TeraplanError",
    "__version__",
    "attach",
    "detach",
    "dump",
    "materialize",
    "status",
]
__version__ = "0.1.0"


def materialize(
    model: "nn.Module",
    *,
    options: "Mapping[str, object] | None" = None,
    initialize: "Callable[[nn.Module], object] | None" = None,
    device: str = "cpu",
) -> "nn.Module":
    """`model`, built under `torch.device("meta")`, with memory and values; never whole in memory.

    Args:
        model: changed in place, and returned. Compile it with the same options.
        options: as for `model.compile(backend="teraplan", options=...)`.
        initialize: sets the parameters and buffers of one module; it is called for each module that
            has some of its own. None: the module's `reset_parameters` does.
        device: type of the device that it is to be trained on.
    """
    module: _backend = importlib.import_module("teraplan.backend")  # type: ignore[valid-type]
    return module.materialize(  # type: ignore[no-any-return,attr-defined]
        model, options=options, initialize=initialize, device=device
    )


def attach(optimizer: "torch.optim.Optimizer") -> "torch.optim.Optimizer":
    """Let the optimizer's step run in buckets where the training state moves; returns it.

    An optimizer with parameters of a compiled model needs no such call: it attaches itself. This
    says it beforehand, takes back `detach`, and has three effects of its own: an optimizer that
    cannot be attached is refused here instead of at its first step; state that it already has, as
    after `load_state_dict`, moves at once; so do its parameters that are in no compiled model, such
    as a head that runs eagerly or fp32 master weights.

    Raises:
        UnsupportedError: it is no optimizer, or one that updates all parameters together (LBFGS).
    """
    module: _backend = importlib.import_module("teraplan.backend")  # type: ignore[valid-type]
    return module.attach(optimizer)  # type: ignore[no-any-return,attr-defined]


def detach(optimizer: "torch.optim.Optimizer") -> "torch.optim.Optimizer":
    """Let the optimizer's step run as torch runs it, from its next step on; returns it.

    Parameters and gradients go on moving. The step reads and writes what is away through its file:
    slower, and the same bits. What state it has stays where it is, new state stays in memory.

    Raises:
        UnsupportedError: it is no optimizer.
    """
    module: _backend = importlib.import_module("teraplan.backend")  # type: ignore[valid-type]
    return module.detach(optimizer)  # type: ignore[no-any-return,attr-defined]


def status() -> Status:
    """What the compiled model that ran last does: coverage, budget, peaks, times, waits, paths."""
    loaded = sys.modules.get("teraplan.backend")
    if loaded is None:  # nothing has been compiled
        return Status(phase="idle")
    module: _backend = loaded  # type: ignore[valid-type]
    return module.current_status()  # type: ignore[no-any-return,attr-defined]


def dump() -> None:
    """Print to standard error what is under way right now: step, stores, queues, running I/O.

    The signal SIGUSR1 does the same from the first compiled call on, unless the program uses it for
    something else.
    """
    loaded = sys.modules.get("teraplan.backend")
    text = "teraplan: no session" if loaded is None else loaded.current_dump()
    sys.stderr.write(f"{text}\n")
