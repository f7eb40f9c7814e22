"""Several directories: their speeds add up; a slow, full or broken one holds up no other."""

import errno
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from teraplan.errors import StorageError, StorageFullError, ThreadLimitError
from teraplan.runtime.storage import Record, Storage, arena, posix_arena
from teraplan.runtime.storage.speed import Speed
from teraplan.units import MIB
from tests.fakes.throttled_stores import throttle

Bytes = NDArray[np.uint8]
Memory = Callable[..., Bytes]
ReadBack = Callable[[Storage, Record], Bytes]
FAST = 80e6
"""Bytes per second; the disks that tests run on do ten times that."""


@pytest.fixture
def open_in(disk: Path) -> Callable[..., Storage]:
    """`open_in(number)`: a storage over so many directories."""

    def open_it(number: int, *, deadline_s: float = 20.0) -> Storage:
        directories = [disk / f"store{index}" for index in range(number)]
        for directory in directories:
            directory.mkdir(exist_ok=True)
        return Storage.open(directories, deadline_s=deadline_s)

    return open_it


def _put(storage: Storage, tensor: Bytes, label: str = "act") -> Record:
    return storage.put(tensor.ctypes.data, tensor.nbytes, owner=tensor, label=label)


def _write_all(storage: Storage, tensor: Bytes, number: int) -> tuple[float, list[Record]]:
    """Seconds that so many writes of `tensor` take together, and their records."""
    began_s = time.monotonic()
    records = [_put(storage, tensor, f"act{index}") for index in range(number)]
    for record in records:
        storage.wait(record.write, what="the test")
    return time.monotonic() - began_s, records


def _read_all(storage: Storage, records: list[Record], tensor: Bytes, memory: Memory) -> float:
    """Seconds that reading all takes."""
    landing = memory(tensor.nbytes, records[0].address_remainder)
    began_s = time.monotonic()
    reads = [storage.get(r, landing.ctypes.data, owner=landing) for r in records]
    for read in reads:
        storage.wait(read, what="the test")
    seconds = time.monotonic() - began_s
    assert np.array_equal(landing, tensor)
    return seconds


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize("factors", [(1, 1), (1, 0.5), (1, 1, 0.5, 0.5), (1, 1, 0.1)])
def test_speeds_of_all_stores_add_up(
    open_in: Callable[..., Storage], memory: Memory, factors: tuple[float, ...]
) -> None:
    speeds = [FAST * factor for factor in factors]
    tensor = memory(16 * MIB, 0, seed=1)
    with open_in(len(speeds)) as storage:
        throttle(storage, speeds)
        _, first = _write_all(storage, tensor, 8)  # speeds are learnt from use
        for record in first:
            storage.drop(record)
        number = int(3 * sum(speeds) / tensor.nbytes)
        ideal_s = number * tensor.nbytes / sum(speeds)
        write_s, records = _write_all(storage, tensor, number)
        read_s = _read_all(storage, records, tensor, memory)
    assert write_s < ideal_s * 1.1, f"{ideal_s / write_s:.2f} of the sum of speeds in writing"
    assert read_s < ideal_s * 1.2, f"{ideal_s / read_s:.2f} of the sum of speeds in reading"


@pytest.mark.slow
@pytest.mark.exhaustive
def test_a_store_that_becomes_ten_times_slower_gets_less(
    open_in: Callable[..., Storage], memory: Memory
) -> None:
    tensor = memory(16 * MIB, 0, seed=1)
    with open_in(2) as storage:
        pipes = throttle(storage, [FAST, FAST])
        _, records = _write_all(storage, tensor, 8)
        pipes[1].bytes_per_s = FAST / 10
        seconds, more = _write_all(storage, tensor, 16)  # queued while it counts as fast
        assert seconds < 1.25 * 16 * tensor.nbytes / (FAST * 1.1)
        for record in records + more:
            storage.drop(record)
        before = [info.written_bytes for info in storage.stores]
        _write_all(storage, tensor, 12)
        fast, slow = (
            info.written_bytes - old for info, old in zip(storage.stores, before, strict=True)
        )
        assert slow < fast / 4


