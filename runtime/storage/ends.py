"""Tells whoever waits that a transfer has ended, in Python or in a lane."""

from collections.abc import Callable, Sequence
from functools import partial
from time import perf_counter_ns

from teraplan.runtime.process.locks import Bell
from teraplan.runtime.storage.lane import Lane
from teraplan.runtime.storage.store import Store
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


def nothing_moved_s(transfer: Transfer, began_ns: int, stores: Sequence[Store]) -> float:
    """For so long nothing of the transfer has moved for somebody who waits since `began_ns`."""
    write = transfer.record.write if transfer.record is not None else transfer
    held_until_ns = max(store.held_until_ns for store in stores)
    moved_ns = [one.group.end_ns for one in (transfer, write) if one.group is not None]
    last_ns = max(began_ns, transfer.progress_ns, write.progress_ns, held_until_ns, *moved_ns)
    return (perf_counter_ns() - last_ns) / 1e9
