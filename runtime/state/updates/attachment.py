"""What users have said about optimizers: `teraplan.attach`, `teraplan.detach`, or nothing."""

import weakref

import torch

from teraplan.errors import UnsupportedError

Optimizer = torch.optim.Optimizer

_NOT_PER_PARAMETER = ("LBFGS",)
REMEDY = (
    "call teraplan.detach(optimizer), which lets its step run as a whole and read what is away "
    'from its file, or set training_state to "stays"'
)

_wishes: "weakref.WeakKeyDictionary[Optimizer, bool]" = weakref.WeakKeyDictionary()


def note(optimizer: object, *, attached: bool) -> Optimizer:
    """Remember what the user has said; returns the optimizer.

    Raises:
        UnsupportedError: it is none, or one that cannot be attached.
    """
    if not isinstance(optimizer, Optimizer):
        raise UnsupportedError(
            f"a {type(optimizer).__name__} is no torch.optim.Optimizer: give the optimizer itself"
        )
    if attached:
        refuse_by_name(optimizer)
    _wishes[optimizer] = attached
    return optimizer


def is_attached(optimizer: Optimizer) -> bool:
    """True if `teraplan.attach` was called last."""
    return _wishes.get(optimizer) is True


def is_detached(optimizer: Optimizer) -> bool:
    """True if `teraplan.detach` was called last."""
    return _wishes.get(optimizer) is False


def refuse_by_name(
    optimizer: Optimizer, *, where: str = "where the training state moves", remedy: str = REMEDY
) -> None:
    """Raise an UnsupportedError if it is known to update all parameters together."""
    name = type(optimizer).__name__
    if any(kind.__name__ in _NOT_PER_PARAMETER for kind in type(optimizer).__mro__):
        raise UnsupportedError(
            f"{name} updates all parameters together, which is not possible in buckets {where}; "
            f"{remedy}"
        )
