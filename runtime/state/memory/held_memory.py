"""How much memory the blocks of the training state have, and what waits to be used again.

On a CPU memory that a block has left is touched, and waits for the next block of its size: fresh
pages would have to be cleared by the kernel first. What waits there is always a whole mapping: its
pages move to a tensor's address by one move. A device with an allocator of its own keeps nothing
here: its `Source` has what was given back.
"""

from collections import OrderedDict
from typing import Protocol

from teraplan.runtime.device import SparePages


class Source(Protocol):
    """Where memory comes from, and goes back to."""

    def take(self, nbytes: int) -> int:
        """Address of `nbytes` of untouched memory."""
        ...

    def release(self, address: int, nbytes: int) -> None:
        """Nobody needs it any more."""
        ...


class HeldMemory:
    """Memory, and how much it is. Not thread safe."""

    def __init__(self, source: Source, *, keeps: bool) -> None:
        """`keeps`: what is given waits here, not in the source."""
        self._source, self._keeps = source, keeps
        self.nbytes = 0
        """All that is held, what waits included."""
        self.peak_bytes = 0
        """The most since `take_peak`."""
        self.spare: SparePages | None = None
        """Who takes what would go back to the system; nobody, if None."""
        self._waiting: OrderedDict[int, list[int]] = OrderedDict()
        """Addresses by size; sizes that have been given in the longest time ago come first."""
        self._waiting_bytes = 0

    @property
    def in_use_bytes(self) -> int:
        """What is held and does not wait."""
        return self.nbytes - self._waiting_bytes

    def count(self, nbytes: int) -> None:
        """So much more is held, or less."""
        self.nbytes += nbytes
        self.peak_bytes = max(self.peak_bytes, self.nbytes)

    def take_peak(self) -> int:
        """The most that has been held since the last call."""
        peak_bytes, self.peak_bytes = self.peak_bytes, self.nbytes
        return peak_bytes

    def take_waiting(self, nbytes: int) -> int | None:
        """Address of touched memory, None if none of that size waits."""
        addresses = self._waiting.get(nbytes)
        if not addresses:
            return None
        self._waiting_bytes -= nbytes
        return addresses.pop()

    def take_spare(self, nbytes: int) -> int | None:
        """Address of touched memory that others do not need, None if there is none."""
        address = self.spare.lend(nbytes) if self.spare is not None else None
        if address is not None:
            self.count(nbytes)
        return address

    def take_fresh(self, nbytes: int) -> int:
        """Address of untouched memory."""
        address = self._source.take(nbytes)
        self.count(nbytes)
        return address

    def give(self, address: int, nbytes: int) -> None:
        """Let memory wait that no block needs any more."""
        if not self._keeps:
            self.count(-nbytes)
            self._source.release(address, nbytes)
            return
        self._waiting.setdefault(nbytes, []).append(address)
        self._waiting.move_to_end(nbytes)
        self._waiting_bytes += nbytes

    def shrink_to(self, limit_bytes: int) -> None:
        """Give back what waits until no more than this is held, or nothing waits."""
        while self.nbytes > limit_bytes and self._waiting:
            nbytes, addresses = next(iter(self._waiting.items()))
            if not addresses:
                del self._waiting[nbytes]
                continue
            address = addresses.pop()
            self._waiting_bytes -= nbytes
            self.nbytes -= nbytes
            if self.spare is not None:
                self.spare.hand_in(address, nbytes)
            else:
                self._source.release(address, nbytes)
