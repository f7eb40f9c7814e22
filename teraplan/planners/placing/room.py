"""Free bytes per interval of a repeating step, with the questions that placing transfers asks."""

from typing import final

import numpy as np

from teraplan.simulation.memory_curve import Curve


@final
class Room:
    """Free bytes in each interval of a tier; mutable. Sites from the number of sites on wrap."""

    __slots__ = ("_num_sites", "free")

    def __init__(self, free: Curve) -> None:
        self.free = free
        self._num_sites = len(free)

    def _pieces(self, start: int, end: int) -> list[tuple[int, int]]:
        size = self._num_sites
        if end <= start:
            return []
        if start >= 0 and end <= size:
            return [(start, end)]
        base = start - start % size
        start, end = start - base, end - base
        return [(start, end)] if end <= size else [(start, size), (0, end - size)]

    def least(self, start: int, end: int) -> int:
        """The least free bytes in intervals start .. end-1, which are not empty."""
        if 0 <= start < end <= self._num_sites:
            return int(self.free[start:end].min())
        return min(int(self.free[a:b].min()) for a, b in self._pieces(start, end))

    def add(self, start: int, end: int, nbytes: int) -> None:
        """Frees `nbytes` (takes them, if negative) in intervals start .. end-1."""
        for a, b in self._pieces(start, end):
            self.free[a:b] += nbytes

    def latest_end(self, start: int, highest: int, nbytes: int) -> int:
        """The largest end <= `highest` with `nbytes` free in all of start .. end-1."""
        for a, b in self._pieces(start, highest):
            full = _first_below(self.free[a:b], nbytes)
            if full < b - a:
                return start + full
            start += b - a
        return max(start, highest)

    def earliest_start(self, end: int, lowest: int, nbytes: int) -> int:
        """The smallest start >= `lowest` with `nbytes` free in all of start .. end-1."""
        for a, b in reversed(self._pieces(lowest, end)):
            full = _first_below(self.free[a:b][::-1], nbytes)
            if full < b - a:
                return end - full
            end -= b - a
        return min(end, lowest)


def _first_below(values: Curve, nbytes: int) -> int:
    """Index of the first value below `nbytes`, or the length; looks only as far as it must."""
    begin, chunk, size = 0, 256, len(values)
    while begin < size:
        below = values[begin : begin + chunk] < nbytes
        first = int(below.argmax())
        if below[first]:
            return begin + first
        begin += chunk
        chunk *= 4
    return size


def free_of(limit_bytes: int, used: Curve) -> Room:
    """Room below a limit."""
    return Room(np.asarray(limit_bytes - used, dtype=np.int64))
