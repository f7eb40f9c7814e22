"""How fast storage may be driven, where a plan says so: each chunk waits for its turn.

    out    [chunk][chunk]      [chunk]        the next one begins when those before it would have
    back       [chunk ][chunk ]               been moved by a link as slow as the pace

A link that others share a port with is then left to them for the rest of the time. The disk itself
is as fast as ever: over any time that is longer than a few chunks, it moves no more.
"""

import threading
from time import perf_counter_ns

from teraplan.values.hardware import Link
from teraplan.values.run_record import Direction

_LONGEST_S = 1.0
"""No chunk waits for longer: a pace of next to nothing in an edited plan is no hang."""


class Pace:
    """Of all stores of a storage together. Every method may be called by any thread."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        # Everything below is guarded by it.
        self._link: Link | None = None
        self._until_ns = dict.fromkeys(Direction, 0)
        """By then a link as slow as the pace would have moved what has had its turn."""
        self._closed = False

    @property
    def is_limited(self) -> bool:
        """Whether anything has to wait."""
        return self._link is not None

    def keep_to(self, link: Link | None) -> None:
        """Nothing is moved faster than over `link` from now on; None is no limit."""
        if link == self._link:
            return
        with self._changed:
            self._link, self._until_ns = link, dict.fromkeys(Direction, 0)
            self._changed.notify_all()

    def close(self) -> None:
        """Nobody waits any more."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def wait(self, direction: Direction, nbytes: int) -> None:
        """Until it is the turn of `nbytes` in this direction."""
        link = self._link
        if link is None:
            return
        with self._changed:
            if self._closed or self._link is not link:
                return
            now_ns = perf_counter_ns()
            begin_ns = max(now_ns, self._until_ns[direction])
            busy = {one: until_ns > now_ns for one, until_ns in self._until_ns.items()}
            out, back = link.speeds(out=busy[Direction.OUT], back=busy[Direction.BACK])
            speed = out if direction is Direction.OUT else back
            self._until_ns[direction] = begin_ns + int(nbytes * 1e9 / speed)
            patience_s = min((begin_ns - now_ns) / 1e9, _LONGEST_S)
            self._changed.wait_for(lambda: self._closed or self._link is not link, patience_s)
