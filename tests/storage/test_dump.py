"""What the engine tells of itself while it works, and on a signal."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from teraplan.runtime.storage import Storage
from teraplan.units import MIB

Bytes = NDArray[np.uint8]
Memory = Callable[..., Bytes]


def test_running_and_queued_work_is_described(disk: Path, memory: Memory) -> None:
    gate, started = threading.Event(), threading.Event()

    def begin() -> None:
        started.set()
        gate.wait(20)

    block = memory(MIB, seed=1)
    with Storage.open([disk]) as storage:
        storage.put(block.ctypes.data, MIB, owner=block, label="act7", after=begin)
        started.wait(20)
        text = storage.describe()
        assert f"store {disk}" in text
        assert "out of act7, 1.00 MiB at offset 0" in text
        assert "last finished operation: none yet" in text
        with storage.traffic.lock:  # as if a signal had come in a locked part of this thread
            assert "act7" in storage.describe()
        gate.set()


PROGRAM = """
import os, signal, sys
import teraplan
from teraplan.runtime.process.dump_signal import dump_on_signal
{before}
dump_on_signal(lambda: "the state of the engine")
os.kill(os.getpid(), signal.SIGUSR1)
print("goes on")
teraplan.dump()
"""


def _run(before: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", PROGRAM.format(before=before)],
        capture_output=True,
        text=True,
        timeout=60,
        env=dict(os.environ),
    )


def test_the_signal_prints_and_the_program_goes_on() -> None:
    done = _run("")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "goes on\n"
    assert "the state of the engine" in done.stderr
    assert "most recent call first" in done.stderr
    assert "teraplan: no session" in done.stderr


def test_a_program_that_uses_the_signal_keeps_it() -> None:
    done = _run("signal.signal(signal.SIGUSR1, lambda *_: print('mine'))")
    assert done.stdout == "mine\ngoes on\n"
    assert "the state of the engine" not in done.stderr
    assert signal.getsignal(signal.SIGUSR1) is not None
