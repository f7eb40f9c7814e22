"""Which parts of an arena file are taken: best fit, neighbours joined, the same every time.

Determinism matters: a training step that puts and drops the same sizes in the same order gets the
same extents in every step, so that it overwrites blocks that the disk has already seen (1.5 times
as fast as first writes on ext4) and never grows the file again.

A signal's handler may raise at any point of the main thread. So each change is made to a copy that
then takes the place of what was there, and extents belong to an owner who can give back what it
has, whether or not it got to know of it.
"""

import copy
from bisect import bisect_left, insort
from dataclasses import dataclass, field

GRANULE_BYTES = 4096
"""Extents start at multiples of this (or of a larger block) and have such lengths."""


def round_up(nbytes: int, granule_bytes: int = GRANULE_BYTES) -> int:
    """`nbytes` rounded up to whole granules."""
    return -(-nbytes // granule_bytes) * granule_bytes


@dataclass(slots=True)
class _Map:
    """Free holes by size and by both ends, and (start, length) of the extents of each owner."""

    size_bytes: int = 0
    taken_bytes: int = 0
    by_size: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    length_at: dict[int, int] = field(default_factory=dict[int, int])
    start_before: dict[int, int] = field(default_factory=dict[int, int])
    owned: dict[int, tuple[tuple[int, int], ...]] = field(
        default_factory=dict[int, tuple[tuple[int, int], ...]]
    )

    def copied(self) -> "_Map":
        """One that can be changed without this."""
        return _Map(*(copy.copy(getattr(self, name)) for name in self.__slots__))

    def join(self, start: int, nbytes: int) -> None:
        """Makes [start, start + nbytes) free."""
        end = start + nbytes
        if (before := self.start_before.get(start)) is not None:
            self.forget(before, start - before)
            start = before
        if (length := self.length_at.get(end)) is not None:
            self.forget(end, length)
            end += length
        self.remember(start, end - start)

    def remember(self, start: int, length: int) -> None:
        """Adds a hole."""
        insort(self.by_size, (length, start))
        self.length_at[start] = length
        self.start_before[start + length] = start

    def forget(self, start: int, length: int) -> None:
        """Removes a hole."""
        del self.by_size[bisect_left(self.by_size, (length, start))]
        del self.length_at[start]
        del self.start_before[start + length]


class ExtentAllocator:
    """Free and taken extents of one file of `size_bytes` bytes. The store does the locking."""

    def __init__(self, granule_bytes: int = GRANULE_BYTES) -> None:
        self.granule_bytes = granule_bytes
        self._map = _Map()

    @property
    def size_bytes(self) -> int:
        """Length of the file."""
        return self._map.size_bytes

    @property
    def taken_bytes(self) -> int:
        """Bytes in extents."""
        return self._map.taken_bytes

    @property
    def free_bytes(self) -> int:
        """Bytes of the file that no extent has taken."""
        return self.size_bytes - self.taken_bytes

    def missing_bytes(self, nbytes: int) -> int:
        """How much the file has to grow so that `take(nbytes)` succeeds, 0 if it fits now."""
        nbytes = round_up(nbytes, self.granule_bytes)
        by_size = self._map.by_size
        if by_size and by_size[-1][0] >= nbytes:
            return 0
        tail = self._map.start_before.get(self.size_bytes, self.size_bytes)
        return nbytes - (self.size_bytes - tail)

    def extend(self, nbytes: int) -> None:
        """Adds `nbytes` (whole granules) to the end of the file as free space."""
        new = self._map.copied()
        new.size_bytes += nbytes
        new.join(self.size_bytes, nbytes)
        self._map = new

    def take(self, nbytes: int, owner: int) -> int:
        """Offset of an extent of `nbytes`, the smallest hole that fits, the lowest of equals."""
        nbytes = round_up(nbytes, self.granule_bytes)
        new = self._map.copied()
        at = bisect_left(new.by_size, (nbytes, 0))
        assert at < len(new.by_size), f"no hole of {nbytes} bytes: grow the file first"
        length, start = new.by_size[at]
        new.forget(start, length)
        if length > nbytes:
            new.remember(start + nbytes, length - nbytes)
        new.taken_bytes += nbytes
        new.owned[owner] = (*new.owned.get(owner, ()), (start, nbytes))
        self._map = new
        return start

    def give_back(self, owner: int) -> None:
        """Frees all extents of `owner`, who may have none."""
        if owner not in self._map.owned:
            return
        new = self._map.copied()
        for start, nbytes in new.owned.pop(owner):
            new.taken_bytes -= nbytes
            new.join(start, nbytes)
        self._map = new
