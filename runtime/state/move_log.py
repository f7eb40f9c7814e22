"""What moving training state has cost: bytes, waits and transfers."""

import time
from collections import deque
from typing import NamedTuple

from teraplan.runtime.state.block import Block
from teraplan.runtime.storage import Storage, Transfer

_KEPT = 10_000
"""Of waits and transfers that nobody asks for, the latest."""


class StateWait(NamedTuple):
    """One wait of the computation for a block."""

    block: Block
    start_ns: int
    """As `time.perf_counter_ns` has it."""
    duration_ns: int


class MoveLog:
    """Waits for transfers, and notes them."""

    def __init__(self) -> None:
        self.written_bytes = self.read_bytes = 0
        self.waited_ns = 0
        self.waits: deque[StateWait] = deque(maxlen=_KEPT)
        """Since the last `clear`."""
        self.transfers: deque[tuple[Block, Transfer]] = deque(maxlen=_KEPT)
        """Those that have ended since."""

    def wait(self, storage: Storage, block: Block, transfer: Transfer, what: str) -> None:
        """Wait for a transfer of a block.

        Raises:
            StorageError, DeadlineError: it has failed, or takes too long.
        """
        waited_ns = storage.wait(transfer, what=f"{block.label} {what}")
        self.transfers.append((block, transfer))
        if waited_ns > 0:
            self.waited_ns += waited_ns
            self.waits.append(StateWait(block, time.perf_counter_ns() - waited_ns, waited_ns))

    def clear(self) -> None:
        """Another step begins."""
        self.waits.clear()
        self.transfers.clear()
