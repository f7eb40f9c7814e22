"""What outlives what: killed, forked and finished processes, descriptors, threads, permissions."""

import contextlib
import os
import signal
import stat
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from teraplan.errors import StorageError
from teraplan.runtime.storage import Record, Storage, arena_file
from teraplan.units import MIB

Bytes = NDArray[np.uint8]
Memory = Callable[..., Bytes]
ReadBack = Callable[[Storage, Record], Bytes]

HOLD = """
    import ctypes, pathlib, sys, time
    from teraplan.runtime.storage import Storage
    storage = Storage.open([pathlib.Path(sys.argv[1])], without_python=True)
    block = ctypes.create_string_buffer(32 << 20)
    record = storage.put(ctypes.addressof(block), 32 << 20, owner=block, label="t")
    storage.wait(record.write, what="the test")
"""


@pytest.fixture(autouse=True, params=["Python", "C++"])
def moved_by(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each test is of threads that move bytes in Python, and of those that do it in C++."""
    without_python = request.param == "C++"
    opening = partial(Storage.open, without_python=without_python)
    monkeypatch.setattr(Storage, "open", opening)


def _run(program: str, directory: Path) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(program), str(directory)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def test_the_file_is_private_and_has_no_name(disk: Path, memory: Memory) -> None:
    before = set(disk.rglob("*"))
    old_mask = os.umask(0)
    try:
        storage = Storage.open([disk])
    finally:
        os.umask(old_mask)
    with storage:
        fd = storage._opened[0].arena.fd
        facts = os.fstat(fd)
        assert stat.S_IMODE(facts.st_mode) == 0o600
        assert facts.st_nlink == 0
        assert not os.get_inheritable(fd)
        tensor = memory(MIB)
        storage.put(tensor.ctypes.data, MIB, owner=tensor, label="t")
        assert set(disk.rglob("*")) == before
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)


def test_a_file_system_without_unnamed_files_gets_a_private_one_for_a_moment(
    disk: Path, memory: Memory, read_back: ReadBack, monkeypatch: pytest.MonkeyPatch
) -> None:
    real_open = os.open
    seen: list[int] = []

    def no_unnamed(path: object, flags: int, mode: int = 0o777) -> int:
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(95, "Operation not supported")
        seen.append(stat.S_IMODE(os.stat(os.path.dirname(str(path))).st_mode))
        assert flags & os.O_EXCL
        assert flags & os.O_NOFOLLOW
        return real_open(str(path), flags, mode)

    monkeypatch.setattr(arena_file, "open_file", no_unnamed)
    before = set(disk.rglob("*"))
    with Storage.open([disk]) as storage:
        assert set(disk.rglob("*")) == before
        assert seen == [0o700]
        assert stat.S_IMODE(os.fstat(storage._opened[0].arena.fd).st_mode) == 0o600
        tensor = memory(MIB, 64, seed=1)
        record = storage.put(tensor.ctypes.data, MIB, owner=tensor, label="t")
        assert np.array_equal(read_back(storage, record), tensor)


def test_what_a_dead_run_left_is_swept_and_nothing_else(disk: Path) -> None:
    stale, fresh = disk / "teraplan-stale", disk / "teraplan-fresh"
    for directory in (stale, fresh):
        directory.mkdir(exist_ok=True)
        (directory / "spill").write_bytes(b"x")
    link = disk / "teraplan-link"
    link.symlink_to(fresh)
    os.utime(stale, (0, 0))
    os.utime(link, (0, 0), follow_symlinks=False)
    arena_file.sweep(disk)
    assert not stale.exists()
    assert link.is_symlink()
    assert (fresh / "spill").read_bytes() == b"x"
    os.utime(fresh, (0, 0))
    link.unlink()
    arena_file.sweep(disk)
    assert not fresh.exists()


def test_a_killed_process_leaves_nothing(disk: Path) -> None:
    before = set(disk.rglob("*"))
    process = _run(HOLD + "    print('ready', flush=True); time.sleep(60)", disk)
    assert process.stdout is not None
    with process, process.stdout:
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGKILL)
        process.wait(10)
    assert set(disk.rglob("*")) == before


@pytest.mark.parametrize("ending", ["", "    raise SystemExit(0)", "    sys.exit(storage.close())"])
def test_a_process_ends_without_close(disk: Path, ending: str) -> None:
    process = _run(HOLD + ending, disk)
    output, _ = process.communicate(timeout=30)
    assert (process.returncode, output) == (0, "")


def test_a_process_ends_with_io_still_queued(disk: Path) -> None:
    program = HOLD + (
        "    records = [storage.put(ctypes.addressof(block), 32 << 20, owner=block, label='t')\n"
        "               for _ in range(20)]\n"
    )
    process = _run(program, disk)
    output, _ = process.communicate(timeout=30)
    assert (process.returncode, output) == (0, "")


def test_a_forked_child_neither_uses_nor_breaks_the_storage(
    disk: Path, memory: Memory, read_back: ReadBack
) -> None:
    tensor = memory(9 * MIB, 64, seed=1)
    with Storage.open([disk]) as storage:
        record = storage.put(tensor.ctypes.data, tensor.nbytes, owner=tensor, label="act")
        assert len(_spill_files()) == 1
        assert _in_forked_child(lambda: _refuses(storage, record, tensor))
        assert np.array_equal(read_back(storage, record), tensor)


def _in_forked_child(check: Callable[[], bool]) -> bool:
    """What `check` says in a forked child; False if it raises or takes 10 seconds."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            signal.alarm(10)  # a dead-lock ends the child, and the test sees it
            code = 0 if check() else 1
        finally:
            os._exit(code)  # whatever happens, the child must not go on as a second pytest
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status) == 0


