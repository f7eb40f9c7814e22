"""Which store takes which chunk: the one that will have moved it first.

Speeds are what each store has shown of late, so over time each gets bytes in proportion to its
speed, and one that has become slow gets few. A store without room is passed over.
"""

from collections.abc import Sequence
from time import perf_counter_ns

from teraplan.errors import StorageError
from teraplan.runtime.storage.store import Store
from teraplan.runtime.storage.transfers import Place, Record


def place(record: Record, stores: Sequence[Store], label: str) -> None:
    """Gives every chunk of `record` a place. Call it with the stores' lock held.

    Raises:
        StorageError: no store takes all of it, StorageFullError if all are full; nothing is taken.
    """
    if not record.body_bytes:
        record.places = [Place(0, 0)]
        return
    usable = [store for store in stores if store.why_retired is None]
    failures: list[StorageError] = []
    while usable:
        chosen = _choose(record, usable)
        offsets: dict[int, int] = {}
        for store, nbytes in _shares(record, chosen).items():
            try:
                offsets[store.index] = store.take(record, nbytes, label)
            except StorageError as caught:
                failures.append(caught.with_traceback(None))
                failed = store
                break
        else:
            record.places = _places(record, chosen, offsets)
            return
        for store in usable:
            store.give_back(record)
        usable.remove(failed)
    raise _last_of(failures, label, stores)


def place_one(record: Record, nbytes: int, stores: Sequence[Store], label: str) -> Place:
    """Room for one chunk of `record` that could not be written elsewhere.

    Raises:
        StorageError: no store takes it.
    """
    now_ns = perf_counter_ns()
    failures: list[StorageError] = []
    usable = [store for store in stores if store.why_retired is None]
    for store in sorted(usable, key=lambda one: one.finish_ns(nbytes, now_ns)):
        try:
            return Place(store.index, store.take(record, nbytes, label))
        except StorageError as caught:
            failures.append(caught.with_traceback(None))
    raise _last_of(failures, label, stores)


def _last_of(failures: list[StorageError], label: str, stores: Sequence[Store]) -> StorageError:
    """What to raise, taken out of the list.

    An error that is raised holds the frame, and that its callers' with all their tensors; a frame
    that holds the error as well keeps them until garbage is collected.
    """
    if failures:
        return failures.pop()
    return StorageError(f"{label}: not moved: " + "; ".join(_reasons(stores)))


def _reasons(stores: Sequence[Store]) -> list[str]:
    reasons = [f"{store.name} is out of use: {store.why_retired}" for store in stores]
    return reasons or ["no other store"]


def _choose(record: Record, usable: Sequence[Store]) -> list[Store]:
    """A store for each chunk."""
    if len(usable) == 1:
        return [usable[0]] * record.num_chunks
    now_ns = perf_counter_ns()
    planned = {store.index: 0 for store in usable}
    chosen: list[Store] = []
    for index in range(record.num_chunks):
        nbytes = record.chunk_bytes(index)
        store = min(usable, key=lambda one: one.finish_ns(planned[one.index] + nbytes, now_ns))
        planned[store.index] += nbytes
        chosen.append(store)
    return chosen


def _shares(record: Record, chosen: Sequence[Store]) -> dict[Store, int]:
    """Bytes of the record in each store."""
    shares: dict[Store, int] = {}
    for index, store in enumerate(chosen):
        shares[store] = shares.get(store, 0) + record.chunk_bytes(index)
    return shares


def _places(record: Record, chosen: Sequence[Store], offsets: dict[int, int]) -> list[Place]:
    """One after the other in each store's extent, which begins at `offsets`."""
    next_offset = dict(offsets)
    places: list[Place] = []
    for index, store in enumerate(chosen):
        places.append(Place(store.index, next_offset[store.index]))
        next_offset[store.index] += record.chunk_bytes(index)
    return places
