"""Which store takes which chunk: the one that will have moved it first.

Speeds are what each store has shown of late, so over time each gets bytes in proportion to its
speed, and one that has become slow gets few. A store without room is passed over.
"""

from collections.abc import Sequence
from time import perf_counter_ns

from teraplan.errors import StorageError
from teraplan.runtime.storage.store import Store
from teraplan.runtime.storage.transfers import Extent, Place, Record


def place(record: Record, stores: Sequence[Store], label: str) -> None:
    """Gives every chunk of `record` a place. Call it with the stores' lock held.

    Raises:
        StorageError: no store takes all of it, StorageFullError if all are full; nothing is taken.
    """
    if not record.body_bytes:
        record.places = [Place(0, 0)]
        return
    usable = [store for store in stores if store.why_retired is None]
    error: StorageError | None = None
    while usable:
        chosen = _choose(record, usable)
        failed, error = _take(record, chosen, label)
        if error is None:
            record.places = _places(record, chosen)
            return
        usable.remove(failed)
    raise error or StorageError(f"{label}: not moved: " + "; ".join(_reasons(stores)))


def place_one(nbytes: int, stores: Sequence[Store], label: str) -> Extent:
    """An extent for one chunk that could not be written elsewhere.

    Raises:
        StorageError: no store takes it.
    """
    now_ns = perf_counter_ns()
    error: StorageError | None = None
    usable = [store for store in stores if store.why_retired is None]
    for store in sorted(usable, key=lambda one: one.finish_ns(nbytes, now_ns)):
        try:
            return Extent(store.index, store.take(nbytes, label), nbytes)
        except StorageError as caught:
            error = caught
    raise error or StorageError(f"{label}: not moved: " + "; ".join(_reasons(stores)))


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


def _take(record: Record, chosen: Sequence[Store], label: str) -> tuple[Store, StorageError | None]:
    """One extent in each chosen store; on failure the store that has no room, and its error."""
    share: dict[Store, int] = {}
    for index, store in enumerate(chosen):
        share[store] = share.get(store, 0) + record.chunk_bytes(index)
    for store, nbytes in share.items():
        try:
            offset = store.take(nbytes, label)
        except StorageError as error:
            for extent in record.extents:
                next(one for one in share if one.index == extent.store).give_back(extent)
            record.extents = []
            return store, error
        record.extents.append(Extent(store.index, offset, nbytes))
    return chosen[0], None


def _places(record: Record, chosen: Sequence[Store]) -> list[Place]:
    """One after the other in each store's extent."""
    next_offset = {extent.store: extent.offset for extent in record.extents}
    places: list[Place] = []
    for index, store in enumerate(chosen):
        places.append(Place(store.index, next_offset[store.index]))
        next_offset[store.index] += record.chunk_bytes(index)
    return places
