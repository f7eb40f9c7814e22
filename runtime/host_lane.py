"""Copies between the device and host memory for updates that run on the host's cores.

    backward          follow, out(gradient)
    training thread   begin ---------------------------------------------- end
    worker              out(gradient) -> wait -> update -> back(parameter)

What the device was given before `begin` precedes every copy, and what it is given after `end`
follows all of them. `out` and `back` are called by one thread at a time; the device memory of the
worker's lives until `end`.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import final

import torch

Wait = Callable[[], None]
"""Returns when the bytes are there."""


class HostLane(ABC):
    """The way from the device to the host's cores and back."""

    @abstractmethod
    def follow(self) -> None:
        """In the thread of a backward: all that the device was given precedes later copies out."""

    @abstractmethod
    def begin(self) -> None:
        """In the training thread: all that the device has been given comes first."""

    @abstractmethod
    def enter(self) -> None:
        """In the thread that copies, before its first copy of a step."""

    @abstractmethod
    def out(self, source: torch.Tensor, target: torch.Tensor) -> Wait:
        """Start copying device bytes to host memory, after copies back that were started before.

        Args:
            source: (nbytes,), uint8, on the device.
            target: (nbytes,), uint8, on the host.
        """

    @abstractmethod
    def back(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Start copying host bytes to device memory; `source` must live until `end`."""

    @abstractmethod
    def end(self) -> None:
        """In the training thread: what the device is given from now on comes after all copies."""

    @abstractmethod
    def finish(self) -> None:
        """Wait until no copy is under way: host memory may be given back."""


@final
class PlainLane(HostLane):
    """Where the device is the host itself: copies within memory."""

    def follow(self) -> None:
        """Nothing is queued anywhere."""

    def begin(self) -> None:
        """Nothing is queued anywhere."""

    def enter(self) -> None:
        """Any thread can copy."""

    def out(self, source: torch.Tensor, target: torch.Tensor) -> Wait:
        """Copy at once."""
        target.copy_(source)
        return _nothing

    def back(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Copy at once."""
        target.copy_(source)

    def end(self) -> None:
        """All copies have ended."""

    def finish(self) -> None:
        """All copies have ended."""


def _nothing() -> None:
    """The bytes are there."""
