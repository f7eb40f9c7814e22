"""What is said where a step has updated some parameters and cannot go on."""

import torch

from teraplan.errors import GradientGoneError
from teraplan.runtime.process.names import described
from teraplan.runtime.state.updates.stand_in import parameters_of

Optimizer = torch.optim.Optimizer


def half_done(optimizer: Optimizer, num_updated: int, *, num_begun: int) -> str:
    """A note for the error that ends a step.

    Args:
        optimizer: whose step it is.
        num_updated: parameters that are those after the step, and so is their state.
        num_begun: of the others, those of which a part may be, too.
    """
    either = f", up to {num_begun} more may be" if num_begun else ""
    num_parameters = sum(1 for _ in parameters_of(optimizer))
    return (
        f"the step of {type(optimizer).__name__} is half done: {num_updated} of {num_parameters} "
        f"parameters and their state are those after it{either}, the others those before; load a "
        "checkpoint to train on"
    )


def too_early(parameter: torch.Tensor, what: str) -> GradientGoneError:
    """The error where something is done that an update in the backward would make wrong."""
    return GradientGoneError(
        f"a parameter ({described(parameter)}) has been updated in the backward, since update is "
        f'"gradient", and {what}. Call step() after each backward, or set update to "step"; if a '
        "backward was interrupted, or its step left out, load a checkpoint of the model and the "
        "optimizer"
    )
