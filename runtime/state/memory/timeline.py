"""In which order a step uses the training state, as the step before did.

    step before   p0 p1 p2 | p2 g0 p1 g1 p0 g2 | g0 p2 m2  g1 p1 m1  g2 p0 m0
    this step     p0 p1 ^ at                                  ... and then p0 p1 p2 again

Nothing here decides whether a value is right: a step that does something else is only slower.
"""

from bisect import bisect_left
from collections.abc import Iterator

from teraplan.runtime.state.memory.block import Key

NEVER = 1 << 60
_LOOK_AHEAD = 256
"""Uses: enough to keep the disk busy, and few to look through at each use."""
_MOST = 1 << 20
"""Uses that are kept of a step: one of evaluations alone never ends."""


class Timeline:
    """The uses of the step before, and how far this step has come in them."""

    def __init__(self) -> None:
        self.past: list[Key] = []
        self._positions: dict[Key, list[int]] = {}
        self._now: list[Key] = []
        self._at = 0

    def note(self, key: Key) -> int | None:
        """A use begins; returns its position in the step before, None if there is none."""
        if len(self._now) < _MOST:
            self._now.append(key)
        positions = self._positions.get(key, ())
        found = bisect_left(positions, self._at)
        if found == len(positions):
            return None
        self._at = positions[found] + 1
        return positions[found]

    def next_use(self, key: Key) -> int:
        """How many uses from now `key` comes, `NEVER` if it did not in the step before."""
        positions = self._positions.get(key)
        if not positions:
            return NEVER
        found = bisect_left(positions, self._at)
        if found < len(positions):
            return positions[found] - self._at
        return len(self.past) - self._at + positions[0]

    def ahead(self, count: int = _LOOK_AHEAD) -> Iterator[Key]:
        """What the next `count` uses are of, over the end of the step and at most once around."""
        total = len(self.past)
        for number in range(self._at, self._at + min(count, total)):
            yield self.past[number % total]

    def begin_step(self) -> bool:
        """A step begins; True if the one before did something else than the one before that."""
        changed = self._now != self.past
        if changed:
            self.past = self._now
            self._positions = {}
            for position, key in enumerate(self.past):
                self._positions.setdefault(key, []).append(position)
        self._now, self._at = [], 0
        return changed
