"""What really happened in one step under a plan, beside what was predicted."""

from dataclasses import dataclass
from enum import StrEnum

from teraplan.values.hardware import Tier


class Direction(StrEnum):
    """Which way a transfer went, seen from the device."""

    OUT = "out"
    BACK = "back"


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferRecord:
    """One finished transfer; times count from the start of the step."""

    tensor: str
    nbytes: int
    direction: Direction
    tier: Tier
    store: str
    """Storage directory, "" for the host tier."""
    start_ns: int
    end_ns: int


TRAINING_STATE = "training state"


@dataclass(frozen=True, slots=True, kw_only=True)
class StallRecord:
    """One wait of the computation for a transfer."""

    site: int
    tensor: str
    """Its name; `TRAINING_STATE` for all parameters, gradients and optimizer state that move."""
    start_ns: int
    duration_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRecord:
    """One step as it ran."""

    step: int
    duration_ns: int
    device_peak_bytes: int
    """As the engine counted: state, workspace of the trace and resident tensors."""
    managed_peak_bytes: int
    site_start_ns: tuple[int, ...]
    managed_bytes: tuple[int, ...]
    """Bytes of managed tensors resident after each site."""
    transfers: tuple[TransferRecord, ...]
    stalls: tuple[StallRecord, ...]
