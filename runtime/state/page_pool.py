"""Touched pages that wait for the next tensor of their size."""

from collections import OrderedDict

from teraplan.runtime import pages


class PagePool:
    """Ranges of anonymous memory by size. Not thread safe."""

    def __init__(self) -> None:
        self._ranges: OrderedDict[int, list[int]] = OrderedDict()
        self.nbytes = 0

    def take(self, nbytes: int) -> int | None:
        """Address of `nbytes` of touched memory, None if there is none of that size."""
        addresses = self._ranges.get(nbytes)
        if not addresses:
            return None
        self.nbytes -= nbytes
        self._ranges.move_to_end(nbytes)
        return addresses.pop()

    def give(self, address: int, nbytes: int) -> None:
        """Take in `nbytes` of memory at `address`."""
        self._ranges.setdefault(nbytes, []).append(address)
        self.nbytes += nbytes

    def shrink(self, nbytes: int) -> None:
        """Give at least `nbytes` back to the system, if there are so many.

        Sizes that have not been asked for in the longest time go first.
        """
        while nbytes > 0 and self._ranges:
            size, addresses = next(iter(self._ranges.items()))
            while addresses and nbytes > 0:
                pages.release(addresses.pop(), size)
                self.nbytes -= size
                nbytes -= size
            if not addresses:
                del self._ranges[size]
