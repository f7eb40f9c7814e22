"""The threads of a store: how many, and whom they tell and ask."""

import os
from typing import TYPE_CHECKING, NamedTuple, Protocol

from teraplan.errors import StorageError
from teraplan.runtime.storage.transfers import Chunk
from teraplan.values.run_record import Direction

if TYPE_CHECKING:
    from teraplan.runtime.storage.store import Store

_FEW_CORES = 2


class Workers(NamedTuple):
    """The threads of a store, by what each prefers to move."""

    always: tuple[Direction, ...]
    when_urgent: tuple[Direction, ...] = ()
    """These move only what somebody waits for, and so has left a core to them."""


WORKERS = (
    Workers((Direction.BACK,), (Direction.OUT, Direction.BACK))
    if (os.cpu_count() or 1) <= _FEW_CORES
    else Workers((Direction.BACK, Direction.OUT, Direction.BACK))
)
"""Two keep a disk busy in one direction; of those tried, three moved most with both directions
busy. Where a computation needs all of few cores they take time from it: with one, a step under a
budget of 50 % took 2.59 s on two cores, with two 1.010 and with three 1.007 times as long (medians
of 7 turns). So the others help only those who wait."""


class Reports(Protocol):
    """Who hears what became of chunks."""

    def ended(self, store: "Store", worker: int, chunk: Chunk, error: StorageError | None) -> None:
        """A worker has moved `chunk`, or could not."""

    def count_ended(self, store: "Store") -> None:
        """Chunks have ended in the lane of `store`, or there may be some."""

    def find_work(self, store: "Store") -> None:
        """Nothing is queued in `store`; others may have too much. With the lock held."""

    def pass_on(self, store: "Store", chunk: Chunk) -> bool:
        """Whether another store has taken `chunk`, being sooner done. With the lock held."""
        ...

    def worker_died(self, store: "Store", error: BaseException) -> None:
        """A worker met a bug; what it had taken will not end."""


class Turns(Protocol):
    """Who says when a worker may begin with what it has taken."""

    def wait(self, direction: Direction, nbytes: int) -> None:
        """Until then. Without the lock held."""

    @property
    def is_limited(self) -> bool:
        """Whether anybody has to wait."""
        ...
