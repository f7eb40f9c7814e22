"""What is known of updates on the host's cores: of an optimizer, and of its last step."""

from dataclasses import dataclass, field

import torch
from torch.utils.hooks import RemovableHandle

from teraplan.runtime.state.updates.stand_in import Values

Optimizer = torch.optim.Optimizer


@dataclass(frozen=True, slots=True)
class HostReport:
    """What the host did in the last step of an optimizer."""

    num_updates: int = 0
    """Parameters."""
    num_sent_early: int = 0
    """Of these, the ones whose gradients the backward has sent to the host."""
    busy_ns: int = 0
    """That their updates took, copies not counted."""
    waited_ns: int = 0
    """From the end of the device's part to that of the host's."""


@dataclass(slots=True, eq=False)
class Known:
    """What is known of one optimizer, and of its step under way."""

    handles: tuple[RemovableHandle, ...]
    tried: bool = False
    """Its step can be divided, or it is `refused`."""
    refused: bool = False
    measured: bool = False
    """It has been decided how much is faster on the host."""
    has_new_state: bool = False
    """The host has made state that is not yet where a plain step would have it."""
    left: Optimizer | None = None
    """What the hooks before ours have left to be stepped, the user's or a stand-in for it."""
    made: Optimizer | None = None
    """What is left to the user's own call."""
    values: list[Values] = field(default_factory=list[Values])
    """What the parts that are done have left beside `state`."""
