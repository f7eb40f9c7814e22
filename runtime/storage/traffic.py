"""What is under way between memory and the stores.

    put -> places -> each store's queue -> workers -> ended -> all chunks ended -> done
    get ->  (after its write)  -^

One lock guards all of it; it is held for instants only. A worker never waits for another transfer:
a read of a record whose write has not ended is kept with the record and joins the queues when the
write ends, so no order of calls can dead-lock. A chunk that one store cannot write goes to another:
its bytes are in memory until its transfer is done (`balance`).
"""

import threading
from collections import deque
from collections.abc import Callable, Sequence
from time import perf_counter_ns

from teraplan.errors import DeadlineError, StorageError, StorageFullError
from teraplan.runtime.process.locks import if_free
from teraplan.runtime.storage.balance import Balance
from teraplan.runtime.storage.describe import deadline_text
from teraplan.runtime.storage.directories import OpenedDirectory
from teraplan.runtime.storage.ends import Ends, Wait, nothing_moved_s
from teraplan.runtime.storage.lane import Lane
from teraplan.runtime.storage.pace import Pace
from teraplan.runtime.storage.placement import place
from teraplan.runtime.storage.store import Store
from teraplan.runtime.storage.transfers import Chunk, Record, Transfer
from teraplan.runtime.storage.workers import Workers
from teraplan.values.run_record import Direction

After = Callable[[], object] | None
"""Called by a worker before it touches the memory."""
_START_S = 10.0
"""Idle workers have ended long before."""


