"""How much memory the process holds, read as rarely as its limit allows.

Behind a matrix product, which leaves nothing else in the caches, to read it and to act on it takes
some 50 us, at each of hundreds of sites in a step. But large tensors come from the pool alone, so
where that has mapped nothing since and there is room under the limit, little can have changed.
"""

from teraplan.runtime.device import MEASURED_WITHIN_BYTES
from teraplan.runtime.process import process_memory

_SITES_BETWEEN_READINGS = 8


class ResidentMemory:
    """What was read last, and how much of it still says something."""

    def __init__(self) -> None:
        self._nbytes = 0
        self._num_blocks = -1
        self._settled = False
        """The pool has made no block between the last two readings: one is touched only later."""
        self._sites_since = 0

    def is_surely_under(self, limit_bytes: int, num_blocks: int) -> bool:
        """True at a site if the process cannot have come to hold more than `limit_bytes`.

        Args:
            limit_bytes: that it may hold.
            num_blocks: that the pool has made so far.
        """
        self._sites_since += 1
        return (
            self._settled
            and num_blocks == self._num_blocks
            and self._sites_since < _SITES_BETWEEN_READINGS
            and self._nbytes + MEASURED_WITHIN_BYTES <= limit_bytes
        )

    def read(self, num_blocks: int) -> int:
        """Bytes that the process holds now, when the pool has made `num_blocks`."""
        self._nbytes = process_memory.resident_bytes_fast()
        self._settled = num_blocks == self._num_blocks
        self._num_blocks, self._sites_since = num_blocks, 0
        return self._nbytes
