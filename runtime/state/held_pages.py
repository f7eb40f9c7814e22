"""Memory that the training state holds: what its blocks have, and what waits for the next one.

fresh -> a block has it -> given: waits -> another block of that size has it
                                        -> shrunk: others take it, and give it back (`spare`)
                                                   or it goes to the system
A block is always one mapping: its pages move to a tensor's address by one move.
"""

from collections import OrderedDict

from teraplan.runtime import pages
from teraplan.runtime.device import SparePages


class HeldPages:
    """Pages, and how many they are. Not thread safe."""

    def __init__(self) -> None:
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
        """Address of touched pages, None if none of that size wait."""
        addresses = self._waiting.get(nbytes)
        if not addresses:
            return None
        self._waiting_bytes -= nbytes
        return addresses.pop()

    def take_spare(self, nbytes: int) -> int | None:
        """Address of touched pages that others do not need, None if there are none."""
        address = self.spare.lend(nbytes) if self.spare is not None else None
        if address is not None:
            self.count(nbytes)
        return address

    def take_fresh(self, nbytes: int) -> int:
        """Address of untouched pages."""
        self.count(nbytes)
        return pages.take(nbytes)

    def give(self, address: int, nbytes: int) -> None:
        """Let pages wait that no block needs any more."""
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
                pages.release(address, nbytes)
