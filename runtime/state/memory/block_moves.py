"""How one block leaves memory and comes back: each of its steps is done whole, or not at all.

    MEMORY -- start_leaving .. finish_leaving --> AWAY -- start_to --> COMING -- land --> MEMORY

An interrupt may come anywhere. It may cost memory that nobody uses any more, but no bytes: what a
block's tensors show is what was written to them.
"""

from collections import OrderedDict, deque

from teraplan.runtime.process.pages import PAGE_BYTES
from teraplan.runtime.process.whole import whole
from teraplan.runtime.state.memory.block import Block, Key, Place
from teraplan.runtime.state.memory.block_memory import BlockMemory


class BlockMoves:
    """What is where. Its methods are called with the memory's lock held."""

    def __init__(self, memory: BlockMemory) -> None:
        self.memory = memory
        self._away: dict[Key, Block] = {}
        self._in_memory: OrderedDict[Block, None] = OrderedDict()
        """Least recently used first."""
        self._coming: dict[Block, None] = {}
        self._leaving: deque[Block] = deque()
        self._epoch = 0

    # -- out -------------------------------------------------------------------------------------

    def _start_leaving(self, block: Block, host_bytes: int | None = None) -> None:
        if block.record is not None and not block.leaving:
            since = block.epoch == self._epoch
            holds = not block.changed and not block.record.failed
            if holds and self.memory.is_as_written(block, since_user_ran=since):
                if block.record.done:
                    self._take_out(block)
                    return
            else:
                self._drop_record(block)
        if block.record is None:
            if host_bytes is not None:  # the plan may be of a larger one, of another optimizer
                host_bytes = min(host_bytes, block.nbytes)
                host_bytes -= host_bytes % PAGE_BYTES  # what lies behind is mapped where it lies
            self.memory.start_out(block, host_bytes)
            block.epoch, block.changed = self._epoch, False
        block.leaving = True
        self._leaving.append(block)

    def _finish_leaving(self, block: Block) -> None:
        """The record is written: if the block still holds the same bytes, it goes."""
        try:
            self.memory.wait_out(block)
        except BaseException:
            self._drop_record(block)
            raise
        since = block.epoch == self._epoch
        if block.changed or not (since or self.memory.is_as_written(block, since_user_ran=False)):
            self._drop_record(block)
            self._start_leaving(block)
            return
        self._take_out(block)

    def _take_out(self, block: Block) -> None:
        """The block's bytes are in its record: show that, and free the block's memory."""

        def take_out() -> None:
            self.memory.take_out(block)
            self._away[block.key] = block
            self._in_memory.pop(block, None)
            block.place, block.leaving = Place.AWAY, False

        whole(take_out)
        self.memory.held.shrink_to(self.memory.limit_bytes)

    def _free_host(self, block: Block) -> None:
        """Give back what a record that is of no more use takes of host memory."""
        if block.record is not None and block.record.takes_host and block.record.done:
            self._drop_record(block)

    def _drop_record(self, block: Block) -> None:
        if block.record is not None:
            self.memory.drop(block)
        block.record, block.changed, block.leaving = None, True, False

    # -- back ------------------------------------------------------------------------------------

    def _start_to(self, block: Block, landing: int, *, is_touched: bool, urgent: bool) -> None:
        assert block.record is not None, f"{block.label} is away without a record"
        block.landing, block.epoch = landing, self._epoch
        self.memory.start_back(block, is_touched=is_touched, urgent=urgent)
        self._coming[block] = None
        block.place = Place.COMING
        self._away.pop(block.key, None)

    def _land(self, block: Block) -> None:
        """Wait for a block that comes."""
        since = block.epoch == self._epoch

        def land() -> None:
            self.memory.land(block, since_user_ran=since)
            self._coming.pop(block, None)
            self._in_memory[block] = None
            block.epoch, block.place = self._epoch, Place.MEMORY
            block.arrival, block.landing = None, 0

        whole(land)
