"""One storage directory: its arena file, its queue, its worker threads.

    put -> writes  \\
    get -> reads    }-> urgent first; two workers prefer reads, one writes -> arena -> disk
    wait -> urgent /

A worker never waits for another transfer: a read of a record whose write has not ended is kept
with the record and joins the queue when the write ends, so no order of calls can dead-lock.
"""

import contextlib
import logging
import os
import threading
from collections import deque
from collections.abc import Callable
from pathlib import Path
from time import perf_counter_ns

from teraplan.errors import DeadlineError, StorageError
from teraplan.run_record import Direction
from teraplan.runtime.storage.arena import Arena
from teraplan.runtime.storage.chunk_io import move
from teraplan.runtime.storage.space import Space
from teraplan.runtime.storage.transfers import Chunk, Record, Transfer
from teraplan.runtime.storage.work_queue import WorkQueue
from teraplan.units import format_nbytes, format_ns

_log = logging.getLogger(__name__)

_NICENESS = 10
_FEW_CORES = 2
WORKERS = (
    (Direction.BACK,)
    if (os.cpu_count() or 1) <= _FEW_CORES
    else (Direction.BACK, Direction.OUT, Direction.BACK)
)
"""What each worker of a store prefers. Two keep a disk busy in one direction; of those tried, three
moved most with both directions busy. More cost the main thread its GIL. Where a computation needs
all of few cores, each worker takes time from it: with one, a step under a budget of 50 % took
2.45 s instead of 2.58 s on two cores."""


