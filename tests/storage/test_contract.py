"""What every back end has to do; each test runs once for each that works on this machine."""

import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from teraplan.errors import DeadlineError, IntegrityError, StorageError
from teraplan.runtime.storage import Record, Storage
from teraplan.runtime.storage.workers import WORKERS, Workers
from teraplan.units import MIB
from teraplan.values.run_record import Direction

Bytes = NDArray[np.uint8]
Memory = Callable[..., Bytes]
OpenStorage = Callable[..., Storage]
ReadBack = Callable[[Storage, Record], Bytes]

SIZES = st.one_of(
    st.integers(0, 20_000),
    st.sampled_from([4095, 4096, 4097, 8 * MIB - 1, 8 * MIB, 8 * MIB + 1, 17 * MIB + 77]),
)
TENSORS = st.lists(
    st.tuples(SIZES, st.sampled_from([0, 1, 16, 64, 511, 512, 2048, 4095])), min_size=1, max_size=6
)


@settings(
    max_examples=25,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(tensors=TENSORS, data=st.data())
def test_what_comes_back_is_what_left(
    open_storage: OpenStorage,
    memory: Memory,
    read_back: ReadBack,
    tensors: list[tuple[int, int]],
    data: st.DataObject,
) -> None:
    with open_storage() as storage:
        originals = [memory(size, skew, seed) for seed, (size, skew) in enumerate(tensors)]
        records = [
            storage.put(tensor.ctypes.data, tensor.nbytes, owner=tensor, label=f"t{index}")
            for index, tensor in enumerate(originals)
        ]
        for index in data.draw(st.permutations(range(len(records)))):
            assert np.array_equal(read_back(storage, records[index]), originals[index])
        for record in records:
            storage.drop(record)
        assert storage.bytes_in_use == 0


def test_neighbours_of_the_landing_memory_stay_as_they_are(
    open_storage: OpenStorage, memory: Memory
) -> None:
    original = memory(100_003, 77, seed=1)
    with open_storage() as storage:
        record = storage.put(original.ctypes.data, original.nbytes, owner=original, label="t")
        whole = memory(original.nbytes + 2 * 4096, 77)
        whole[:] = 0xAB
        transfer = storage.get(record, whole.ctypes.data + 4096, owner=whole)
        storage.wait(transfer, what="the test")
    assert np.array_equal(whole[4096:-4096], original)
    assert (whole[:4096] == 0xAB).all()
    assert (whole[-4096:] == 0xAB).all()


def test_transfers_say_what_they_moved_and_when(open_storage: OpenStorage, memory: Memory) -> None:
    original = memory(9 * MIB, 64, seed=1)
    with open_storage() as storage:
        before = time.perf_counter_ns()
        record = storage.put(original.ctypes.data, original.nbytes, owner=original, label="act")
        storage.wait(record.write, what="the test")
        after = time.perf_counter_ns()
        write = record.write
        assert (write.label, write.nbytes, write.direction) == ("act", 9 * MIB, Direction.OUT)
        assert write.done
        assert write.error is None
        assert before <= write.queued_ns <= write.start_ns <= write.end_ns <= after
        (info,) = storage.stores
        assert write.store == str(info.directory)
        assert info.written_bytes >= 9 * MIB - 8192
        assert info.used_bytes == storage.bytes_in_use >= 9 * MIB - 8192
        assert storage.free_bytes > 0


def test_many_threads_put_get_and_drop(
    open_storage: OpenStorage, memory: Memory, read_back: ReadBack
) -> None:
    wrong: list[str] = []

    def work(storage: Storage, number: int) -> None:
        rng = np.random.default_rng(number)
        for turn in range(12):
            original = memory(int(rng.integers(1, 3 * MIB)), int(rng.integers(4096)), seed=turn)
            record = storage.put(
                original.ctypes.data, original.nbytes, owner=original, label=f"{number}.{turn}"
            )
            if not np.array_equal(read_back(storage, record), original):
                wrong.append(f"{number}.{turn}")
            storage.drop(record)

    with open_storage() as storage:
        threads = [threading.Thread(target=work, args=(storage, n)) for n in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert not any(thread.is_alive() for thread in threads)
        assert storage.bytes_in_use == 0
    assert wrong == []


def test_a_read_follows_its_write_that_is_still_queued(
    open_storage: OpenStorage, memory: Memory
) -> None:
    gate = threading.Event()
    original = memory(3 * MIB, 64, seed=3)
    with open_storage() as storage:
        # All workers are busy, so that the write of `record` cannot start.
        busy = [memory(4096) for _ in WORKERS.always]
        for block in busy:
            storage.put(block.ctypes.data, 4096, owner=block, label="busy", after=gate.wait)
        record = storage.put(original.ctypes.data, original.nbytes, owner=original, label="t")
        landing = memory(original.nbytes, record.address_remainder)
        transfer = storage.get(record, landing.ctypes.data, owner=landing)
        assert not transfer.done
        gate.set()
        storage.wait(transfer, what="the test")
        assert record.write.end_ns <= transfer.start_ns
    assert np.array_equal(landing, original)


def test_what_is_waited_for_goes_first(open_storage: OpenStorage, memory: Memory) -> None:
    gate = threading.Event()
    block = memory(4 * MIB, seed=1)
    with open_storage() as storage:
        for _ in WORKERS.always:
            storage.put(block.ctypes.data, 4096, owner=block, label="busy", after=gate.wait)
        records = [
            storage.put(block.ctypes.data, block.nbytes, owner=block, label=f"w{index}")
            for index in range(20)
        ]
        late = records[-1].write

        def open_when_promoted() -> None:
            while not late.urgent:
                time.sleep(0.001)
            gate.set()

        threading.Thread(target=open_when_promoted).start()
        storage.wait(late, what="the test")
        first = late.start_ns
        for record in records:
            storage.wait(record.write, what="the test")
        num_before = sum(record.write.start_ns < first for record in records)
    assert num_before < len(WORKERS.always)


def test_a_helper_moves_what_is_waited_for_and_nothing_else(disk: Path, memory: Memory) -> None:
    gate = threading.Event()
    block = memory(MIB, seed=1)
    workers = Workers(always=(Direction.BACK,), when_urgent=(Direction.OUT,))
    with Storage.open([disk], workers=workers, deadline_s=20.0) as storage:
        busy, queued, awaited = (
            storage.put(block.ctypes.data, MIB, owner=block, label=label, after=after)
            for label, after in (("busy", gate.wait), ("queued", None), ("awaited", None))
        )
        storage.wait(awaited.write, what="the test")
        time.sleep(0.05)
        assert not busy.write.done
        assert not queued.write.start_ns
        gate.set()
        storage.wait(queued.write, what="the test")


def test_the_owner_lives_until_the_write_has_ended_and_no_longer(
    open_storage: OpenStorage, memory: Memory
) -> None:
    gate = threading.Event()
    owner = memory(MIB, 64, seed=1)
    gone = weakref.ref(owner)
    with open_storage() as storage:
        record = storage.put(
            owner.ctypes.data, owner.nbytes, owner=owner, label="t", after=gate.wait
        )
        del owner
        assert gone() is not None
        gate.set()
        storage.wait(record.write, what="the test")
        assert gone() is None


def test_room_of_a_dropped_record_is_reused_only_after_its_write(
    open_storage: OpenStorage, memory: Memory
) -> None:
    gate = threading.Event()
    block = memory(MIB, seed=1)
    with open_storage() as storage:
        record = storage.put(block.ctypes.data, MIB, owner=block, label="t", after=gate.wait)
        storage.drop(record)
        storage.drop(record)
        assert storage.bytes_in_use == MIB
        other = storage.put(block.ctypes.data, MIB, owner=block, label="u")
        assert other.places[0].offset != record.places[0].offset
        gate.set()
        storage.wait(record.write, what="the test")
        storage.wait(other.write, what="the test")
        storage.drop(record)
        assert storage.bytes_in_use == MIB
        storage.drop(other)
        assert storage.bytes_in_use == 0


def test_a_landing_with_another_remainder_is_a_bug_of_the_caller(
    open_storage: OpenStorage, memory: Memory
) -> None:
    block = memory(64_000, 64, seed=1)
    with open_storage() as storage:
        record = storage.put(block.ctypes.data, block.nbytes, owner=block, label="act")
        if record.alignment == 1:
            pytest.skip("this path takes any address")
        landing = memory(64_000, 65)
        with pytest.raises(AssertionError, match="act left address 64 modulo"):
            storage.get(record, landing.ctypes.data, owner=landing)


@pytest.mark.parametrize("bit", [0, 9 * MIB * 8 - 100_000])
def test_a_flipped_bit_on_disk_is_found_and_named(
    open_storage: OpenStorage, memory: Memory, bit: int
) -> None:
    original = memory(9 * MIB, 0, seed=5)
    with open_storage() as storage:
        record = storage.put(original.ctypes.data, original.nbytes, owner=original, label="act3")
        storage.wait(record.write, what="the test")
        _flip(storage, record.places[0].offset * 8 + bit)
        landing = memory(original.nbytes, record.address_remainder)
        transfer = storage.get(record, landing.ctypes.data, owner=landing)
        with pytest.raises(IntegrityError, match=r"act3: .* at offset \d+ .* came back changed"):
            storage.wait(transfer, what="the test")
        assert transfer.error is not None


def _flip(storage: Storage, bit: int) -> None:
    fd = storage._opened[0].arena.fd
    with open(f"/proc/self/fd/{fd}", "r+b", buffering=0) as file:
        file.seek(bit // 8)
        byte = file.read(1)[0]
        file.seek(bit // 8)
        file.write(bytes([byte ^ 1 << bit % 8]))


def test_a_wait_ends_with_its_deadline(open_storage: OpenStorage, memory: Memory) -> None:
    gate = threading.Event()
    block = memory(MIB, seed=1)
    storage = open_storage(deadline_s=1.0)
    with storage:
        running = threading.Event()

        def begin() -> None:
            running.set()
            gate.wait()

        record = storage.put(block.ctypes.data, MIB, owner=block, label="act7", after=begin)
        running.wait(20)
        with pytest.raises(
            DeadlineError,
            match=r"site 12: waited \S+ m?s for the write of act7 \(1.00 MiB\) in .*"
            r"1 chunks running, 0 queued, last finished operation: none yet",
        ):
            storage.wait(record.write, what="site 12")
        gate.set()
        storage.wait(record.write, what="site 12")


def test_close_ends_what_runs_and_fails_what_is_queued(
    open_storage: OpenStorage, memory: Memory
) -> None:
    gate, started = threading.Event(), threading.Barrier(len(WORKERS.always) + 1)

    def begin() -> None:
        started.wait(20)
        gate.wait()

    block = memory(MIB, seed=1)
    storage = open_storage()
    running = [
        storage.put(block.ctypes.data, MIB, owner=block, label="run", after=begin)
        for _ in WORKERS.always
    ]
    started.wait(20)
    queued = storage.put(block.ctypes.data, MIB, owner=block, label="late")
    follower = storage.get(queued, memory(MIB).ctypes.data, owner=None)
    threading.Timer(0.1, gate.set).start()
    storage.close()
    storage.close()
    assert all(record.write.done and record.write.error is None for record in running)
    for transfer in (queued.write, follower):
        with pytest.raises(StorageError, match=r"late: not moved .* the storage was closed"):
            storage.wait(transfer, what="the test")
    with pytest.raises(StorageError, match=r"t: .* takes no I/O: the storage was closed"):
        storage.put(block.ctypes.data, MIB, owner=block, label="t")
    storage.drop(queued)
    assert not [t for t in threading.enumerate() if t.name.startswith("teraplan-io")]


def test_several_directories_share_the_records(
    open_storage: OpenStorage, memory: Memory, read_back: ReadBack, disk: Path
) -> None:
    directories = [disk / "a", disk / "b"]
    for directory in directories:
        directory.mkdir(exist_ok=True)
    originals = [memory(MIB, 64, seed) for seed in range(12)]
    with open_storage(directories) as storage:
        records = [
            storage.put(o.ctypes.data, o.nbytes, owner=o, label=f"t{i}")
            for i, o in enumerate(originals)
        ]
        for record, original in zip(records, originals, strict=True):
            assert np.array_equal(read_back(storage, record), original)
        used = [info.used_bytes for info in storage.stores]
        assert min(used) > 0
        assert sum(used) == storage.bytes_in_use


def test_the_same_step_reuses_the_same_extents(open_storage: OpenStorage, memory: Memory) -> None:
    tensors = [memory((index + 1) * 300_000, 64, seed=index) for index in range(8)]
    with open_storage() as storage:
        steps = []
        for _ in range(3):
            records = [
                storage.put(t.ctypes.data, t.nbytes, owner=t, label=f"t{i}")
                for i, t in enumerate(tensors)
            ]
            for record in reversed(records):
                storage.wait(record.write, what="the test")
                storage.drop(record)
            steps.append([record.places[0].offset for record in records])
        assert steps[0] == steps[1] == steps[2]
