"""Which parts of an arena file are taken: best fit, neighbours joined, the same every time.

Determinism matters: a training step that puts and drops the same sizes in the same order gets the
same extents in every step, so that it overwrites blocks that the disk has already seen (1.5 times
as fast as first writes on ext4) and never grows the file again.

A signal's handler may raise at any point of the main thread. What counts is the length of the file
and who owns what, each changed in one step; the holes follow from them. While they are changed they
are out of their place, and where an interrupt has left it empty they are found anew. Extents belong
to an owner who can give back what it has, whether or not it got to know of it.
"""

from bisect import bisect_left, insort
from collections.abc import Iterable
from dataclasses import dataclass, field

GRANULE_BYTES = 4096
"""Extents start at multiples of this (or of a larger block) and have such lengths."""


def round_up(nbytes: int, granule_bytes: int = GRANULE_BYTES) -> int:
    """`nbytes` rounded up to whole granules."""
    return -(-nbytes // granule_bytes) * granule_bytes


@dataclass(slots=True)
class _Holes:
    """Free extents by size and by both ends."""

    nbytes: int = 0
    by_size: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    """(length, start), sorted."""
    length_at: dict[int, int] = field(default_factory=dict[int, int])
    start_before: dict[int, int] = field(default_factory=dict[int, int])

    @classmethod
    def between(cls, extents: Iterable[tuple[int, int]], size_bytes: int) -> "_Holes":
        """Those of a file of `size_bytes` in which these (start, length) are taken."""
        holes, free_from = cls(), 0
        for start, length in (*sorted(extents), (size_bytes, 0)):
            if start > free_from:
                holes.remember(free_from, start - free_from)
            free_from = start + length
        return holes

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
        self.nbytes += length
        self.length_at[start] = length
        self.start_before[start + length] = start

    def forget(self, start: int, length: int) -> None:
        """Removes a hole."""
        del self.by_size[bisect_left(self.by_size, (length, start))]
        self.nbytes -= length
        del self.length_at[start]
        del self.start_before[start + length]


class ExtentAllocator:
    """Free and taken extents of one file of `size_bytes` bytes. The store does the locking."""

    def __init__(self, granule_bytes: int = GRANULE_BYTES) -> None:
        self.granule_bytes = granule_bytes
        self.size_bytes = 0
        """Length of the file."""
        self._owned: dict[int, tuple[tuple[int, int], ...]] = {}
        """(start, length) of the extents of each owner."""
        self._holes: _Holes | None = _Holes()
        """None while they are being changed, and after a change that was interrupted."""

    @property
    def taken_bytes(self) -> int:
        """Bytes in extents."""
        return self.size_bytes - self.free_bytes

    @property
    def free_bytes(self) -> int:
        """Bytes of the file that no extent has taken."""
        return self._found().nbytes

    def missing_bytes(self, nbytes: int) -> int:
        """How much the file has to grow so that `take(nbytes)` succeeds, 0 if it fits now."""
        nbytes = round_up(nbytes, self.granule_bytes)
        holes = self._found()
        if holes.by_size and holes.by_size[-1][0] >= nbytes:
            return 0
        tail = holes.start_before.get(self.size_bytes, self.size_bytes)
        return nbytes - (self.size_bytes - tail)

    def extend(self, nbytes: int) -> None:
        """Adds `nbytes` (whole granules) to the end of the file as free space."""
        holes, end = self._taken_out(), self.size_bytes
        self.size_bytes = end + nbytes
        holes.join(end, nbytes)
        self._holes = holes

    def take(self, nbytes: int, owner: int) -> int:
        """Offset of an extent of `nbytes`, the smallest hole that fits, the lowest of equals."""
        nbytes = round_up(nbytes, self.granule_bytes)
        holes = self._taken_out()
        at = bisect_left(holes.by_size, (nbytes, 0))
        assert at < len(holes.by_size), f"no hole of {nbytes} bytes: grow the file first"
        length, start = holes.by_size[at]
        self._owned[owner] = (*self._owned.get(owner, ()), (start, nbytes))
        holes.forget(start, length)
        if length > nbytes:
            holes.remember(start + nbytes, length - nbytes)
        self._holes = holes
        return start

    def give_back(self, owner: int) -> None:
        """Frees all extents of `owner`, who may have none."""
        if owner not in self._owned:
            return
        holes = self._taken_out()
        for start, nbytes in self._owned.pop(owner):
            holes.join(start, nbytes)
        self._holes = holes

    def _found(self) -> _Holes:
        if self._holes is None:
            taken = (extent for extents in self._owned.values() for extent in extents)
            self._holes = _Holes.between(taken, self.size_bytes)
        return self._holes

    def _taken_out(self) -> _Holes:
        holes = self._found()
        self._holes = None
        return holes
