"""One storage directory: its arena file, its queue, its worker threads, and how fast it has been.

    urgent > what the worker prefers (reads, writes) > the rest -> worker -> arena -> disk

What a worker has moved it tells the traffic that the store belongs to, which also decides what
happens to a chunk that failed. A worker never waits for another transfer.
"""

import contextlib
import errno
import logging
import os
import threading
from collections.abc import Iterable
from pathlib import Path
from time import perf_counter_ns

from teraplan.errors import StorageError
from teraplan.runtime.process.threads import start_thread
from teraplan.runtime.storage.arena import Arena
from teraplan.runtime.storage.chunk_io import FULL, copy_ends, move
from teraplan.runtime.storage.lane import Ended, Group, Lane
from teraplan.runtime.storage.space import Space
from teraplan.runtime.storage.speed import Speed
from teraplan.runtime.storage.transfers import Chunk, Record, Transfer
from teraplan.runtime.storage.work_queue import WorkQueue
from teraplan.runtime.storage.workers import Reports, Turns, Workers
from teraplan.values.run_record import Direction

_log = logging.getLogger(__name__)

_NICENESS = 10


_GONE = frozenset(
    {errno.EROFS, errno.ENODEV, errno.ENXIO, errno.ESTALE, errno.EBADF, errno.ENOTCONN}
)
"""After one of these a store is not tried again."""
_LONG_NS = 100_000_000
"""For so long nobody holds the lock, unless a file is made longer."""
_MOST_FAILURES = 3
"""Failed writes, none in between that went well, after which a store is not tried again."""


