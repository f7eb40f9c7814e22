"""The state of the stores in words: for deadlines, and for whoever asks what is going on."""

from collections.abc import Sequence
from time import perf_counter_ns

from teraplan.runtime.storage.store import Store
from teraplan.runtime.storage.transfers import Transfer
from teraplan.units import format_nbytes, format_ns
from teraplan.values.run_record import Direction


def deadline_text(transfer: Transfer, what: str, began_ns: int, stores: Sequence[Store]) -> str:
    """What a wait for `transfer` since `began_ns` says when it gives up. With the lock held."""
    verb = "read" if transfer.direction is Direction.BACK else "write"
    record = transfer.record
    places = record.places if record is not None else []
    used = [store for store in stores if any(one.store == store.index for one in places)]
    names = " + ".join(store.name for store in used) or transfer.store
    states = "; ".join(
        f"{len(store.moving)} chunks running, {store.num_queued} queued, last finished "
        f"operation: {store.last_operation}"
        + (f", out of use: {store.why_retired}" if store.why_retired else "")
        for store in used
    )
    return (
        f"{what}: waited {format_ns(perf_counter_ns() - began_ns)} for the {verb} of "
        f"{transfer.label} ({format_nbytes(transfer.nbytes)}) in {names}; {states}. "
        "The disk hangs or is very slow; if that is expected, raise the deadline"
    )


def store_lines(store: Store) -> list[str]:
    """What one store is doing. With the lock held."""
    now_ns = perf_counter_ns()
    use = f" (out of use: {store.why_retired})" if store.why_retired else ""
    lines = [
        f"store {store.name}{use}: {format_nbytes(store.space.taken_bytes)} taken, "
        f"{format_nbytes(store.written_bytes)} written, {format_nbytes(store.read_bytes)} read",
        f"  {store.num_queued} chunks queued, {format_nbytes(store.pending_bytes)} to be moved; "
        f"last finished operation: {store.last_operation}",
    ]
    for chunk in store.moving:
        lines.append(
            f"  running for {format_ns(now_ns - chunk.start_ns)}: {chunk.transfer.direction} of "
            f"{chunk.transfer.label}, {format_nbytes(chunk.nbytes)} at offset {chunk.place.offset}"
        )
    return lines