def test_a_large_tensor_is_spread_and_comes_back(
    open_in: Callable[..., Storage], memory: Memory, read_back: ReadBack
) -> None:
    tensor = memory(100 * MIB + 777, 64, seed=1)
    with open_in(3) as storage:
        record = _put(storage, tensor)
        assert len({place.store for place in record.places}) == 3
        assert all(f"store{index}" in record.write.store for index in range(3))
        assert np.array_equal(read_back(storage, record), tensor)
        storage.drop(record)
        assert storage.bytes_in_use == 0


def _fd_of(storage: Storage, index: int) -> int:
    return storage.traffic.stores[index].arena.fd


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC, errno.EROFS, errno.ENODEV, errno.ENXIO])
def test_what_one_store_cannot_write_another_does(
    open_in: Callable[..., Storage],
    memory: Memory,
    read_back: ReadBack,
    monkeypatch: pytest.MonkeyPatch,
    code: int,
) -> None:
    tensor = memory(60 * MIB + 5, 64, seed=1)
    with open_in(2) as storage:
        bad = _fd_of(storage, 0)

        def write(fd: int, buffers: list[memoryview], offset: int) -> int:
            if fd == bad:
                raise OSError(code, os.strerror(code))
            return os.pwritev(fd, buffers, offset)

        monkeypatch.setattr(posix_arena, "pwritev", write)
        for _ in range(4):
            record = _put(storage, tensor)
            storage.wait(record.write, what="the test")
            assert {place.store for place in record.places} == {1}
            assert np.array_equal(read_back(storage, record), tensor)
            storage.drop(record)
        assert storage.bytes_in_use == 0
        first, second = storage.stores
        assert second.in_use
        if code == errno.ENOSPC:
            assert first.in_use  # there may be room again
        else:
            assert not first.in_use
            assert first.free_bytes == 0
            assert "nothing more is written" in first.fallbacks[-1]
            assert os.strerror(code) in first.fallbacks[-1]


