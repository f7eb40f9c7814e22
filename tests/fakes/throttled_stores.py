"""Real files behind a limit of bandwidth: what several disks of different speeds look like.

Each store gets a pipe of its own that takes so many bytes per second, both directions together,
whatever the number of workers. The real disk has to be faster than all pipes together.
"""

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from teraplan.runtime.storage import Storage
from teraplan.runtime.storage.store import Store

Move = Callable[[int, int, int], None]


class Pipe:
    """Lets so many bytes through per second."""

    def __init__(self, bytes_per_s: float) -> None:
        self.bytes_per_s = bytes_per_s
        self._free_at_s = 0.0
        self._lock = threading.Lock()

    def limited(self, move: Move) -> Move:
        """`move`, and then a wait until the pipe would have let its bytes through."""

        def slow(address: int, nbytes: int, offset: int) -> None:
            with self._lock:
                begin_s = max(self._free_at_s, time.monotonic())
                self._free_at_s = end_s = begin_s + nbytes / self.bytes_per_s
            move(address, nbytes, offset)
            time.sleep(max(0.0, end_s - time.monotonic()))

        return slow


def throttle(storage: Storage, speeds: Sequence[float]) -> list[Pipe]:
    """Limits the stores of `storage` to these bytes per second each."""
    pipes = [Pipe(speed) for speed in speeds]
    for store, pipe in zip(storage.traffic.stores, pipes, strict=True):
        _limit(store, pipe)
    return pipes


def opening_limited(bytes_per_s: float) -> Callable[..., Storage]:
    """`Storage.open`, where all that is opened by it shares one pipe."""
    opened, pipe = Storage.open, Pipe(bytes_per_s)

    def limited(*args: Any, **options: Any) -> Storage:  # noqa: ANN401
        storage = opened(*args, **options)
        for store in storage.traffic.stores:
            _limit(store, pipe)
        return storage

    return limited


def _limit(store: Store, pipe: Pipe) -> None:
    """Lets what `store` moves through `pipe`."""
    store.uses_lane = False
    for name in ("write", "read"):
        setattr(store.arena, name, pipe.limited(getattr(store.arena, name)))
