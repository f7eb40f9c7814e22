"""Chunks that are moved in C++: what that does well, and what it leaves to Python."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from types import FrameType

import numpy as np
import pytest
from numpy.typing import NDArray

from teraplan.errors import DeadlineError, IntegrityError, StorageError
from teraplan.runtime.process import compiled_source
from teraplan.runtime.storage import Record, Storage, lane
from teraplan.units import MIB
from teraplan.values.hardware import Link

Bytes = NDArray[np.uint8]
Memory = Callable[..., Bytes]
ReadBack = Callable[[Storage, Record], Bytes]
NBYTES = 20 * MIB + 5000
"""Three chunks and an end that lies in memory."""


@pytest.fixture
def storage(disk: Path) -> Iterator[Storage]:
    with Storage.open([disk], deadline_s=20.0, without_python=True) as opened:
        assert opened.traffic.stores[0].uses_lane
        yield opened


def put(storage: Storage, source: Bytes) -> Record:
    return storage.put(source.ctypes.data, source.nbytes, owner=source, label="act3")


def written(storage: Storage, source: Bytes) -> Record:
    record = put(storage, source)
    storage.wait(record.write, what="the test")
    return record


def spill_file(storage: Storage) -> int:
    """Opened once more: what the test does to it is nobody's doing in the process."""
    return os.open(f"/proc/self/fd/{storage._opened[0].arena.fd}", os.O_RDWR)


def test_workers_do_not_come_back_to_python_for_it(
    storage: Storage, memory: Memory, read_back: ReadBack
) -> None:
    source = memory(NBYTES, 64, seed=1)
    moved: list[object] = []
    storage.traffic.stores[0]._move = moved.append  # type: ignore[method-assign,assignment]
    record = written(storage, source)
    assert (read_back(storage, record) == source).all()
    assert moved == []
    assert record.write.start_ns < record.write.end_ns <= time.perf_counter_ns()
    store = storage.stores[0]
    assert store.written_bytes == store.read_bytes == NBYTES // 4096 * 4096
    storage.drop(record)
    assert storage.bytes_in_use == 0


def test_many_at_once_come_back_as_they_left(storage: Storage, memory: Memory) -> None:
    sources = [memory(MIB * (1 + n % 9) + n, seed=n) for n in range(40)]
    records = [put(storage, source) for source in sources]
    landings = [memory(r.nbytes, r.address_remainder) for r in records]
    reads = [
        storage.get(record, landing.ctypes.data, owner=landing, urgent=n % 3 == 0)
        for n, (record, landing) in enumerate(zip(records, landings, strict=True))
    ]
    for read in reads:
        storage.wait(read, what="the test")
    assert all((a == b).all() for a, b in zip(sources, landings, strict=True))
    for record in records:
        storage.drop(record)
    assert storage.bytes_in_use == 0


def test_a_read_that_waits_for_its_write_begins_when_that_ends(
    storage: Storage, memory: Memory
) -> None:
    source, landing = memory(64 * MIB, seed=1), memory(64 * MIB)
    record = put(storage, source)
    read = storage.get(record, landing.ctypes.data, owner=landing)
    storage.wait(read, what="the test")
    assert (landing == source).all()
    storage.drop(record)


class Owned:
    """Who holds the memory."""

    def __init__(self, content: Bytes) -> None:
        self.content = content


@pytest.mark.parametrize("look", ["done", "dropped", "nobody looks"])
def test_who_holds_the_memory_is_let_go(storage: Storage, memory: Memory, look: str) -> None:
    owner = Owned(memory(NBYTES, seed=1))
    held, address = weakref.ref(owner), owner.content.ctypes.data
    record = storage.put(address, NBYTES, owner=owner, label="act3")
    del owner
    if look == "dropped":
        storage.drop(record)
    until_s = time.monotonic() + 10
    while held() is not None and time.monotonic() < until_s:
        if look == "done" and record.write.done:
            assert held() is None
        time.sleep(0.01)
    assert held() is None


def test_a_changed_bit_on_the_disk_is_found_and_named(
    storage: Storage, memory: Memory, read_back: ReadBack
) -> None:
    record = written(storage, memory(NBYTES, seed=1))
    file, at = spill_file(storage), record.places[1].offset + 4321
    byte = os.pread(file, 1, at)
    os.pwrite(file, bytes([byte[0] ^ 4]), at)
    os.fsync(file)
    os.close(file)
    with pytest.raises(IntegrityError, match=r"act3: 8.00 MiB at offset \d+ .* came back changed"):
        read_back(storage, record)
    storage.drop(record)
    assert storage.bytes_in_use == 0


def test_a_changed_bit_in_memory_is_read_again(
    storage: Storage, memory: Memory, read_back: ReadBack, caplog: pytest.LogCaptureFixture
) -> None:
    """The bytes on the disk are right: C++ meets another checksum, Python the right one."""
    source = memory(NBYTES, seed=1)
    record = written(storage, source)
    right, record.checksums[0] = record.checksums[0], record.checksums[0] ^ 1
    store = storage.traffic.stores[0]
    take_ended = store.take_ended

    def mend() -> object:
        record.checksums[0] = right
        return take_ended()

    store.take_ended = mend  # type: ignore[method-assign,assignment]
    assert (read_back(storage, record) == source).all()
    assert "act3: the checksum differs" in caplog.text
    storage.drop(record)
    assert storage.bytes_in_use == 0


