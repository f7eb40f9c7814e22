"""The first step under a plan: what planning leaves in the process is no tensor's."""

import subprocess
import sys
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[2]

PROGRAM = """
import torch
torch.set_num_threads(1)
from teraplan.units import MIB
from tests.end_to_end.training import MLP, Run

run = Run({"kernels": "aot_eager", "device_budget": 16 * MIB, "training_state": "stays"})
net = MLP(depth=10, rows=8192)
run.compile(net)
optimizer = torch.optim.AdamW(net.parameters())
for step in range(9):
    loss = net(*net.batch(step))
    loss.backward()
    optimizer.step()
    run.record(loss, net)
    optimizer.zero_grad()
first = next(status for status in run.statuses if status.actual_peak_bytes > 0)
print(first.actual_peak_bytes, first.predicted_peak_bytes)
"""


@pytest.mark.slow
def test_it_takes_what_was_predicted() -> None:
    """In a process that has planned nothing before: 2 MiB of code and objects come with that."""
    command = [sys.executable, "-c", PROGRAM]
    ended = subprocess.run(
        command, cwd=REPO, capture_output=True, text=True, check=False, timeout=120
    )
    assert ended.returncode == 0, ended.stderr
    actual, predicted = map(int, ended.stdout.split())
    assert actual <= 1.04 * predicted
