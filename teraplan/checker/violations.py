"""What can be wrong with a plan; found by the independent checker (`check_plan`)."""

from dataclasses import dataclass
from enum import StrEnum


class ViolationKind(StrEnum):
    """What can be wrong with a plan."""

    TRACE = "trace"
    """The trace itself contradicts itself."""
    TENSOR = "tensor"
    """A migration of a tensor that does not exist."""
    ORDER = "order"
    """Not leave <= gone < back <= needed."""
    PERIOD = "period"
    """The tensor would be away while it is touched, or before or after its life."""
    OVERLAP = "overlap"
    """Two migrations of one tensor in one idle period."""
    CLEAN = "clean"
    """The tier holds no unmodified copy."""
    UPDATE = "update"
    """An update on the host that cannot run there, or moves its tensors at the wrong sites."""
    TIER = "tier"
    """The machine has no such tier, or it is the device."""
    SPLIT = "split"
    """A tensor that is split otherwise than between host and storage, or not into two parts."""
    DEVICE_BUDGET = "device_budget"
    HOST_BUDGET = "host_budget"
    STORAGE_BUDGET = "storage_budget"
    RECOMPUTED = "recomputed"
    """A tensor that cannot be computed again, or not with the others."""
    PREDICTION = "prediction"
    """A predicted number is not what follows from the plan."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Violation:
    """One thing that is wrong with a plan."""

    kind: ViolationKind
    message: str
    migration: int | None = None
    """Index into the plan's migrations."""
    site: int | None = None