class Store:
    """See the module's text. Made by the session; every method may be called by any thread."""

    def __init__(
        self,
        directory: Path,
        arena: Arena,
        *,
        index: int,
        checksum: bool,
        workers: tuple[Direction, ...] = WORKERS,
    ) -> None:
        self.directory = directory
        self.arena = arena
        self.index = index
        self.written_bytes = 0
        self.read_bytes = 0
        self.pending_bytes = 0
        self._checksum = checksum
        self._name = str(directory)
        self._lock = threading.Lock()
        # Everything below is guarded by the lock.
        self._work = threading.Condition(self._lock)
        self._ended = threading.Condition(self._lock)
        self._space = Space(directory, arena)
        self._queue = WorkQueue()
        self._num_running = 0
        self._drops: deque[Record] = deque()
        self._last_operation = "none yet"
        self._closed_because: str | None = None
        self._worker_died = False
        self._threads = [
            threading.Thread(
                target=self._run_worker,
                args=(prefers,),
                name=f"teraplan-io-{index}-{number}",
                daemon=True,
            )
            for number, prefers in enumerate(workers)
        ]
        for thread in self._threads:
            thread.start()

    # ---- called by the session ------------------------------------------------------------------

    def put(
        self,
        address: int,
        nbytes: int,
        *,
        owner: object,
        label: str,
        after: Callable[[], object] | None,
    ) -> Record:
        """Reserves room, queues the write, and returns at once.

        Raises:
            StorageFullError: no room; nothing has been queued.
        """
        alignment, block_bytes = self.arena.memory_alignment, self.arena.block_bytes
        record = Record(address, nbytes, alignment=alignment, block_bytes=block_bytes)
        record.store_index = self.index
        with self._lock:
            self._check_open(label)
            self._free_dropped()
            if record.body_bytes:
                record.offset = self._space.take(record.body_bytes, label)
            record.write = self._begin(record, label, Direction.OUT, owner, after)
            self._start(record.write, address)
        return record

    def get(
        self,
        record: Record,
        address: int,
        *,
        owner: object,
        urgent: bool,
        after: Callable[[], object] | None,
    ) -> Transfer:
        """Queues the read of `record` into the memory at `address`, and returns at once."""
        label = record.write.label
        assert address % record.alignment == record.address_remainder, (
            f"{label} left address {record.address_remainder} modulo {record.alignment} "
            f"and cannot land at {address % record.alignment}"
        )
        with self._lock:
            self._check_open(label)
            assert not record.dropped, f"{label} was dropped and cannot be read"
            transfer = self._begin(record, label, Direction.BACK, owner, after)
            transfer.urgent = urgent
            if record.write.done:
                self._start(transfer, address)
            else:
                record.waiting_reads.append((transfer, address))
                if urgent:
                    self._promote(transfer)
        return transfer

    def drop(self, record: Record) -> None:
        """Gives the record's extent back as soon as no I/O uses it. Safe in finalizers.

        A finalizer may run at any point of a thread that holds the lock, so this must not wait
        for it: what cannot be freed now is freed by the next call or the next finished chunk.
        """
        self._drops.append(record)
        if self._lock.acquire(blocking=False):
            try:
                self._free_dropped()
            finally:
                self._lock.release()

    def wait(self, transfer: Transfer, *, what: str, deadline_s: float) -> int:
        """Nanoseconds that it took until `transfer` had ended; makes it urgent.

        Raises:
            DeadlineError: nothing of the transfer moved for `deadline_s` seconds.
            StorageError: the transfer failed.
        """
        began_ns = perf_counter_ns()
        with self._lock:
            if not transfer.done:
                self._promote(transfer)
            while not transfer.done:
                if self._worker_died:
                    raise StorageError(f"{what}: {transfer.label}: {self._closed_because}")
                last_ns = max(began_ns, self._progress_ns(transfer))
                left_s = deadline_s - (perf_counter_ns() - last_ns) / 1e9
                if left_s <= 0:
                    raise self._deadline_error(transfer, what, began_ns)
                self._ended.wait(left_s)
        if transfer.error is not None:
            raise transfer.error
        return perf_counter_ns() - began_ns

    def room(self) -> tuple[int, int]:
        """Bytes taken by records, and bytes of the arena file that are free."""
        with self._lock:
            self._free_dropped()
            return self._space.taken_bytes, self._space.free_bytes

    def can_wait_here(self) -> bool:
        """Whether the calling thread may wait for this store: no worker, not holding the lock."""
        if threading.current_thread() in self._threads:
            return False
        # The lock is only ever held for an instant, unless by the caller itself.
        if not self._lock.acquire(timeout=1.0):
            return False
        self._lock.release()
        return True

    def close(self, timeout_s: float) -> None:
        """Ends running I/O, fails what is queued, joins the threads, deletes the file."""
        self._stop("the storage was closed")
        until_ns = perf_counter_ns() + int(timeout_s * 1e9)
        for thread in self._threads:
            thread.join(max(0.0, (until_ns - perf_counter_ns()) / 1e9))
        if any(thread.is_alive() for thread in self._threads):
            # Closing now could let the stuck call write to whatever file gets the number next.
            _log.warning("I/O in %s hangs; its file stays open until the process ends", self._name)
            return
        self.arena.close()

    # ---- with the lock held ---------------------------------------------------------------------

    def _check_open(self, label: str) -> None:
        if self._closed_because is not None:
            raise StorageError(f"{label}: {self._name} takes no I/O: {self._closed_because}")

    def _begin(
        self,
        record: Record,
        label: str,
        direction: Direction,
        owner: object,
        after: Callable[[], object] | None,
    ) -> Transfer:
        transfer = Transfer(
            label=label,
            nbytes=record.nbytes,
            direction=direction,
            store=self._name,
            owner=owner,
            after=after,
        )
        transfer.record = record
        transfer.num_chunks_left = record.num_chunks
        record.num_under_way += 1
        return transfer

    def _start(self, transfer: Transfer, address: int) -> None:
        record = transfer.record
        assert record is not None, f"{transfer} has ended and cannot start"
        if transfer is not record.write and record.write.error is not None:
            self._fail(transfer, record.write.error)
        elif self._closed_because is not None:
            self._fail(transfer, self._not_moved(transfer))
        else:
            self.pending_bytes += record.body_bytes
            self._queue.add(transfer, record.chunks(transfer, address))
            self._work.notify(record.num_chunks)

    def _promote(self, transfer: Transfer) -> None:
        record = transfer.record
        assert record is not None, f"{transfer} has ended and cannot become urgent"
        if transfer is not record.write and not record.write.done:
            transfer.urgent = True  # joins the urgent queue when its write has ended
            transfer = record.write
        if not transfer.urgent:
            transfer.urgent = True
            self._queue.promote(transfer)

    def _progress_ns(self, transfer: Transfer) -> int:
        write = transfer.record.write if transfer.record is not None else transfer
        return max(transfer.progress_ns, write.progress_ns)

    def _free_dropped(self) -> None:
        while self._drops:
            record = self._drops.popleft()
            if not record.dropped:
                record.dropped = True
                self._free_if_unused(record)

    def _free_if_unused(self, record: Record) -> None:
        if record.dropped and record.num_under_way == 0 and record.body_bytes:
            self._space.give_back(record.offset, record.body_bytes)

    def _fail(self, transfer: Transfer, error: StorageError) -> None:
        transfer.error = transfer.error or error
        self._end(transfer)

    def _end(self, transfer: Transfer) -> None:
        record = transfer.record
        assert record is not None, f"{transfer} ended twice"
        transfer.mark_done()
        record.num_under_way -= 1
        if transfer is record.write:
            waiting, record.waiting_reads = record.waiting_reads, []
            for read, address in waiting:
                self._start(read, address)
        self._free_if_unused(record)
        self._ended.notify_all()

    def _not_moved(self, transfer: Transfer) -> StorageError:
        return StorageError(f"{transfer.label}: not moved ({self._name}): {self._closed_because}")

    def _deadline_error(self, transfer: Transfer, what: str, began_ns: int) -> DeadlineError:
        verb = "read" if transfer.direction is Direction.BACK else "write"
        return DeadlineError(
            f"{what}: waited {format_ns(perf_counter_ns() - began_ns)} for the {verb} of "
            f"{transfer.label} ({format_nbytes(transfer.nbytes)}) in {self._name}; "
            f"{self._num_running} chunks running, {len(self._queue)} queued, last finished "
            f"operation: {self._last_operation}. The disk hangs or is very slow; if that is "
            "expected, raise the deadline"
        )

    def _stop(self, why: str) -> None:
        with self._lock:
            if self._closed_because is not None:
                return
            self._closed_because = why
            while (chunk := self._queue.take()) is not None:
                transfer = chunk.transfer
                transfer.num_chunks_left -= 1
                self.pending_bytes -= chunk.nbytes
                transfer.error = transfer.error or self._not_moved(transfer)
                if transfer.num_chunks_left == 0:  # else a worker that has a chunk of it ends it
                    self._end(transfer)
            self._work.notify_all()

    # ---- worker threads -------------------------------------------------------------------------

    def _run_worker(self, prefers: Direction) -> None:
        _yield_to_computation()
        try:
            while (chunk := self._next(prefers)) is not None:
                error = self._move(chunk)
                self._finish(chunk, error)
        except BaseException as error:  # noqa: BLE001  whoever waits must hear of any bug here
            _log.critical("a storage worker of %s died", self._name, exc_info=error)
            self._worker_died = True
            self._stop(f"a storage worker died of {error!r}")
            with self._lock:
                self._ended.notify_all()

    def _next(self, prefers: Direction) -> Chunk | None:
        with self._lock:
            while self._closed_because is None:
                if (chunk := self._queue.take(prefers)) is not None:
                    self._num_running += 1
                    return chunk
                self._work.wait()
        return None

    def _move(self, chunk: Chunk) -> StorageError | None:
        transfer = chunk.transfer
        if transfer.error is not None:  # another chunk failed: the rest is of no use
            return transfer.error
        transfer.start_ns = transfer.start_ns or perf_counter_ns()
        try:
            move(self.arena, chunk, self.directory, checksum=self._checksum)
        except StorageError as error:
            return error
        except Exception as error:  # noqa: BLE001  `after` and libraries may raise anything
            named = StorageError(f"{transfer.label}: {self._name}: {error!r}")
            named.__cause__ = error
            return named
        return None

    def _finish(self, chunk: Chunk, error: StorageError | None) -> None:
        transfer = chunk.transfer
        with self._lock:
            self._count(chunk, error)
            if transfer.num_chunks_left:
                return
            owner, after = transfer.owner, transfer.after
            transfer.owner = transfer.after = None
        # Freeing a large tensor takes milliseconds and may run finalizers: not under the lock,
        # and before `done`, so that whoever sees `done` finds the memory free.
        del owner, after
        with self._lock:
            self._end(transfer)
            self._free_dropped()

    def _count(self, chunk: Chunk, error: StorageError | None) -> None:
        transfer = chunk.transfer
        transfer.num_chunks_left -= 1
        transfer.progress_ns = perf_counter_ns()
        self._num_running -= 1
        self.pending_bytes -= chunk.nbytes
        self._last_operation = f"{transfer.direction} of {transfer.label}"
        if error is not None:
            transfer.error = transfer.error or error
        elif transfer.direction is Direction.OUT:
            self.written_bytes += chunk.nbytes
        else:
            self.read_bytes += chunk.nbytes


def _yield_to_computation() -> None:
    """Let this thread run where the computation's threads leave time: it has some, they do not.

    On a CPU device they share the cores, and a kernel on all cores waits for its slowest thread.
    """
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
