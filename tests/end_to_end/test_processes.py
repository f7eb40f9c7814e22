"""What a training process leaves behind when it ends, fails or is killed: nothing."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[2]

PROGRAM = """
import os, pathlib, signal, sys
import torch
torch.set_num_threads(1)
from tests.end_to_end.evicting import everything_leaves
from tests.end_to_end.training import MLP

how, directory = sys.argv[1:]
model = MLP()
options = {"kernels": "aot_eager", "storage": directory, "device_budget": "100GiB"}
model.compile(backend="teraplan", options=options)
with everything_leaves() as left:
    loss = model(*MLP().batch(0))
    assert left, "nothing left the device"
    held = 0
    for entry in pathlib.Path("/proc/self/fd").iterdir():
        if entry.is_symlink() and directory in os.readlink(entry):
            held += entry.stat().st_blocks
    print("held" if held else "nothing on disk", flush=True)
    if how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "raises":
        raise RuntimeError("the user's own")
    if how == "exits":
        sys.exit(3)
    loss.backward()
print("ended", flush=True)
"""

_EXPECTED = {"ends": 0, "raises": 1, "exits": 3, "killed": -signal.SIGKILL}


@pytest.mark.slow
@pytest.mark.parametrize(
    "how",
    [
        "killed",
        "raises",
        pytest.param("ends", marks=pytest.mark.exhaustive),
        pytest.param("exits", marks=pytest.mark.exhaustive),
    ],
)
def test_nothing_is_left_in_the_storage_directory(how: str, disk: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, how, str(disk)],
        cwd=REPO,
        env={**os.environ, "PYTHONPATH": str(REPO)},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == _EXPECTED[how], done.stderr
    assert "held" in done.stdout, "the process had its tensors on this disk"
    assert ("ended" in done.stdout) == (how == "ends")
    assert not list(disk.rglob("*"))
    if how == "raises":
        assert done.stderr.count("Traceback") == 1, "our own end adds no errors"