def _refuses(storage: Storage, record: Record, tensor: Bytes) -> bool:
    num_refused = 0
    for call in (
        lambda: storage.put(tensor.ctypes.data, 5, owner=tensor, label="t"),
        lambda: storage.get(record, tensor.ctypes.data, owner=tensor),
    ):
        try:
            call()
        except StorageError as error:
            num_refused += "forked child" in str(error)
    storage.drop(record)
    storage.close()
    return num_refused == 2 and not _spill_files()


def _spill_files() -> list[str]:
    targets = []
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            targets.append(os.readlink(f"/proc/self/fd/{number}"))
    return [target for target in targets if "teraplan" in target and "(deleted)" in target]


@pytest.mark.slow
def test_a_fork_while_io_runs_does_not_hang_the_child(disk: Path, memory: Memory) -> None:
    tensor = memory(32 * MIB, 64, seed=1)
    with Storage.open([disk]) as storage:
        for _ in range(10):
            records = [
                storage.put(tensor.ctypes.data, tensor.nbytes, owner=tensor, label="act")
                for _ in range(3)
            ]
            first = records[0]
            assert _in_forked_child(partial(_refuses, storage, first, tensor))
            for record in records:
                storage.wait(record.write, what="the test")
                storage.drop(record)


def test_open_and_close_leave_no_descriptor_and_no_thread(disk: Path, memory: Memory) -> None:
    tensor = memory(MIB)
    num_before = len(os.listdir("/proc/self/fd"))
    threads_before = threading.active_count()
    for _ in range(20):
        with Storage.open([disk]) as storage:
            storage.put(tensor.ctypes.data, MIB, owner=tensor, label="t")
    assert len(os.listdir("/proc/self/fd")) == num_before
    assert threading.active_count() == threads_before


def test_dropping_in_a_finalizer_under_the_stores_own_lock_does_not_hang(
    disk: Path, memory: Memory
) -> None:
    tensor = memory(MIB)
    with Storage.open([disk]) as storage:
        record = storage.put(tensor.ctypes.data, MIB, owner=tensor, label="t")
        storage.wait(record.write, what="the test")
        with storage.traffic.lock:  # as if garbage collection ran inside a locked part
            storage.drop(record)
        assert storage.bytes_in_use == 0


@pytest.mark.parametrize("where", ["under the lock", "in a worker"])
def test_garbage_collection_may_close_the_storage_anywhere(
    disk: Path, memory: Memory, where: str
) -> None:
    tensor = memory(MIB)
    storage = Storage.open([disk])
    if where == "in a worker":
        storage.put(tensor.ctypes.data, MIB, owner=tensor, label="t", after=storage.close)
    else:
        with storage.traffic.lock:
            storage.close()
    until = time.monotonic() + 10
    while _storage_threads() and time.monotonic() < until:
        time.sleep(0.01)
    assert not _storage_threads()
    assert not _spill_files()


def _storage_threads() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name.startswith("teraplan-")]
