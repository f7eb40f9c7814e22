"""The chunks that wait for a worker: urgent ones first, then by direction, each in order.

Some workers of a store prefer reads and some writes. While only one direction has work all do it;
while both have, each gets workers, so that neither starves and the link is used both ways at once,
as plans assume. Where few cores leave a store one worker for all that nobody waits for, it prefers
reads: writes then wait for all reads that are queued, unless they are urgent, and the speed that is
measured for them beside reads says so.
"""

from collections import deque
from collections.abc import Iterable

from teraplan.runtime.storage.transfers import Chunk, Transfer
from teraplan.values.run_record import Direction


class WorkQueue:
    """Not thread safe: the store locks."""

    def __init__(self) -> None:
        self._urgent: deque[Chunk] = deque()
        self._reads: deque[Chunk] = deque()
        self._writes: deque[Chunk] = deque()

    def __len__(self) -> int:
        return len(self._queued())

    @property
    def nbytes(self) -> int:
        """Of all that is queued."""
        return sum(chunk.nbytes for chunk in self._queued())

    def add(self, transfer: Transfer, chunks: Iterable[Chunk]) -> None:
        """Queues the chunks of `transfer`."""
        (self._urgent if transfer.urgent else self._of(transfer)).extend(chunks)

    def promote(self, transfer: Transfer) -> None:
        """Puts what is queued of `transfer` before everything that is not urgent."""
        # The chunks stay in their old queue as well, where `taken` makes workers pass over them.
        self._urgent.extend(c for c in self._of(transfer) if c.transfer is transfer)

    def take(self, prefer: Direction = Direction.BACK) -> Chunk | None:
        """The next chunk for a worker that prefers `prefer`, None if none is queued."""
        reads_first = prefer is Direction.BACK
        rest = (self._reads, self._writes) if reads_first else (self._writes, self._reads)
        for queue in (self._urgent, *rest):
            if (chunk := _first(queue)) is not None:
                return chunk
        return None

    def take_urgent(self) -> Chunk | None:
        """The next chunk that somebody waits for, None if none is queued."""
        return _first(self._urgent)

    def take_last_write(self) -> Chunk | None:
        """The write that would be moved last, None if none is queued that is not urgent."""
        while self._writes:
            chunk = self._writes.pop()
            if not chunk.taken:
                chunk.taken = True
                return chunk
        return None

    def remove(self, transfer: Transfer) -> None:
        """Nobody gets what is queued of `transfer`."""
        for chunk in self._queued():
            if chunk.transfer is transfer:
                chunk.taken = True

    def _queued(self) -> list[Chunk]:
        everything = [*self._urgent, *self._reads, *self._writes]
        return list({id(chunk): chunk for chunk in everything if not chunk.taken}.values())

    def _of(self, transfer: Transfer) -> deque[Chunk]:
        return self._reads if transfer.direction is Direction.BACK else self._writes


def _first(queue: deque[Chunk]) -> Chunk | None:
    while queue:
        chunk = queue.popleft()
        if not chunk.taken:
            chunk.taken = True
            return chunk
    return None