class Traffic:
    """See the module's text. Every method may be called by any thread, except where it says so."""

    def __init__(
        self,
        opened: Sequence[OpenedDirectory],
        *,
        checksum: bool,
        workers: Workers,
        lane: Lane | None = None,
    ) -> None:
        self.lock, self.pace = threading.Lock(), Pace()
        # Everything below is guarded by the lock.
        self._ends = Ends(lane)
        self._drops: deque[Record] = deque()
        self._closed_because: str | None = None
        self._worker_died = False
        self.alignment = max(one.arena.memory_alignment for one in opened)
        self._block_bytes = max(one.arena.block_bytes for one in opened)
        self.stores = tuple(
            Store(
                one.directory,
                one.arena,
                index=index,
                checksum=checksum,
                workers=workers,
                lock=self.lock,
                reports=self,
                turns=self.pace,
                lane=lane,
            )
            for index, one in enumerate(opened)
        )
        self._balance = Balance(self.stores, is_open=lambda: self._closed_because is None)
        try:
            for store in self.stores:  # not earlier: workers look at each other's queues
                store.start()
        except BaseException:
            self.close(_START_S)
            raise

    # ---- called by the session ------------------------------------------------------------------

    def put(
        self,
        address: int,
        nbytes: int,
        *,
        owner: object,
        label: str,
        is_compared: bool,
        after: After,
    ) -> Record:
        """Reserves room, queues the write, and returns at once.

        Raises:
            StorageFullError: no room; nothing has been queued.
        """
        record = Record(
            address,
            nbytes,
            alignment=self.alignment,
            block_bytes=self._block_bytes,
            is_compared=is_compared,
            give_back=self.drop,
        )
        try:
            self._put(record, address, owner, label, after)
        except StorageFullError:
            if not self._ends.see_to_all():
                raise
            self._put(record, address, owner, label, after)  # what was dropped is free now
        return record

    def _put(self, record: Record, address: int, owner: object, label: str, after: After) -> None:
        with self.lock:
            self._check_open(label)
            self._free_dropped()
            record.dropped = False
            try:
                place(record, self.stores, label)
                record.write = self._begin(record, label, Direction.OUT, owner, after)
                self._start(record.write, address)
            except BaseException:  # an interrupt, too: then nothing has been put
                self._take_back(record, getattr(record, "write", None), [])
                record.dropped = True
                self._free_if_unused(record)
                raise

    def get(
        self, record: Record, address: int, *, owner: object, urgent: bool, after: After
    ) -> Transfer:
        """Queues the read of `record` into the memory at `address`, and returns at once."""
        label = record.write.label
        assert address % record.alignment == record.address_remainder, (
            f"{label} left address {record.address_remainder} modulo {record.alignment} "
            f"and cannot land at {address % record.alignment}"
        )
        with self.lock:
            self._check_open(label)
            assert not record.dropped, f"{label} was dropped and cannot be read"
            before, transfer = list(record.under_way), None
            try:
                transfer = self._begin(record, label, Direction.BACK, owner, after)
                transfer.urgent = urgent
                if not record.write.has_ended:
                    record.waiting_reads.append((transfer, address))
                    self._ends.ask_for(record.write)
                    if urgent:
                        self._promote(transfer)
                else:
                    self._start(transfer, address)
            except BaseException:
                self._take_back(record, transfer, before)
                raise
        return transfer

    def drop(self, record: Record) -> None:
        """Gives the record's room back as soon as no I/O uses it. Safe in finalizers.

        A finalizer may run at any point of a thread that holds the lock, so this must not wait
        for it: the next call or the next finished chunk frees it. (Nor may it try whether the lock
        is free: an interrupt right after that would leave it locked.)
        """
        self._drops.append(record)
        write = getattr(record, "write", None)
        if write is not None and not write.done and write.group is not None:
            write.group.report = 1

    def wait(self, transfer: Transfer, *, what: str, deadline_s: float) -> int:
        """Nanoseconds that it took until `transfer` had ended; makes it urgent.

        After half of the deadline without progress, what a stuck store was to write is written
        elsewhere.

        Raises:
            DeadlineError: nothing of the transfer moved for `deadline_s` seconds.
            StorageError: the transfer failed.
        """
        began_ns = perf_counter_ns()
        while not transfer.done:
            wait = self._next_wait(transfer, what, began_ns, deadline_s)
            if wait is not None:
                until_ended, patience_s = wait
                until_ended(patience_s)
        transfer.raise_if_failed()
        return perf_counter_ns() - began_ns

    def room(self, store: Store) -> tuple[int, int]:
        """Bytes of `store` taken by records, and bytes of its file that are free."""
        self._ends.see_to_all()
        with self.lock:
            self._free_dropped()
            return store.space.taken_bytes, store.space.free_bytes

    def can_wait_here(self) -> bool:
        """Whether the calling thread may wait for workers: it is none, and does not hold the lock.

        The lock is only ever held for an instant, unless by the caller itself.
        """
        if any(threading.current_thread() in store.threads for store in self.stores):
            return False
        return if_free(self.lock, lambda: None, timeout_s=1.0)

    def close(self, timeout_s: float) -> None:
        """Ends running I/O, fails what is queued, joins the threads, deletes the files."""
        self._stop("the storage was closed")
        self.pace.close()
        until_ns = perf_counter_ns() + int(timeout_s * 1e9)
        for store in self.stores:
            store.close(until_ns)

    def _next_wait(
        self, transfer: Transfer, what: str, began_ns: int, deadline_s: float
    ) -> tuple[Wait, float] | None:
        """A wait until something has ended, and the seconds until it is time to look anew.

        None if `transfer` has ended. Stores that are stuck are left.
        """
        with self.lock:
            until_ended = self._ends.until_next()
            if transfer.has_ended:
                return None
            if self._worker_died:
                raise StorageError(f"{what}: {transfer.label}: {self._closed_because}")
            self._promote(transfer)
            idle_s = nothing_moved_s(transfer, began_ns, self.stores)
            if idle_s >= deadline_s / 2:
                self._balance.leave_stuck_stores(deadline_s, idle_s)
                # Elsewhere it begins anew.
                idle_s = nothing_moved_s(transfer, began_ns, self.stores)
            if idle_s >= deadline_s:
                raise DeadlineError(deadline_text(transfer, what, began_ns, self.stores))
            half_s, rest_s = deadline_s / 2 - idle_s, deadline_s - idle_s
            stuck_in_s = self._balance.stuck_in_s(deadline_s)
            return until_ended, half_s if half_s > 0 else min(rest_s, stuck_in_s)

    # ---- called by workers ----------------------------------------------------------------------

    def ended(self, store: Store, worker: int, chunk: Chunk, error: StorageError | None) -> None:
        """A worker has moved `chunk`, or could not."""
        transfer = chunk.transfer
        with self.lock:
            store.count(worker, chunk, error)
            if chunk.abandoned or (error is not None and self._balance.try_elsewhere(chunk)):
                chunk.owner = None
                return
            transfer.error = transfer.error or error
            over = [transfer] if transfer.count_down() else []
        self._end_all(over)

    def count_ended(self, store: Store) -> None:
        """Chunks have ended in the lane of `store`, or there may be some."""
        with self.lock:
            ended = store.take_ended()
            moved = [one.chunk.transfer for one in ended if not one.error]
            over = [transfer for transfer in moved if transfer.count_down()]
        self._end_all(over)
        store.have_counted(len(ended))

    def _end_all(self, over: Sequence[Transfer]) -> None:
        """Ends transfers that nothing is left of. Without the lock held."""
        if not over:
            return
        # Freeing a large tensor takes milliseconds and may run finalizers: not under the lock,
        # and before `done`, so that whoever sees `done` finds the memory free.
        for transfer in over:
            transfer.let_go()
        with self.lock:
            for transfer in over:
                self._end(transfer)
            self._free_dropped()

    def find_work(self, store: Store) -> None:
        """Nothing is queued in `store`. With the lock held."""
        self._balance.find_work(store)

    def pass_on(self, store: Store, chunk: Chunk) -> bool:
        """Whether another store has taken `chunk`. With the lock held."""
        return self._balance.pass_on(store, chunk)

    def worker_died(self, store: Store, error: BaseException) -> None:
        """A worker met a bug; what it had taken will not end."""
        self._worker_died = True
        self._stop(f"a storage worker died of {error!r}")
        with self.lock:
            self._ends.ring()

    # ---- with the lock held ---------------------------------------------------------------------

    def _check_open(self, label: str) -> None:
        if self._closed_because is not None:
            names = ", ".join(store.name for store in self.stores)
            raise StorageError(f"{label}: {names} takes no I/O: {self._closed_because}")

    def _begin(
        self,
        record: Record,
        label: str,
        direction: Direction,
        owner: object,
        after: After,
    ) -> Transfer:
        used = sorted({one.store for one in record.places})
        transfer = Transfer(
            label=label,
            nbytes=record.nbytes,
            direction=direction,
            store=" + ".join(self.stores[index].name for index in used),
            owner=owner,
            after=after,
        )
        transfer.record = record
        transfer.num_chunks_left = record.num_chunks
        record.under_way.append(transfer)
        return transfer

    def _start(self, transfer: Transfer, address: int) -> None:
        record = transfer.record
        assert record is not None, f"{transfer} has ended and cannot start"
        if transfer is not record.write and record.write.error is not None:
            self._fail(transfer, record.write.error)
        elif self._closed_because is not None:
            self._fail(transfer, self._not_moved(transfer))
        else:
            by_store: dict[int, list[Chunk]] = {}
            for chunk in record.chunks(transfer, address):
                by_store.setdefault(chunk.place.store, []).append(chunk)
            for index, chunks in by_store.items():
                self.stores[index].add(transfer, chunks)

    def _take_back(self, record: Record, transfer: Transfer | None, before: list[Transfer]) -> None:
        """Undoes what was begun with the record, which had these transfers under way before."""
        record.under_way = before
        if transfer is None:
            return
        transfer.num_chunks_left = sum(store.take_back(transfer) for store in self.stores)
        if transfer.num_chunks_left:  # a lane has begun with it: it ends as others do
            record.under_way.append(transfer)
        record.waiting_reads = [read for read in record.waiting_reads if read[0] is not transfer]

    def _promote(self, transfer: Transfer) -> None:
        record = transfer.record
        assert record is not None, f"{transfer} has ended and cannot become urgent"
        if transfer is not record.write and not record.write.has_ended:
            transfer.urgent = True  # joins the urgent queue when its write has ended
            transfer = record.write
        if not transfer.urgent:
            transfer.urgent = True
            for index in {one.store for one in record.places}:
                self.stores[index].promote(transfer)

    def _free_dropped(self) -> None:
        while self._drops:
            record = self._drops[0]
            record.dropped = True
            self._free_if_unused(record)
            self._drops.popleft()  # last, so that an interrupt leaves it for the next time

    def _free_if_unused(self, record: Record) -> None:
        if record.dropped and record.is_unused:
            for store in self.stores:
                store.give_back(record)

    def _fail(self, transfer: Transfer, error: StorageError) -> None:
        transfer.error = transfer.error or error
        self._end(transfer)

    def _end(self, transfer: Transfer) -> None:
        record = transfer.record
        assert record is not None, f"{transfer} ended twice"
        transfer.mark_done()
        record.under_way.remove(transfer)
        if transfer is record.write:
            waiting, record.waiting_reads = record.waiting_reads, []
            for read, address in waiting:
                self._start(read, address)
        self._free_if_unused(record)
        self._ends.ring()

    def _not_moved(self, transfer: Transfer) -> StorageError:
        return StorageError(
            f"{transfer.label}: not moved ({transfer.store}): {self._closed_because}"
        )

    def _stop(self, why: str) -> None:
        with self.lock:
            if self._closed_because is not None:
                return
            self._closed_because = why
            for store in self.stores:
                for chunk in store.empty_queue():
                    transfer = chunk.transfer
                    transfer.num_chunks_left -= 1
                    transfer.error = transfer.error or self._not_moved(transfer)
                    if transfer.num_chunks_left == 0:  # else a worker that has a chunk ends it
                        self._end(transfer)
                store.stop()