def test_a_file_that_has_lost_its_end(
    storage: Storage, memory: Memory, read_back: ReadBack, caplog: pytest.LogCaptureFixture
) -> None:
    record = written(storage, memory(NBYTES, seed=1))
    file = spill_file(storage)
    os.ftruncate(file, record.places[2].offset)
    os.close(file)
    with pytest.raises(StorageError, match=r"act3: read of .* the file ended after 0 of"):
        read_back(storage, record)
    assert "act3: the file ended early" in caplog.text
    storage.drop(record)


_LIMITED = """
import resource, sys, numpy as np
from pathlib import Path
from teraplan.errors import StorageFullError
from teraplan.runtime.storage import Storage
with Storage.open([Path(sys.argv[1])], without_python=True) as storage:
    assert storage.traffic.stores[0].uses_lane
    source = np.ones(20 << 20, dtype=np.uint8)
    warm = storage.put(source.ctypes.data, source.nbytes, owner=source, label="warm")
    storage.wait(warm.write, what="it")
    resource.setrlimit(resource.RLIMIT_FSIZE, (10 << 20, 10 << 20))
    record = storage.put(source.ctypes.data, source.nbytes, owner=source, label="act3")
    try:
        storage.wait(record.write, what="it")
    except StorageFullError as error:
        print(error)
"""


def test_a_write_that_fails_is_named_by_python(disk: Path) -> None:
    command = [sys.executable, "-c", _LIMITED, str(disk)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert re.search("act3: write of [48].00 MiB at offset", done.stdout), "whichever failed first"
    assert "files of this process may have 10.00 MiB: raise that limit" in done.stdout


def test_a_wait_has_its_deadline_and_lets_signals_in(
    disk: Path, memory: Memory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Jobs that no thread ever sees, as if the disk did not answer."""
    came: list[float] = []

    def note(number: int, frame: FrameType | None) -> None:
        came.append(time.monotonic())

    before = signal.signal(signal.SIGALRM, note)
    source = memory(NBYTES, seed=1)
    with Storage.open([disk], deadline_s=1.0, without_python=True) as storage:
        monkeypatch.setattr(lane.Lane, "push", lambda *_, **__: None)
        record, began_s = put(storage, source), time.monotonic()
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        with pytest.raises(DeadlineError, match=r"waited 1.*act3 .*, last finished operation"):
            storage.wait(record.write, what="the test")
        signal.signal(signal.SIGALRM, before)
        assert 0.15 < came[0] - began_s < 0.6


def test_an_interrupt_ends_a_wait(
    disk: Path, memory: Memory, monkeypatch: pytest.MonkeyPatch
) -> None:
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)  # it may be ignored
    with (
        ExitStack() as after,
        Storage.open([disk], deadline_s=20.0, without_python=True) as storage,
    ):
        after.callback(signal.signal, signal.SIGINT, handler)
        monkeypatch.setattr(lane.Lane, "push", lambda *_, **__: None)
        record, began_s = put(storage, memory(NBYTES, seed=1)), time.monotonic()
        threading.Timer(0.2, signal.raise_signal, (signal.SIGINT,)).start()
        with pytest.raises(KeyboardInterrupt):
            storage.wait(record.write, what="the test")
        assert time.monotonic() - began_s < 5


def test_where_room_is_short_what_was_dropped_is_free_at_once(
    storage: Storage, memory: Memory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody has counted the write that has ended, and the file cannot get longer."""
    arena = storage._opened[0].arena
    arena.grow_bytes = 4096
    first = written(storage, memory(NBYTES, seed=1))
    storage.drop(first)
    del first

    def full(size_bytes: int, nbytes: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(arena, "grow", full)
    for seed in range(30):
        record = written(storage, memory(NBYTES, seed=seed))
        storage.drop(record)


def test_a_pace_and_events_are_for_python(storage: Storage, memory: Memory) -> None:
    source = memory(4 * MIB, seed=1)
    called: list[int] = []
    address, nbytes = source.ctypes.data, source.nbytes
    record = storage.put(
        address, nbytes, owner=source, label="act3", after=lambda: called.append(1)
    )
    storage.wait(record.write, what="the test")
    assert called == [1]
    slow = Link(
        out_bytes_per_s=8 * MIB,
        back_bytes_per_s=8 * MIB,
        out_while_back_bytes_per_s=8 * MIB,
        back_while_out_bytes_per_s=8 * MIB,
        latency_ns=0,
    )
    storage.keep_to(slow)
    began_s = time.monotonic()
    for _ in range(2):
        storage.wait(put(storage, source).write, what="the test")
    assert time.monotonic() - began_s > 0.3
    storage.drop(record)


def test_without_a_compiler_python_moves_them(
    disk: Path, memory: Memory, read_back: ReadBack, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_compiler(*sources: Path) -> None:
        raise RuntimeError("no working C++ compiler found")

    monkeypatch.setattr(compiled_source, "load", no_compiler)
    lane.lane_library.cache_clear()
    try:
        with Storage.open([disk], without_python=True) as storage:
            assert not storage.traffic.stores[0].uses_lane
            source = memory(NBYTES, seed=1)
            assert (read_back(storage, written(storage, source)) == source).all()
    finally:
        lane.lane_library.cache_clear()
