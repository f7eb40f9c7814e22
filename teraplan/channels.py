"""One link under simulation: a queue and a running transfer in each direction.

Each transfer takes the link's latency and then its bytes at the speed of its direction, which is
lower while a transfer runs in the other direction. Times are nanoseconds as floats, so that many
short transfers add no rounding; the caller rounds when it reports.
"""

import math
from collections import deque
from dataclasses import dataclass
from typing import final

from teraplan.hardware import Link, Tier
from teraplan.run_record import Direction


@dataclass(slots=True, eq=False)
class Transfer:
    """A transfer in the simulation; mutable while it runs."""

    migration: int
    direction: Direction
    tier: Tier
    nbytes: int
    latency_left: float = 0.0
    bytes_left: float = 0.0
    start: float = -1.0
    end: float = -1.0


@final
class Channels:
    """Both directions of one link. Calls must come in order of time."""

    def __init__(self, link: Link) -> None:
        self._latency = float(link.latency_ns)
        per_ns = 1e-9
        # [out, back] by [alone, while the other direction is busy], in bytes per ns
        self._speed = (
            (link.out_bytes_per_s * per_ns, link.out_while_back_bytes_per_s * per_ns),
            (link.back_bytes_per_s * per_ns, link.back_while_out_bytes_per_s * per_ns),
        )
        self._queues: tuple[deque[Transfer], deque[Transfer]] = (deque(), deque())
        self._running: list[Transfer | None] = [None, None]
        self._now = 0.0

    def submit(self, transfer: Transfer, now: float) -> None:
        """Queues `transfer` at time `now`; it starts at once if its direction is idle."""
        self._advance(now)
        transfer.latency_left = self._latency
        transfer.bytes_left = float(transfer.nbytes)
        self._queues[_side(transfer)].append(transfer)
        self._start_idle()

    def finish(self, transfer: Transfer, now: float) -> float:
        """When `transfer` ends, if the computation waits for it from `now` on.

        A queued one goes to the front of its queue.
        """
        self._advance(now)
        queue = self._queues[_side(transfer)]
        if transfer.start < 0 and queue and queue[0] is not transfer:
            queue.remove(transfer)
            queue.appendleft(transfer)
        while transfer.end < 0:
            self._until_next_end(math.inf)
        return transfer.end

    def drain(self) -> None:
        """Runs everything that is queued to its end."""
        while self._running != [None, None]:
            self._until_next_end(math.inf)

    def _advance(self, until: float) -> None:
        while self._now < until and self._until_next_end(until):
            pass
        self._now = max(self._now, until)

    def _start_idle(self) -> None:
        for side in (0, 1):
            if self._running[side] is None and self._queues[side]:
                transfer = self._queues[side].popleft()
                transfer.start = self._now
                self._running[side] = transfer

    def _until_next_end(self, until: float) -> bool:
        """Moves on to the end of a running transfer or `until`; false once that is reached."""
        out, back = self._running
        if out is None and back is None:
            self._now = max(self._now, until) if until < math.inf else self._now
            return False
        both = out is not None and back is not None
        left = [
            math.inf
            if transfer is None
            else transfer.latency_left + transfer.bytes_left / self._speed[side][both]
            for side, transfer in enumerate((out, back))
        ]
        step = min(left)
        if self._now + step > until:
            self._progress(until - self._now, both)
            self._now = until
            return False
        self._progress(step, both)
        self._now += step
        for side, transfer in enumerate((out, back)):
            if transfer is not None and left[side] == step:
                transfer.end = self._now
                self._running[side] = None
        self._start_idle()
        return True

    def _progress(self, duration: float, both: bool) -> None:
        for side, transfer in enumerate(self._running):
            if transfer is None:
                continue
            latency = min(transfer.latency_left, duration)
            transfer.latency_left -= latency
            moved = (duration - latency) * self._speed[side][both]
            transfer.bytes_left = max(transfer.bytes_left - moved, 0.0)


def _side(transfer: Transfer) -> int:
    return 0 if transfer.direction is Direction.OUT else 1
