"""How fast a store has moved bytes of late, while it had anything to do.

One that is too slow to be given anything would stay so for ever: after a while it is believed to be
faster, until it is tried.
"""

from teraplan.units import MIB

_FIRST_GUESS_BYTES_PER_S = 10**9
_GUESS_WEIGHT_BYTES = 8 * MIB
"""The first guess counts like this many bytes: one chunk tells more."""
_MEMORY_BYTES = 256 * MIB
"""What was moved so many bytes ago counts a third."""
_HALF_LIFE_NS = 30 * 10**9
"""While a store moves nothing, what it took is believed to have halved in this time."""
_MOST_HALVINGS = 4


class Speed:
    """Bytes per second of the busy time, in both directions together. Not thread safe."""

    def __init__(self) -> None:
        self._moved_bytes = float(_GUESS_WEIGHT_BYTES)
        self._busy_ns = _GUESS_WEIGHT_BYTES * 1e9 / _FIRST_GUESS_BYTES_PER_S
        self._since_ns = self._idle_from_ns = 0

    def start(self, now_ns: int) -> None:
        """From now on the store is busy."""
        self._since_ns = now_ns
        if self._idle_from_ns and now_ns - self._idle_from_ns > _HALF_LIFE_NS:
            kept = min(1.0, _GUESS_WEIGHT_BYTES / self._moved_bytes)  # like a guess
            self._moved_bytes *= kept
            self._busy_ns *= kept
        self._idle_from_ns = 0

    def stop(self, now_ns: int) -> None:
        """Busy time up to now counts."""
        self._busy_ns += now_ns - self._since_ns
        self._idle_from_ns = now_ns

    def add(self, nbytes: int) -> None:
        """Bytes that have been moved in the busy time."""
        kept = max(0.0, 1 - nbytes / _MEMORY_BYTES)
        self._moved_bytes = self._moved_bytes * kept + nbytes
        self._busy_ns *= kept
        # The time of these bytes is in `_busy_ns` already, and is thinned out a little with it:
        # one part in thirty for a chunk, the same for every store.

    def duration_ns(self, nbytes: int, now_ns: int) -> int:
        """About how long `nbytes` take."""
        idle_ns = now_ns - self._idle_from_ns if self._idle_from_ns else 0
        halvings = min(idle_ns / _HALF_LIFE_NS, _MOST_HALVINGS)
        return int(nbytes * self._busy_ns / self._moved_bytes / 2**halvings)