class Store:
    """See the module's text. Every method but `close` is called with `lock` held.

    Attributes:
        why_retired: why nothing new is written here, None as long as all is well.
        held_until_ns: until then the lock was held for long, while the file was made longer.
        lane: moves what needs nothing of Python, if there is one.
        uses_lane: False while all is to be moved by Python.
    """

    def __init__(
        self,
        directory: Path,
        arena: Arena,
        *,
        index: int,
        checksum: bool,
        workers: Workers,
        lock: threading.Lock,
        reports: Reports,
        turns: Turns,
        lane: Lane | None = None,
    ) -> None:
        self.directory, self.name = directory, str(directory)
        self.arena, self.index = arena, index
        self.lane, self.uses_lane = lane, lane is not None
        self.written_bytes = self.read_bytes = 0
        self.pending_bytes = 0
        self.queue = WorkQueue()
        self.running: dict[int, Chunk] = {}
        self.last_operation = "none yet"
        self.why_retired: str | None = None
        self.held_until_ns = 0
        self.space = Space(directory, arena)
        self._checksum, self._reports, self._turns = checksum, reports, turns
        self._lock = lock
        self._work = threading.Condition(lock)
        self._urgent_work = threading.Condition(lock)
        self._speed = Speed()
        self._num_failures = 0
        self._is_back_when_it_moves = self._hung = False
        self._open = True
        self.threads = [
            threading.Thread(
                target=self._run_worker,
                args=(number, prefers),
                kwargs={"urgent_only": number >= len(workers.always)},
                name=f"teraplan-io-{index}-{number}",
                daemon=True,
            )
            for number, prefers in enumerate(workers.always + workers.when_urgent)
        ]

    def start(self) -> None:
        """Starts the workers.

        Raises:
            ThreadLimitError: the process may have no more threads.
        """
        for thread in self.threads:
            start_thread(thread)

    # ---- room -----------------------------------------------------------------------------------

    def take(self, record: Record, nbytes: int, label: str) -> int:
        """Offset of an extent of `nbytes`, which the record has until it is given back.

        Raises:
            StorageFullError: there is no room.
            StorageError: the file cannot grow.
        """
        began_ns = perf_counter_ns()
        try:
            offset = self.space.take(nbytes, label, id(record))
        except StorageError as error:
            if not self.arena.hangs:
                self._note_failure(error)
            elif not self._hung:
                self._hung = True
                _log.error("storage: %s", error)
            raise
        finally:
            now_ns = perf_counter_ns()
            if now_ns - began_ns > _LONG_NS:
                self.held_until_ns = now_ns
        self._hung = False
        return offset

    def give_back(self, record: Record) -> None:
        """Frees what the record has here."""
        self.space.give_back(id(record))

    # ---- work -----------------------------------------------------------------------------------

    def finish_ns(self, nbytes: int, now_ns: int) -> int:
        """About how long it will take until `nbytes` beyond what is queued have been moved."""
        oldest_ns = min((chunk.start_ns for chunk in self.running.values()), default=now_ns)
        moved_ns = self._speed.duration_ns(self.pending_bytes + nbytes, now_ns)
        return moved_ns + now_ns - oldest_ns

    def duration_ns(self, nbytes: int, now_ns: int) -> int:
        """About how long `nbytes` take here."""
        return self._speed.duration_ns(nbytes, now_ns)

    def add(self, transfer: Transfer, chunks: Iterable[Chunk]) -> None:
        """Queues chunks of `transfer`."""
        chunks = list(chunks)
        self.pending_bytes += sum(chunk.nbytes for chunk in chunks)
        if self.lane is not None and self.is_for_lane(transfer, chunks):
            for chunk in chunks:
                copy_ends(chunk)
            transfer.group = Group(left=len(chunks))
            self.lane.push(transfer.group, chunks, urgent=transfer.urgent, checked=self._checksum)
            return
        self.queue.add(transfer, chunks)
        self._call_workers(len(chunks), urgent=transfer.urgent)

    def is_for_lane(self, transfer: Transfer, chunks: list[Chunk]) -> bool:
        """True if nothing of it needs Python."""
        if not self.uses_lane or self._turns.is_limited or transfer.after is not None:
            return False
        return transfer.group is None and all(chunk.nbytes for chunk in chunks)

    def _call_workers(self, count: int, *, urgent: bool) -> None:
        if self.lane is not None:
            self.lane.call_back()
            return
        self._work.notify(count)
        if urgent:
            self._urgent_work.notify(count)

    def promote(self, transfer: Transfer) -> None:
        """Lets what is queued of `transfer` go before everything that is not urgent."""
        self.queue.promote(transfer)
        if self.lane is None:
            self._urgent_work.notify_all()
            return
        if transfer.group is not None:
            self.lane.promote(transfer.group)
        if len(self.queue):
            self.lane.call_back()

    def take_back(self, transfer: Transfer) -> int:
        """Whatever is queued of `transfer` will not be moved; how many chunks a lane has begun."""
        self.queue.remove(transfer)
        self._work.notify_all()  # an interrupted `notify` counts a worker that it has woken again
        running = sum(chunk.nbytes for chunk in self.running.values())
        self.pending_bytes = self.queue.nbytes + running
        if self.lane is None:
            return 0
        left = self.lane.remove(transfer.group) if transfer.group is not None else 0
        self.pending_bytes += self.lane.nbytes
        return left

    def empty_queue(self) -> list[Chunk]:
        """What is queued, which nobody will move then."""
        chunks: list[Chunk] = self.lane.remove_all() if self.lane is not None else []
        self.pending_bytes -= sum(chunk.nbytes for chunk in chunks)
        while (chunk := self.queue.take()) is not None:
            self.pending_bytes -= chunk.nbytes
            chunks.append(chunk)
        return chunks

    def give_last_write(self) -> Chunk | None:
        """The queued write that would be moved last, for another store."""
        chunk = self.queue.take_last_write()
        if chunk is not None:
            self.pending_bytes -= chunk.nbytes
        return chunk

    def retire(self, why: str, *, until_it_moves: bool = False) -> None:
        """Nothing new is to be written here; what lies here can still be read."""
        if self.why_retired is None:
            self.why_retired, self._is_back_when_it_moves = why, until_it_moves
            _log.error("storage: nothing more is written to %s: %s", self.name, why)

    @property
    def moving(self) -> list[Chunk]:
        """What workers have in hand."""
        return [*self.running.values(), *(self.lane.running if self.lane is not None else ())]

    @property
    def num_queued(self) -> int:
        """Chunks that wait for a worker."""
        return len(self.queue) + (self.lane.num_queued if self.lane is not None else 0)

    def take_ended(self) -> list[Ended]:
        """What became of chunks in the lane; those that failed there are queued for Python."""
        if self.lane is None:
            return []
        ended = self.lane.take_ended()
        for one in ended:
            chunk = one.chunk
            if one.error:
                _log.warning("%s: %s", chunk.transfer.label, one.why)
                chunk.failure = one.error
                self.queue.add(chunk.transfer, [chunk])
            else:
                self.pending_bytes -= chunk.nbytes
                self._count_moved(chunk)
        if any(one.error for one in ended):
            self.lane.call_back()
        return ended

    def have_counted(self, count: int) -> None:
        """So many of these have been seen to."""
        if self.lane is not None:
            self.lane.counted(count)

    def count(self, worker: int, chunk: Chunk, error: StorageError | None) -> None:
        """Notes what became of a chunk that a worker had."""
        now_ns = perf_counter_ns()
        del self.running[worker]
        self._speed.stop(now_ns)
        if self.running:
            self._speed.start(now_ns)
        self.pending_bytes -= chunk.nbytes
        if error is None:
            self._speed.add(chunk.nbytes)
            self._count_moved(chunk)
            return
        self.last_operation = f"{chunk.transfer.direction} of {chunk.transfer.label}"
        if chunk.transfer.direction is Direction.OUT:
            self._note_failure(error)

    def _count_moved(self, chunk: Chunk) -> None:
        self.last_operation = f"{chunk.transfer.direction} of {chunk.transfer.label}"
        if self._is_back_when_it_moves:
            self.why_retired, self._is_back_when_it_moves = None, False
            _log.warning("storage: %s moves again", self.name)
        if chunk.transfer.direction is Direction.OUT:
            self._num_failures = 0
            self.written_bytes += chunk.nbytes
        else:
            self.read_bytes += chunk.nbytes

    def _note_failure(self, error: StorageError) -> None:
        self._num_failures += error.errno not in FULL
        if error.errno in _GONE or self._num_failures >= _MOST_FAILURES:
            self.retire(str(error))

    # ---- end ------------------------------------------------------------------------------------

    def stop(self) -> None:
        """Lets the workers end after what they are doing."""
        self._open = False
        self._work.notify_all()
        self._urgent_work.notify_all()
        if self.lane is not None:
            self.lane.stop()

    def close(self, until_ns: int) -> None:
        """Waits for the workers and deletes the file. Not with the lock held."""
        for thread in filter(threading.Thread.is_alive, self.threads):
            thread.join(max(0.0, (until_ns - perf_counter_ns()) / 1e9))
        if any(map(threading.Thread.is_alive, self.threads)) or not self.arena.stop_growing():
            # Closing now could let the stuck call write to whatever file gets the number next.
            _log.warning("I/O in %s hangs; its file stays open until the process ends", self.name)
            return
        self.arena.close()

    # ---- worker threads -------------------------------------------------------------------------

    def _run_worker(self, number: int, prefers: Direction, *, urgent_only: bool) -> None:
        _yield_to_computation()
        try:
            while (chunk := self._next(number, prefers, urgent_only=urgent_only)) is not None:
                self._reports.ended(self, number, chunk, self._move(chunk))
                del chunk  # it holds its record, which may be nobody else's by now
        except BaseException as error:  # noqa: BLE001  whoever waits must hear of any bug here
            _log.critical("a storage worker of %s died", self.name, exc_info=error)
            self._reports.worker_died(self, error)

    def _next(self, number: int, prefers: Direction, *, urgent_only: bool) -> Chunk | None:
        while self._open:
            with self._lock:
                calls_before = self.lane.num_calls if self.lane is not None else 0
                chunk = self._begin(number, prefers, urgent_only=urgent_only)
                if chunk is not None:
                    return chunk
                if self.lane is None and self._open:
                    (self._urgent_work if urgent_only else self._work).wait()
            if self.lane is not None:
                self.lane.run(calls_before, prefers, urgent_only=urgent_only)
                self._reports.count_ended(self)
        return None

    def _begin(self, number: int, prefers: Direction, *, urgent_only: bool) -> Chunk | None:
        """The next chunk that is not for another store, if any is queued for Python."""
        while True:
            chunk = self.queue.take_urgent() if urgent_only else self._take(prefers)
            if chunk is None:
                return None
            if not self._reports.pass_on(self, chunk):
                break
        chunk.start_ns = perf_counter_ns()
        if not self.running:
            self._speed.start(chunk.start_ns)
        self.running[number] = chunk
        return chunk

    def _take(self, prefers: Direction) -> Chunk | None:
        if (chunk := self.queue.take(prefers)) is None:
            self._reports.find_work(self)
            chunk = self.queue.take(prefers)
        return chunk

    def _move(self, chunk: Chunk) -> StorageError | None:
        transfer = chunk.transfer
        if transfer.error is not None:  # another chunk failed: the rest is of no use
            return transfer.error
        self._turns.wait(transfer.direction, chunk.nbytes)
        transfer.start_ns = transfer.start_ns or perf_counter_ns()
        try:
            checksum = self._checksum and not chunk.record.is_compared
            move(self.arena, chunk, self.directory, checksum=checksum)
        except StorageError as error:
            return error
        except Exception as error:  # noqa: BLE001  `after` and libraries may raise anything
            named = StorageError(f"{transfer.label}: {self.name}: {error!r}")
            named.__cause__ = error
            return named
        return None


def _yield_to_computation() -> None:
    """Let this thread run where the computation's threads leave time: it has some, they do not.

    On a CPU device they share the cores, and a kernel on all cores waits for its slowest thread.
    """
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
