"""Tells whoever waits that a transfer has ended, in Python or in a lane."""

from collections.abc import Callable
from functools import partial

from teraplan.runtime.process.locks import Bell
from teraplan.runtime.storage.lane import Lane
from teraplan.runtime.storage.transfers import Transfer

Wait = Callable[[float], object]
"""For at most so many seconds."""
_COUNT_S = 1.0
"""Workers count what has ended as soon as they have moved what they have in hand."""


class Ends:
    """Of one traffic, with whose lock `ring` and `until_next` are called."""

    def __init__(self, lane: Lane | None) -> None:
        self._lane, self._bell = lane, Bell()

    def ring(self) -> None:
        """A transfer has ended in Python, or there will be none."""
        self._bell.ring()
        if self._lane is not None:
            self._lane.ring()

    def until_next(self) -> Wait:
        """Waits until a transfer has ended since now."""
        if self._lane is not None:
            return partial(self._lane.await_end, self._lane.num_ended)
        waiter = self._bell.enlist()
        return lambda patience_s: waiter.acquire(timeout=patience_s)

    def ask_for(self, transfer: Transfer) -> None:
        """A worker is to see to the end of `transfer` at once, for something waits for it."""
        if self._lane is not None and transfer.group is not None:
            self._lane.ask_report(transfer.group)

    def see_to_all(self) -> bool:
        """Wait until workers have seen to what has ended; False if there was nothing."""
        if self._lane is None or not self._lane.num_uncounted:
            return False
        self._lane.catch_up(_COUNT_S)
        return True