def test_when_all_stores_are_out_of_use_the_reasons_are_named(
    open_in: Callable[..., Storage], memory: Memory, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write(fd: int, buffers: list[memoryview], offset: int) -> int:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    tensor = memory(MIB, 64, seed=1)
    with open_in(2) as storage:
        kept = _put(storage, tensor)
        storage.wait(kept.write, what="the test")
        monkeypatch.setattr(posix_arena, "pwritev", write)
        with pytest.raises(StorageError, match=r"act: write of .* \(EROFS: Read-only file system"):
            storage.wait(_put(storage, tensor).write, what="the test")
        with pytest.raises(
            StorageError, match=r"act9: not moved: .*store0 is out of use: .*; .*store1 is out"
        ):
            _put(storage, tensor, "act9")
        assert _read_all(storage, [kept], tensor, memory) > 0  # still readable
        assert storage.free_bytes == 0


def test_a_store_whose_file_cannot_grow_is_passed_over(
    open_in: Callable[..., Storage], memory: Memory, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensor = memory(20 * MIB, 64, seed=1)
    with open_in(2) as storage:
        full = _fd_of(storage, 1)

        def grow(fd: int, offset: int, nbytes: int) -> None:
            if fd == full:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            os.posix_fallocate(fd, offset, nbytes)

        monkeypatch.setattr(arena, "posix_fallocate", grow)
        record = _put(storage, tensor)
        assert {place.store for place in record.places} == {0}
        full = -1
        storage.drop(record)
        records = [_put(storage, tensor) for _ in range(4)]
        assert {place.store for record in records for place in record.places} == {0, 1}
        for record in records:
            storage.wait(record.write, what="the test")


def test_all_full_is_said_and_nothing_is_taken(
    open_in: Callable[..., Storage], memory: Memory, monkeypatch: pytest.MonkeyPatch
) -> None:
    def grow(fd: int, offset: int, nbytes: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with open_in(3) as storage:
        monkeypatch.setattr(arena, "posix_fallocate", grow)
        with pytest.raises(StorageFullError, match=r"act: needs .* No space left|act: needs"):
            _put(storage, memory(50 * MIB))
        assert storage.bytes_in_use == 0


def _gated(
    monkeypatch: pytest.MonkeyPatch, module: ModuleType, name: str, call: Callable[..., int | None]
) -> Iterator[tuple[set[int], threading.Event]]:
    """Descriptors for which a call of the system hangs until the event is set."""
    hanging: set[int] = set()
    gate = threading.Event()

    def gated(fd: int, *arguments: Any) -> int | None:  # noqa: ANN401
        if fd in hanging:
            gate.wait(30)
        return call(fd, *arguments)

    monkeypatch.setattr(module, name, gated)
    yield hanging, gate
    gate.set()


@pytest.fixture
def no_answer(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[set[int], threading.Event]]:
    """Files of these descriptors do not grow."""
    yield from _gated(monkeypatch, arena, "posix_fallocate", os.posix_fallocate)


@pytest.fixture
def stuck(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[set[int], threading.Event]]:
    """Nothing is written to files of these descriptors."""
    yield from _gated(monkeypatch, posix_arena, "pwritev", os.pwritev)


def _wait_for_answer(storage: Storage) -> None:
    until_s = time.monotonic() + 10
    while storage.traffic.stores[0].arena.hangs:
        assert time.monotonic() < until_s, "the disk has been let go on"
        time.sleep(0.01)


def test_a_store_that_does_not_answer_is_passed_over(
    open_in: Callable[..., Storage],
    memory: Memory,
    read_back: ReadBack,
    no_answer: tuple[set[int], threading.Event],
) -> None:
    hanging, gate = no_answer
    tensor = memory(20 * MIB, 64, seed=1)
    with open_in(2, deadline_s=1.0) as storage:
        hanging.add(_fd_of(storage, 0))
        records = [_put(storage, tensor) for _ in range(3)]
        assert {place.store for record in records for place in record.places} == {1}
        for record in records:
            storage.wait(record.write, what="the test")
        (fallback,) = storage.stores[0].fallbacks
        assert fallback.endswith("store0 does not answer, and its spill file does not grow")
        assert storage.stores[0].in_use
        gate.set()
        _wait_for_answer(storage)
        again = [_put(storage, tensor) for _ in range(4)]
        assert {place.store for record in again for place in record.places} == {0, 1}
        for record in (*records, *again):
            assert np.array_equal(read_back(storage, record), tensor)
        assert not storage.stores[0].fallbacks


def test_an_only_store_that_does_not_answer_is_an_error(
    open_in: Callable[..., Storage],
    memory: Memory,
    read_back: ReadBack,
    no_answer: tuple[set[int], threading.Event],
) -> None:
    hanging, gate = no_answer
    tensor = memory(20 * MIB, 64, seed=1)
    with open_in(1, deadline_s=0.3) as storage:
        hanging.add(_fd_of(storage, 0))
        for why in ("no answer within 300.00 ms", "still no answer", "still no answer"):
            with pytest.raises(StorageError, match=f"act: the spill file in .* cannot .*: {why}"):
                _put(storage, tensor)
        assert storage.bytes_in_use == 0
        gate.set()
        _wait_for_answer(storage)
        assert np.array_equal(read_back(storage, _put(storage, tensor)), tensor)


def test_a_file_that_a_disk_still_has_is_not_closed(
    open_in: Callable[..., Storage], memory: Memory, no_answer: tuple[set[int], threading.Event]
) -> None:
    """The number would be another file's, which the call that hangs might cut."""
    hanging, gate = no_answer
    storage = open_in(1, deadline_s=0.1)
    hanging.add(fd := _fd_of(storage, 0))
    with pytest.raises(StorageError, match="no answer"):
        _put(storage, memory(MIB))
    storage.close()
    os.fstat(fd)
    gate.set()
    _wait_for_answer(storage)
    storage.traffic.stores[0].arena.close()


def test_a_write_that_is_handed_over_at_the_last_moment_is_no_error(
    open_in: Callable[..., Storage],
    memory: Memory,
    read_back: ReadBack,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It begins to hang after somebody has begun to wait for it."""
    gate, calls = threading.Event(), iter([0.3] * 3)  # as many as there are workers

    def write(fd: int, buffers: list[memoryview], offset: int) -> int:
        if fd == first:
            gate.wait(next(calls, 30))
        return os.pwritev(fd, buffers, offset)

    with open_in(2, deadline_s=1.0) as storage:
        first, other = _fd_of(storage, 0), storage.traffic.stores[1]
        monkeypatch.setattr(posix_arena, "pwritev", write)
        other.why_retired = "or it would take what is queued"
        records = [_put(storage, memory(MIB, 64, seed=n), f"act{n}") for n in range(4)]
        threading.Timer(0.35, setattr, (other, "why_retired", None)).start()
        with ThreadPoolExecutor(4) as waiting:
            list(waiting.map(lambda r: storage.wait(r.write, what="the test"), records))
        assert {place.store for place in records[3].places} == {1}
        assert np.array_equal(read_back(storage, records[3]), memory(MIB, 64, seed=3))
        gate.set()


def test_a_store_that_hangs_is_left_and_taken_back_when_it_moves(
    open_in: Callable[..., Storage],
    memory: Memory,
    read_back: ReadBack,
    stuck: tuple[set[int], threading.Event],
) -> None:
    hanging, gate = stuck
    tensor = memory(64 * MIB, 64, seed=1)
    with open_in(2, deadline_s=1.0) as storage:
        hanging.add(_fd_of(storage, 0))
        records = [_put(storage, tensor) for _ in range(3)]
        for record in records:
            storage.wait(record.write, what="the test")
        assert [info.in_use for info in storage.stores] == [False, True]
        assert "takes longer than" in storage.stores[0].fallbacks[-1]
        for record in records:
            assert np.array_equal(read_back(storage, record), tensor)
            storage.drop(record)
        gate.set()
        until_s = time.monotonic() + 10
        while not storage.stores[0].in_use and time.monotonic() < until_s:
            time.sleep(0.01)
        assert storage.stores[0].in_use
        assert np.array_equal(read_back(storage, _put(storage, tensor)), tensor)


def test_speed_follows_what_was_seen() -> None:
    speed = Speed()
    assert speed.duration_ns(10**9, 0) == pytest.approx(1e9)
    now_ns = _move(speed, 1, 200, 10)
    assert speed.duration_ns(10**9, now_ns) == pytest.approx(1e10, rel=0.1)


def _move(speed: Speed, now_ns: int, times: int, ns_per_byte: int) -> int:
    """When so many chunks have been moved that begin now."""
    for _ in range(times):
        speed.start(now_ns)
        now_ns += 8 * MIB * ns_per_byte
        speed.stop(now_ns)
        speed.add(8 * MIB)
    return now_ns


def test_a_slow_store_is_tried_again_some_time() -> None:
    """And is as slow as it was if it still is, or soon as fast as it is."""
    minute_ns = 60 * 10**9
    speed = Speed()
    now_ns = _move(speed, 1, 200, 100)
    slow_ns = speed.duration_ns(10**9, now_ns)
    assert speed.duration_ns(10**9, now_ns + minute_ns) == pytest.approx(slow_ns / 4)
    assert speed.duration_ns(10**9, now_ns + 60 * minute_ns) == pytest.approx(slow_ns / 16)
    now_ns = _move(speed, now_ns + minute_ns, 1, 100)
    assert speed.duration_ns(10**9, now_ns) == pytest.approx(slow_ns, rel=0.1)
    now_ns = _move(speed, now_ns + minute_ns, 4, 1)
    assert speed.duration_ns(10**9, now_ns) < slow_ns / 4


@pytest.mark.parametrize("number", [0, 1, 4])
def test_a_process_that_may_have_no_more_threads(
    open_in: Callable[..., Storage], monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    start, started = threading.Thread.start, list[threading.Thread]()

    def limited(thread: threading.Thread) -> None:
        if len(started) == number:
            raise RuntimeError("can't start new thread")
        started.append(thread)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", limited)
    with pytest.raises(
        ThreadLimitError, match=r"teraplan-io-\d-\d .* raise the limit of processes"
    ):
        open_in(2)
    for thread in started:
        thread.join(10)
        assert not thread.is_alive()
