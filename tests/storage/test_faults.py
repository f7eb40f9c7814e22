"""What happens when the disk, the kernel or a library fails. Faults enter at the system calls."""

import errno
import gc
import os
import resource
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from teraplan.errors import IntegrityError, StorageError, StorageFullError
from teraplan.runtime.storage import Record, Storage, arena, posix_arena, store
from teraplan.units import MIB

Bytes = NDArray[np.uint8]
Memory = Callable[..., Bytes]
ReadBack = Callable[[Storage, Record], Bytes]
NBYTES = 17 * MIB


@pytest.fixture
def storage(disk: Path) -> Iterator[Storage]:
    with Storage.open([disk], deadline_s=20.0) as opened:
        yield opened


def _put(storage: Storage, tensor: Bytes, label: str = "act3") -> Record:
    return storage.put(tensor.ctypes.data, tensor.nbytes, owner=tensor, label=label)


class Faulty:
    """A system call that does something else on its `at`-th call (0: on every one)."""

    def __init__(
        self,
        real: Callable[[int, Sequence[memoryview], int], int],
        fault: Callable[[int, Sequence[memoryview], int], int],
        at: int = 0,
    ) -> None:
        self.real, self.fault, self.at = real, fault, at
        self.num_calls = 0
        self._lock = threading.Lock()

    def __call__(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        with self._lock:
            self.num_calls += 1
            is_now = self.at in (0, self.num_calls)
        return (self.fault if is_now else self.real)(fd, buffers, offset)


def _fails_with(code: int) -> Callable[[int, Sequence[memoryview], int], int]:
    def fail(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        raise OSError(code, os.strerror(code))

    return fail


def test_a_failed_write_names_everything_and_shows_in_its_read(
    storage: Storage, memory: Memory, monkeypatch: pytest.MonkeyPatch, disk: Path
) -> None:
    tensor = memory(NBYTES, 64, seed=1)
    monkeypatch.setattr(posix_arena, "pwritev", Faulty(os.pwritev, _fails_with(errno.EIO)))
    record = _put(storage, tensor)
    read = storage.get(record, tensor.ctypes.data, owner=tensor)
    message = (
        rf"act3: write of [\d.]+ [KM]iB at offset \d+ of the spill file in {disk} failed "
        r"\(EIO: Input/output error\)"
    )
    for transfer in (record.write, read):
        with pytest.raises(StorageError, match=message) as caught:
            storage.wait(transfer, what="the test")
        assert caught.value.errno == errno.EIO
    late = storage.get(record, tensor.ctypes.data, owner=tensor)
    with pytest.raises(StorageError, match=message):
        storage.wait(late, what="the test")
    storage.drop(record)
    assert storage.bytes_in_use == 0


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
@pytest.mark.parametrize("num_failures", [1, 100])
def test_what_callers_hold_goes_when_they_return_though_there_was_no_room(
    storage: Storage,
    memory: Memory,
    monkeypatch: pytest.MonkeyPatch,
    code: int,
    num_failures: int,
) -> None:
    """Not when garbage is collected: autograd copies a gradient that somebody else holds, too."""

    class Held:
        pass

    failures = [OSError(code, os.strerror(code)) for _ in range(num_failures)]
    really = arena.Arena.grow

    def grow(one: arena.Arena, size_bytes: int, nbytes: int) -> None:
        if failures:
            raise failures.pop()
        really(one, size_bytes, nbytes)

    def put() -> "weakref.ref[Held]":
        held = Held()
        with suppress(StorageError):
            storage.drop(_put(storage, memory(MIB)))
        return weakref.ref(held)

    monkeypatch.setattr(arena.Arena, "grow", grow)
    gc.collect()
    gc.disable()
    try:
        assert put()() is None
    finally:
        gc.enable()
    assert len(failures) < num_failures


def test_a_disk_that_fills_up_under_a_write_is_full(
    storage: Storage, memory: Memory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(posix_arena, "pwritev", Faulty(os.pwritev, _fails_with(errno.ENOSPC)))
    record = _put(storage, memory(MIB))
    message = r"act3: write .*ENOSPC.*; .* are free on disk; free space there"
    with pytest.raises(StorageFullError, match=message):
        storage.wait(record.write, what="the test")


@pytest.mark.parametrize(
    ("code", "limit", "remedy"),
    [
        (errno.EFBIG, 3 * MIB, "files of this process may have 3.00 MiB: raise that limit"),
        (errno.EFBIG, resource.RLIM_INFINITY, "the file system has no larger files: name more"),
        (errno.EDQUOT, 3 * MIB, "your quota there is used up: delete files, or name"),
    ],
)
def test_what_to_do_where_a_file_cannot_grow(
    storage: Storage,
    memory: Memory,
    monkeypatch: pytest.MonkeyPatch,
    code: int,
    limit: int,
    remedy: str,
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (limit, limit))
    for module, call in ((arena, "posix_fallocate"), (posix_arena, "pwritev")):
        with monkeypatch.context() as patched:
            real = getattr(module, call)
            patched.setattr(module, call, Faulty(real, _fails_with(code)))
            with pytest.raises(StorageFullError, match=remedy):
                storage.wait(_put(storage, memory(MIB)).write, what="the test")


def test_a_file_that_ends_early_is_an_error(storage: Storage, memory: Memory) -> None:
    record = _put(storage, memory(NBYTES, 64, seed=1))
    storage.wait(record.write, what="the test")
    os.ftruncate(storage._opened[0].arena.fd, record.places[0].offset + 9 * MIB)
    landing = memory(NBYTES, record.address_remainder)
    transfer = storage.get(record, landing.ctypes.data, owner=landing)
    with pytest.raises(StorageError, match=r"act3: read .* ended after \d+ of \d+ bytes"):
        storage.wait(transfer, what="the test")


def test_interrupted_and_short_calls_are_continued(
    storage: Storage, memory: Memory, read_back: ReadBack, monkeypatch: pytest.MonkeyPatch
) -> None:
    turn = [0]

    def short(real: Callable[[int, Sequence[memoryview], int], int]) -> Faulty:
        def do(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
            turn[0] += 1
            if turn[0] % 3 == 0:
                raise InterruptedError(errno.EINTR, "Interrupted system call")
            return real(
                fd, [buffers[0][: max(4096, buffers[0].nbytes // 2 // 4096 * 4096)]], offset
            )

        return Faulty(real, do)

    monkeypatch.setattr(posix_arena, "pwritev", short(os.pwritev))
    monkeypatch.setattr(posix_arena, "preadv", short(os.preadv))
    tensor = memory(NBYTES, 64, seed=1)
    assert np.array_equal(read_back(storage, _put(storage, tensor)), tensor)
    assert turn[0] > 20


def test_a_bit_that_flips_on_the_way_back_is_read_again(
    storage: Storage, memory: Memory, read_back: ReadBack, monkeypatch: pytest.MonkeyPatch
) -> None:
    def flip(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        got = os.preadv(fd, buffers, offset)
        buffers[0][1000] ^= 4
        return got

    faulty = Faulty(os.preadv, flip, at=1)
    tensor = memory(NBYTES, 64, seed=1)
    record = _put(storage, tensor)
    storage.wait(record.write, what="the test")
    monkeypatch.setattr(posix_arena, "preadv", faulty)
    assert np.array_equal(read_back(storage, record), tensor)
    faulty.at = 0
    with pytest.raises(IntegrityError, match="act3"):
        read_back(storage, record)


def test_checksums_can_be_switched_off(
    disk: Path, memory: Memory, read_back: ReadBack, monkeypatch: pytest.MonkeyPatch
) -> None:
    def forbidden(*arguments: object) -> int:
        raise AssertionError("nobody asked for a checksum")

    monkeypatch.setattr(arena.Arena, "checksum", forbidden)
    tensor = memory(NBYTES, 64, seed=1)
    with Storage.open([disk], checksum=False) as storage:
        assert np.array_equal(read_back(storage, _put(storage, tensor)), tensor)


@pytest.mark.parametrize("call", ["pwritev", "preadv"])
def test_whichever_call_fails_nothing_hangs_or_leaks(
    disk: Path, memory: Memory, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    tensors = [memory(n * MIB + 100, 64, seed=n) for n in (1, 9, 17)]
    for at in range(1, 50):
        with Storage.open([disk], deadline_s=5.0) as storage:
            faulty = Faulty(getattr(os, call), _fails_with(errno.ENXIO), at=at)
            monkeypatch.setattr(posix_arena, call, faulty)
            records = [_put(storage, tensor) for tensor in tensors]
            transfers = [record.write for record in records]
            landings = [memory(r.nbytes, r.address_remainder) for r in records]
            for record, landing in zip(records, landings, strict=True):
                transfers.append(storage.get(record, landing.ctypes.data, owner=landing))
            num_failed = 0
            for transfer in transfers:
                try:
                    storage.wait(transfer, what="the test")
                except StorageError:
                    num_failed += 1
            assert all(transfer.done and transfer.owner is None for transfer in transfers)
            for record in records:
                storage.drop(record)
            assert storage.bytes_in_use == 0
            monkeypatch.undo()
            if at > faulty.num_calls:
                assert num_failed == 0
                break
            assert num_failed > 0
    else:
        pytest.fail("the number of calls should have been passed")


def test_a_full_disk_is_said_before_anything_is_queued(
    storage: Storage, memory: Memory, read_back: ReadBack, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(fd: int, offset: int, nbytes: int) -> None:
        if offset + nbytes > 20 * MIB:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        os.ftruncate(fd, offset + nbytes)

    monkeypatch.setattr(arena, "posix_fallocate", full)
    first = memory(16 * MIB, 0, seed=1)
    record = _put(storage, first)  # a whole step does not fit, what is needed does
    with pytest.raises(
        StorageFullError,
        match=r"act4: needs 8.00 MiB in .* GiB are free on disk and 0 B in the spill file "
        r"\(No space left on device\); free space there",
    ):
        _put(storage, memory(8 * MIB), "act4")
    assert storage.bytes_in_use == 16 * MIB
    assert np.array_equal(read_back(storage, record), first)
    storage.drop(record)
    _put(storage, memory(8 * MIB), "act4")


def test_a_full_directory_leaves_the_record_to_the_next_one(
    disk: Path, memory: Memory, read_back: ReadBack, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = disk / "other"
    other.mkdir(exist_ok=True)
    with Storage.open([disk, other]) as storage:
        full_fd = storage._opened[0].arena.fd

        def full(fd: int, offset: int, nbytes: int) -> None:
            if fd == full_fd:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            os.posix_fallocate(fd, offset, nbytes)

        monkeypatch.setattr(arena, "posix_fallocate", full)
        for seed in range(4):
            tensor = memory(MIB, 64, seed)
            record = _put(storage, tensor)
            assert record.write.store == str(other)
            assert np.array_equal(read_back(storage, record), tensor)


def test_a_file_system_without_fallocate_works(
    storage: Storage, memory: Memory, read_back: ReadBack, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unsupported(fd: int, offset: int, nbytes: int) -> None:
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))

    monkeypatch.setattr(arena, "posix_fallocate", unsupported)
    tensor = memory(NBYTES, 64, seed=1)
    assert np.array_equal(read_back(storage, _put(storage, tensor)), tensor)


def _limited(program: str, disk: Path) -> subprocess.CompletedProcess[str]:
    """What a program prints in a process of its own, because its limits stay."""
    imports = (
        "import resource, sys, ctypes, pathlib\n"
        "from teraplan.errors import StorageFullError\n"
        "from teraplan.runtime.storage import Storage\n"
    )
    return subprocess.run(
        [sys.executable, "-c", imports + program, str(disk)],
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_the_real_limit_of_a_file_is_a_full_disk(disk: Path) -> None:
    # The kernel's own refusal (EFBIG).
    program = (
        "resource.setrlimit(resource.RLIMIT_FSIZE, (2 << 20, 2 << 20))\n"
        "block = ctypes.create_string_buffer(8 << 20)\n"
        "with Storage.open([pathlib.Path(sys.argv[1])]) as storage:\n"
        "    storage.put(ctypes.addressof(block), 1 << 20, owner=block, label='small')\n"
        "    try:\n"
        "        storage.put(ctypes.addressof(block), 8 << 20, owner=block, label='large')\n"
        "    except StorageFullError as error:\n"
        "        print(error)\n"
    )
    done = _limited(program, disk)
    assert "large: needs 8.00 MiB" in done.stdout, done.stderr
    assert "File too large" in done.stdout


def test_a_limit_within_a_block_is_a_full_disk(disk: Path) -> None:
    """The kernel cuts a direct write there, and calls the rest of it invalid (EINVAL)."""
    program = (
        "block = ctypes.create_string_buffer(4 << 20)\n"
        "def put(label):\n"
        "    record = storage.put(ctypes.addressof(block), 4 << 20, owner=block, label=label)\n"
        "    storage.wait(record.write, what='the test')\n"
        "    return record\n"
        "with Storage.open([pathlib.Path(sys.argv[1])]) as storage:\n"
        "    storage.drop(put('first'))\n"
        "    resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, 1_000_000))\n"
        "    try:\n"
        "        put('second')\n"
        "    except StorageFullError as error:\n"
        "        print(error)\n"
    )
    done = _limited(program, disk)
    assert "second: write of 4.00 MiB" in done.stdout, done.stderr
    assert "raise that limit (ulimit -f)" in done.stdout


def test_an_error_in_after_fails_its_transfer_only(
    storage: Storage, memory: Memory, read_back: ReadBack
) -> None:
    tensor = memory(MIB, 64, seed=1)

    def broken() -> None:
        raise RuntimeError("the stream is gone")

    bad = storage.put(tensor.ctypes.data, MIB, owner=tensor, label="act3", after=broken)
    with pytest.raises(StorageError, match=r"act3: .* RuntimeError\('the stream is gone'\)"):
        storage.wait(bad.write, what="the test")
    assert np.array_equal(read_back(storage, _put(storage, tensor)), tensor)


def test_a_worker_that_dies_is_reported_to_those_who_wait(
    storage: Storage, memory: Memory, monkeypatch: pytest.MonkeyPatch
) -> None:
    def die(*arguments: object) -> None:
        raise MemoryError("a bug in the worker")

    monkeypatch.setattr(store.Store, "count", die)
    first = _put(storage, memory(MIB), "first")
    with pytest.raises(StorageError, match="a storage worker died of MemoryError"):
        storage.wait(first.write, what="site 3")
    with pytest.raises(StorageError, match=r"next: .* takes no I/O: a storage worker died"):
        _put(storage, memory(MIB), "next")


def test_a_record_that_nobody_holds_gives_its_room_back(storage: Storage, memory: Memory) -> None:
    tensor = memory(NBYTES, 64, seed=1)
    record = _put(storage, tensor)
    storage.wait(record.write, what="the test")
    del record
    until_s = time.monotonic() + 5
    while storage.bytes_in_use and time.monotonic() < until_s:
        time.sleep(0.001)
    assert storage.bytes_in_use == 0
    _put(storage, tensor)  # and this one while its write is under way
    while storage.bytes_in_use and time.monotonic() < until_s:
        time.sleep(0.001)
    assert storage.bytes_in_use == 0
