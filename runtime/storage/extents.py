"""Which parts of an arena file are taken: best fit, neighbours joined, the same every time.

Determinism matters: a training step that puts and drops the same sizes in the same order gets the
same extents in every step, so that it overwrites blocks that the disk has already seen (1.5 times
as fast as first writes on ext4) and never grows the file again.
"""

from bisect import bisect_left, insort

GRANULE_BYTES = 4096
"""Extents start at multiples of this (or of a larger block) and have such lengths."""


def round_up(nbytes: int, granule_bytes: int = GRANULE_BYTES) -> int:
    """`nbytes` rounded up to whole granules."""
    return -(-nbytes // granule_bytes) * granule_bytes


class ExtentAllocator:
    """Free and taken extents of one file of `size_bytes` bytes. The store does the locking."""

    def __init__(self, granule_bytes: int = GRANULE_BYTES) -> None:
        self.granule_bytes = granule_bytes
        self.size_bytes = 0
        self.taken_bytes = 0
        self._by_size: list[tuple[int, int]] = []
        self._length_at: dict[int, int] = {}
        self._start_before: dict[int, int] = {}

    @property
    def free_bytes(self) -> int:
        """Bytes of the file that no extent has taken."""
        return self.size_bytes - self.taken_bytes

    def missing_bytes(self, nbytes: int) -> int:
        """How much the file has to grow so that `take(nbytes)` succeeds, 0 if it fits now."""
        nbytes = round_up(nbytes, self.granule_bytes)
        if self._by_size and self._by_size[-1][0] >= nbytes:
            return 0
        tail = self._start_before.get(self.size_bytes, self.size_bytes)
        return nbytes - (self.size_bytes - tail)

    def extend(self, nbytes: int) -> None:
        """Adds `nbytes` (whole granules) to the end of the file as free space."""
        start = self.size_bytes
        self.size_bytes += nbytes
        self._join(start, nbytes)

    def take(self, nbytes: int) -> int:
        """Offset of an extent of `nbytes`, the smallest hole that fits, the lowest of equals."""
        nbytes = round_up(nbytes, self.granule_bytes)
        at = bisect_left(self._by_size, (nbytes, 0))
        assert at < len(self._by_size), f"no hole of {nbytes} bytes: grow the file first"
        length, start = self._by_size[at]
        self._forget(start, length)
        if length > nbytes:
            self._remember(start + nbytes, length - nbytes)
        self.taken_bytes += nbytes
        return start

    def give_back(self, start: int, nbytes: int) -> None:
        """Frees the extent that `take(nbytes)` put at `start`."""
        nbytes = round_up(nbytes, self.granule_bytes)
        self.taken_bytes -= nbytes
        self._join(start, nbytes)

    def _join(self, start: int, nbytes: int) -> None:
        end = start + nbytes
        if (before := self._start_before.get(start)) is not None:
            self._forget(before, start - before)
            start = before
        if (length := self._length_at.get(end)) is not None:
            self._forget(end, length)
            end += length
        self._remember(start, end - start)

    def _remember(self, start: int, length: int) -> None:
        insort(self._by_size, (length, start))
        self._length_at[start] = length
        self._start_before[start + length] = start

    def _forget(self, start: int, length: int) -> None:
        del self._by_size[bisect_left(self._by_size, (length, start))]
        del self._length_at[start]
        del self._start_before[start + length]
