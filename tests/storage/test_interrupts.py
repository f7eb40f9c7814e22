"""An interrupt (Ctrl-C, a signal whose handler raises) at every line of the storage's own code.

Nothing may be left afterwards: no room in the files, no lock, nothing that is waited for for ever.
"""

import linecache
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

import numpy as np
import pytest
from numpy.typing import NDArray

from teraplan.runtime import storage as storage_package
from teraplan.runtime.storage import Record, Storage
from teraplan.units import MIB

if TYPE_CHECKING:
    from _typeshed import TraceFunction

FOLDER = str(Path(str(storage_package.__file__)).parent)
Bytes = NDArray[np.uint8]
Memory = Callable[..., Bytes]


class _Interrupt:
    """Raises KeyboardInterrupt at the `at`-th line of the storage that this thread runs."""

    def __init__(self, at: int) -> None:
        self._left = at

    @property
    def came(self) -> bool:
        return self._left <= 0

    def __enter__(self) -> "_Interrupt":
        sys.settrace(self._trace)
        return self

    def __exit__(self, *exception: object) -> None:
        sys.settrace(None)

    def _trace(self, frame: FrameType, event: str, argument: object) -> "TraceFunction | None":
        if not frame.f_code.co_filename.startswith(FOLDER):
            return None
        if event in {"call", "line"} and not _lets_none_in(frame):
            self._left -= 1
            if self._left == 0:
                raise KeyboardInterrupt
        return self._trace


def _lets_none_in(frame: FrameType) -> bool:
    """Signals come after calls, not at `try` or before a `with` exits, which are lines, too.

    What is raised in `__del__` Python ignores, and goes on with a trace function that is gone.
    """
    if frame.f_code.co_name == "__del__":
        return True
    line = linecache.getline(frame.f_code.co_filename, frame.f_lineno)
    return line.lstrip().startswith(("with ", "try:"))


def _round_trip(storage: Storage, source: Bytes, landing: Bytes) -> None:
    records: list[Record] = []
    try:
        for label in ("a", "b"):
            records.append(
                storage.put(source.ctypes.data, source.nbytes, owner=source, label=label)
            )
        storage.drop(records[0])
        storage.wait(records[1].write, what="the test")
        back = storage.get(records[1], landing.ctypes.data, owner=landing)
        storage.wait(back, what="the test")
    finally:
        for record in records:
            storage.drop(record)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_stores", "nbytes", "stride", "without_python"),
    [(1, 64 * 1024, 1, False), (1, 9 * MIB, 1, True), (2, 9 * MIB, 7, False)],
)
def test_an_interrupt_anywhere_leaves_nothing_behind(
    disk: Path, memory: Memory, num_stores: int, nbytes: int, stride: int, without_python: bool
) -> None:
    directories = [disk / f"store{number}" for number in range(num_stores)]
    for directory in directories:
        directory.mkdir(exist_ok=True)
    source, landing = memory(nbytes, seed=1), memory(nbytes)
    at = 1
    with Storage.open(directories, deadline_s=20.0, without_python=without_python) as storage:
        while True:
            with _Interrupt(at) as interrupt:
                try:
                    _round_trip(storage, source, landing)
                except KeyboardInterrupt:
                    assert interrupt.came
            _check_nothing_is_left(storage)
            if not interrupt.came:
                break
            at += stride
        assert at > 200, "fewer lines than a round trip has"
        landing[:] = 0
        _round_trip(storage, source, landing)
        assert (landing == source).all()
    assert sys.gettrace() is None


def test_an_interrupt_while_others_have_the_lock_leaves_it_to_them(
    disk: Path, memory: Memory
) -> None:
    source = memory(64 * 1024, seed=1)
    with Storage.open([disk], deadline_s=20.0) as storage:
        lock, was_theirs = storage.traffic.lock, list[bool]()
        waits, may_write = threading.Event(), threading.Event()

        def take_the_lock() -> None:
            waits.wait()
            time.sleep(0.05)
            with lock:
                may_write.set()
                time.sleep(0.05)  # the worker wants it now, too, to say that it has written
                storage.traffic._ends.ring()
                signal.setitimer(signal.ITIMER_REAL, 0.05)
                time.sleep(0.2)
                was_theirs.append(lock.locked())

        def interrupt(number: int, frame: FrameType | None) -> None:
            raise KeyboardInterrupt

        other = threading.Thread(target=take_the_lock)
        other.start()
        handler = signal.signal(signal.SIGALRM, interrupt)
        try:
            record = storage.put(
                *(source.ctypes.data, source.nbytes),
                owner=source,
                label="a",
                after=may_write.wait,
            )
            with pytest.raises(KeyboardInterrupt):
                waits.set()
                storage.wait(record.write, what="the test")
        finally:
            signal.signal(signal.SIGALRM, handler)
            other.join()
        assert was_theirs == [True]
        storage.wait(record.write, what="the test")
        storage.drop(record)
        _check_nothing_is_left(storage)


def _check_nothing_is_left(storage: Storage) -> None:
    assert storage.traffic.lock.acquire(timeout=5), "the lock was left locked"
    storage.traffic.lock.release()
    until_s = time.monotonic() + 5
    while time.monotonic() < until_s and (
        storage.bytes_in_use or any(store.pending_bytes for store in storage.traffic.stores)
    ):
        time.sleep(0.0005)
    assert storage.bytes_in_use == 0
    assert [store.pending_bytes for store in storage.traffic.stores] == [0] * len(
        storage.traffic.stores
    )
