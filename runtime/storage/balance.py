"""Which store takes a write that was to go to another: one that is idle, sooner done, or works.

A chunk's bytes are in memory until its transfer is done, so until then any store can write them.
"""

from collections.abc import Callable, Sequence
from time import perf_counter_ns

from teraplan.errors import StorageError
from teraplan.runtime.storage.placement import place_one
from teraplan.runtime.storage.store import Store
from teraplan.runtime.storage.transfers import CHUNK_BYTES, Chunk
from teraplan.values.run_record import Direction

_A_WHILE_S = 0.001
_WORTH_TAKING = 1.5
"""A queued write goes to an idle store that needs less time for it by this factor."""


class Balance:
    """Between the stores of one traffic, with whose lock every method is called."""

    def __init__(self, stores: Sequence[Store], is_open: Callable[[], bool]) -> None:
        """`is_open`: False where nothing is to be queued any more."""
        self.stores, self._is_open = stores, is_open

    def find_work(self, store: Store) -> None:
        """Nothing is queued in `store`: it takes a write that would wait longer elsewhere."""
        if len(self.stores) == 1 or store.why_retired is not None or not self._is_open():
            return
        now_ns = perf_counter_ns()
        others = [one for one in self.stores if one is not store]
        busiest = max(others, key=lambda one: one.finish_ns(0, now_ns))
        if busiest.finish_ns(0, now_ns) < _WORTH_TAKING * store.finish_ns(CHUNK_BYTES, now_ns):
            return
        chunk = busiest.give_last_write()
        if chunk is not None and not self._write_in(chunk, [store], chunk.failed_in):
            chunk.taken = False
            busiest.add(chunk.transfer, [chunk])

    def pass_on(self, store: Store, chunk: Chunk) -> bool:
        """Whether another store has taken `chunk`, being sooner done. With the lock held.

        Else the last chunks of a slow store would hold up everything.
        """
        if len(self.stores) == 1 or chunk.was_moved:
            return False
        now_ns, nbytes = perf_counter_ns(), chunk.nbytes
        others = [one for one in self.stores if one is not store and one.why_retired is None]
        best = min(others, key=lambda one: one.finish_ns(nbytes, now_ns), default=store)
        if best.finish_ns(nbytes, now_ns) >= store.duration_ns(nbytes, now_ns):
            return False
        if not self._write_in(chunk, [best], chunk.failed_in):
            return False
        store.pending_bytes -= nbytes
        return True

    def try_elsewhere(self, chunk: Chunk) -> bool:
        """Queues the write of `chunk` in a store that has not failed it; False if there is none."""
        failed_in = chunk.failed_in | {chunk.place.store}
        others = [store for store in self.stores if store.index not in failed_in]
        if not others or chunk.transfer.error or not self._is_open():
            return False
        return self._write_in(chunk, others, failed_in)

    def _write_in(self, chunk: Chunk, others: Sequence[Store], failed_in: frozenset[int]) -> bool:
        """Queues the write of `chunk` in one of the others, False if it is none or none can."""
        transfer, record = chunk.transfer, chunk.record
        if transfer.direction is not Direction.OUT:
            return False
        try:
            where = place_one(record, chunk.nbytes, others, transfer.label)
        except StorageError:
            return False
        record.places[chunk.index] = where
        self.stores[where.store].add(transfer, [chunk.moved(where, failed_in)])
        return True

    def stuck_in_s(self, deadline_s: float) -> float:
        """So long until a chunk that is being moved now counts as stuck; longer than a while."""
        now_ns = perf_counter_ns()
        ages_s = [(now_ns - c.start_ns) / 1e9 for s in self.stores for c in s.moving]
        until_s = [left_s for age_s in ages_s if (left_s := deadline_s / 2 - age_s) > 0]
        return min(until_s, default=deadline_s) + _A_WHILE_S

    def leave_stuck_stores(self, deadline_s: float, idle_s: float) -> None:
        """Retires stores in which a chunk takes too long, and writes elsewhere.

        The last store that works may take all of the deadline, others half of it. What is written
        elsewhere begins anew.
        """
        before_ns = perf_counter_ns() - int(deadline_s / 2 * 1e9)
        for store in self.stores:
            stuck = [c for c in store.moving if c.start_ns <= before_ns]
            others = sum(one.why_retired is None for one in self.stores if one is not store)
            if not stuck or (not others and idle_s < deadline_s):
                continue
            store.retire(f"an operation takes longer than {idle_s:.3g} s", until_it_moves=True)
            for chunk in stuck:
                # Its worker may still read the memory, so the memory has to stay.
                if not chunk.abandoned and self.try_elsewhere(chunk):
                    chunk.abandoned, chunk.owner = True, chunk.transfer.owner
                    chunk.transfer.progress_ns = perf_counter_ns()
            for chunk in store.empty_queue():
                if self.try_elsewhere(chunk):
                    chunk.transfer.progress_ns = perf_counter_ns()
                else:
                    chunk.taken = False
                    store.add(chunk.transfer, [chunk])
