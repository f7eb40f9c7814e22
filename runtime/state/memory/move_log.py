"""What moving training state has cost: bytes, waits and transfers."""

import time
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from typing import NamedTuple

from teraplan.runtime.state.memory.block import Block
from teraplan.runtime.storage.tiers import Moved, Tiers
from teraplan.values.hardware import Tier
from teraplan.values.run_record import Direction

_KEPT = 10_000
"""Of waits and transfers that nobody asks for, the latest."""


class StateWait(NamedTuple):
    """One wait of the computation for a block."""

    block: Block
    start_ns: int
    """As `time.perf_counter_ns` has it."""
    duration_ns: int


@dataclass(frozen=True, slots=True)
class Traffic:
    """What moving has cost."""

    written_bytes: int = 0
    """To storage."""
    read_bytes: int = 0
    to_host_bytes: int = 0
    from_host_bytes: int = 0
    waited_ns: int = 0

    def __sub__(self, other: "Traffic") -> "Traffic":
        return Traffic(*(a - b for a, b in zip(astuple(self), astuple(other), strict=True)))


class MoveLog:
    """Waits for transfers, and notes them."""

    def __init__(self) -> None:
        self._moved_bytes: Counter[tuple[Tier, Direction]] = Counter()
        self.waited_ns = 0
        self.waits: deque[StateWait] = deque(maxlen=_KEPT)
        """Since the last `clear`."""
        self.moves: deque[tuple[Block, Moved]] = deque(maxlen=_KEPT)
        """Those that have ended since."""

    @property
    def traffic(self) -> Traffic:
        """All that moving has cost so far."""
        moved = self._moved_bytes
        return Traffic(
            written_bytes=moved[Tier.STORAGE, Direction.OUT],
            read_bytes=moved[Tier.STORAGE, Direction.BACK],
            to_host_bytes=moved[Tier.HOST, Direction.OUT],
            from_host_bytes=moved[Tier.HOST, Direction.BACK],
            waited_ns=self.waited_ns,
        )

    def count(self, moves: Sequence[Moved]) -> None:
        """These have been started."""
        for move in moves:
            self.note(move.tier, move.transfer.direction, move.transfer.nbytes)

    def note(self, tier: Tier, direction: Direction, nbytes: int) -> None:
        """Something has been started that its device keeps account of otherwise."""
        self._moved_bytes[tier, direction] += nbytes

    def wait(self, tiers: Tiers, block: Block, moves: Sequence[Moved], what: str) -> None:
        """Wait for the transfers of a block.

        Raises:
            StorageError, DeadlineError: one has failed, or takes too long.
        """
        waited_ns = tiers.wait(moves, what=f"{block.label} {what}")
        self.moves.extend((block, move) for move in moves)
        if waited_ns > 0:
            self.waited_ns += waited_ns
            self.waits.append(StateWait(block, time.perf_counter_ns() - waited_ns, waited_ns))

    def clear(self) -> None:
        """Another step begins."""
        self.waits.clear()
        self.moves.clear()
