from teraplan.runtime.storage.transfers import CHUNK_BYTES, Place, Record, Transfer
from teraplan.runtime.storage.work_queue import WorkQueue
from teraplan.units import MIB
from teraplan.values.run_record import Direction

READ, WRITE = Direction.BACK, Direction.OUT


def _nobody(record: Record) -> None:
    """Who has no room that could be given back."""


def _add(queue: WorkQueue, label: str, direction: Direction, *, urgent: bool = False) -> Transfer:
    transfer = Transfer(
        label=label, nbytes=16 * MIB, direction=direction, store="d", owner=None, after=None
    )
    transfer.urgent = urgent
    record = Record(
        *(0, 16 * MIB), alignment=512, block_bytes=4096, is_compared=False, give_back=_nobody
    )
    record.places = [Place(0, 0), Place(0, CHUNK_BYTES)]
    queue.add(transfer, record.chunks(transfer, 0))
    return transfer


def _order(queue: WorkQueue, prefer: Direction) -> list[str]:
    order = []
    while (chunk := queue.take(prefer)) is not None:
        order.append(f"{chunk.transfer.label}.{chunk.index}")
    return order


def _filled() -> WorkQueue:
    queue = WorkQueue()
    for label, direction in (("w1", WRITE), ("r1", READ), ("w2", WRITE), ("r2", READ)):
        _add(queue, label, direction)
    return queue


def test_the_preferred_direction_goes_first_and_each_is_in_order() -> None:
    reads, writes = ["r1.0", "r1.1", "r2.0", "r2.1"], ["w1.0", "w1.1", "w2.0", "w2.1"]
    assert _order(_filled(), READ) == reads + writes
    assert _order(_filled(), WRITE) == writes + reads


def test_urgent_goes_before_everything_and_is_taken_once() -> None:
    queue = _filled()
    promoted = _add(queue, "late", WRITE)
    first = queue.take(WRITE)
    assert first is not None
    assert first.transfer.label == "w1"
    promoted.urgent = True
    queue.promote(promoted)
    _add(queue, "urgent", READ, urgent=True)
    assert len(queue) == 11
    assert _order(queue, READ)[:4] == ["late.0", "late.1", "urgent.0", "urgent.1"]
    assert len(queue) == 0


def test_the_last_write_can_be_given_away_and_is_then_gone() -> None:
    queue = _filled()
    given = queue.take_last_write()
    assert given is not None
    assert f"{given.transfer.label}.{given.index}" == "w2.1"
    assert _order(queue, WRITE)[:3] == ["w1.0", "w1.1", "w2.0"]
    assert queue.take_last_write() is None
