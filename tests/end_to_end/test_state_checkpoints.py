"""Checkpoints of a training whose state moves: resumed, exchanged with plain PyTorch, bounded."""

import hashlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.end_to_end.checkpointing import HALF, WAYS, Training, load_torch, save_torch
from tests.end_to_end.moving import BUDGET, little_for_state, moving, run_moving, states
from tests.end_to_end.training import Run, assert_same, run

REPO = Path(__file__).resolve().parents[2]

pytest.importorskip("safetensors")


def python(*arguments: str, cwd: Path = REPO) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(REPO)},
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )


def record(this: Run, training: Training, loss: Tensor) -> None:
    this.record(loss, training.net, others=[*states(training.optimizer), torch.get_rng_state()])


def whole(this: Run) -> None:
    """All steps in one process."""
    training = Training(this.options)
    for number in range(2 * HALF):
        loss = training.step(number)
        if number >= HALF:
            record(this, training, loss)


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoints of a process that was killed after half of the steps."""
    directory = tmp_path_factory.mktemp("checkpoints")
    done = python("-m", "tests.end_to_end.checkpointing", str(directory))
    assert done.returncode == -signal.SIGKILL, done.stderr
    return directory


@pytest.fixture(scope="module")
def uninterrupted() -> Run:
    """All steps, in one process with memory for everything."""
    return run(whole, device_budget=100 << 30, training_state="stays")


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("after_a_step", [False, True])
def test_resumed_after_kill(
    way: str,
    after_a_step: bool,
    uninterrupted: Run,
    killed: Path,
    disk: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With another budget and two directories, where nothing moves yet and where all moves."""

    def resumed(this: Run) -> None:
        training = Training(this.options)
        if after_a_step:
            training.step(100)
        WAYS[way][1](training, killed)
        for number in range(HALF, 2 * HALF):
            record(this, training, training.step(number))

    directories = [disk / "a", disk / "b"]
    for directory in directories:
        directory.mkdir()
    storage = [str(directory) for directory in directories]
    budget = BUDGET * 5 // 6
    if after_a_step:  # what is loaded between steps is memory beside the state
        little_for_state(monkeypatch, 0.1)
        budget = 16 << 20
    other = run_moving(resumed, budget, storage=storage)
    assert_same(uninterrupted, other)
    arena = moving().arena
    assert arena.log.traffic.read_bytes > arena.total_bytes, "nothing had to come back"
    labels = {block.label.split()[0] for block in arena.blocks}
    assert labels == {"parameter", "gradient", "exp_avg", "exp_avg_sq"}, "loaded state moves"


PLAIN = """
import hashlib, sys, torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(192, 192) for _ in range(6))

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.square().mean()

saved = torch.load(sys.argv[1])
net = Net()
net.load_state_dict(saved["model"])
optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
optimizer.load_state_dict(saved["optimizer"])
digest = hashlib.sha256()
for p in net.parameters():
    for tensor in (p, optimizer.state[p]["exp_avg"], optimizer.state[p]["exp_avg_sq"]):
        digest.update(tensor.detach().numpy().tobytes())
print(digest.hexdigest())
net(torch.ones(4, 192)).backward()
optimizer.step()
saved |= {"model": net.state_dict(), "optimizer": optimizer.state_dict()}
torch.save(saved, sys.argv[2])
assert "teraplan" not in sys.modules
"""


@pytest.mark.slow
def test_plain_pytorch_loads_it_and_the_reverse(tmp_path: Path) -> None:
    made: list[str] = []
    here, there = tmp_path / "here", tmp_path / "there"
    here.mkdir()
    there.mkdir()

    def saving(this: Run) -> None:
        training = Training(this.options)
        for number in range(HALF):
            training.step(number)
        save_torch(training, here)
        digest = hashlib.sha256()
        for p in training.net.parameters():
            state = training.optimizer.state[p]
            for tensor in (p, state["exp_avg"], state["exp_avg_sq"]):
                digest.update(tensor.detach().numpy().tobytes())
        made.append(digest.hexdigest())

    run_moving(saving)
    done = python("-c", PLAIN, str(here / "torch.pt"), str(there / "torch.pt"), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == made

    def resumed(this: Run) -> None:
        training = Training(this.options)
        load_torch(training, there)
        for number in range(HALF, 2 * HALF):
            record(this, training, training.step(number))

    reference = run(resumed, device_budget=100 << 30, training_state="stays")
    other = run_moving(resumed)
    assert_same(reference, other)


BOUNDED = """
import gc, pathlib, re, sys, threading, torch
import teraplan
from teraplan.runtime.process import process_memory
from tests.end_to_end.training import MLP
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict

path = sys.argv[1]
torch.set_num_threads(1)
net = MLP(width=1024, depth=24, rows=64)
options = {"kernels": "aot_eager", "device_budget": "176MiB", "training_state": "moves"}
options["storage"] = path
net.compile(backend="teraplan", options=options)
optimizer = torch.optim.AdamW(net.parameters())

def step(number):
    torch.autograd.backward(net(*net.batch(number)))
    optimizer.step()
    optimizer.zero_grad()

for number in range(3):
    step(number)
# What an import takes is not what saving takes.
dcp.save({"one": torch.ones(1)}, checkpoint_id=path + "/first", no_dist=True)

def anonymous():  # what is mapped from the checkpoint's own file is nobody's memory
    text = pathlib.Path("/proc/self/status").read_text()
    return int(re.search(r"RssAnon:\\s+(\\d+)", text)[1]) << 10

def measured(what, action):
    gc.collect()
    before = process_memory.resident_bytes(), anonymous()
    process_memory.reset_peak()
    over, most = threading.Event(), [0]
    def watch():
        while not over.wait(0.005):
            most[0] = max(most[0], anonymous())
    watcher = threading.Thread(target=watch)
    watcher.start()
    action()
    over.set()
    watcher.join()
    print(what, process_memory.peak_bytes() - before[0], most[0] - before[1], flush=True)

def saved():
    torch.save({"model": net.state_dict(), "optimizer": optimizer.state_dict()}, path + "/both.pt")

def distributed():
    model, state = get_state_dict(net, optimizer)
    dcp.save({"model": model, "state": state}, checkpoint_id=path + "/dcp", no_dist=True)

def loaded():
    values = torch.load(path + "/both.pt", mmap=True)
    net.load_state_dict(values["model"])
    optimizer.load_state_dict(values["optimizer"])

measured("torch.save", saved)
measured("dcp.save", distributed)
def mapped(what):  # pages of the checkpoint's file that are in memory
    text = pathlib.Path("/proc/self/smaps").read_text()
    resident = re.findall(r"both\\.pt\\n(?:.*\\n)*?Rss:\\s+(\\d+) kB", text)
    assert resident, "small optimizer state is part of it"
    print(what, sum(map(int, resident)) << 10, 0, flush=True)

measured("torch.load", loaded)
mapped("loaded")
step(9)
mapped("stepped")

def built():
    teraplan.materialize(other, options=options, initialize=lambda module: None)
    other.load_state_dict(torch.load(path + "/both.pt", mmap=True)["model"])

saved = torch.load(path + "/both.pt", mmap=True)["model"]
with torch.device("meta"):
    other = MLP(width=1024, depth=24, rows=64)
measured("materialize", built)
assert all(torch.equal(value, saved[name]) for name, value in other.state_dict().items())
del saved, optimizer

net = other
net.compile(backend="teraplan", options=options)
optimizer = torch.optim.AdamW(net.parameters())
optimizer.load_state_dict(torch.load(path + "/both.pt", mmap=True)["optimizer"])
step(0)
mapped("resumed")
"""
MIB = 1 << 20


@pytest.mark.slow
def test_saving_and_loading_take_little_memory(disk: Path) -> None:
    """Of 288 MiB of parameters and optimizer state, with a budget of 176 MiB for a step."""
    done = python("-c", BOUNDED, str(disk))
    assert done.returncode == 0, done.stderr
    words = [line.split() for line in done.stdout.splitlines()]
    resident = {what: int(nbytes) for what, nbytes, _ in words}
    anonymous = {what: int(nbytes) for what, _, nbytes in words}
    assert resident["torch.save"] < 96 * MIB, resident
    assert resident["dcp.save"] < 96 * MIB, resident
    assert anonymous["torch.load"] < 64 * MIB, anonymous
    assert anonymous["materialize"] < 64 * MIB, anonymous
    for what in ("loaded", "stepped", "resumed"):
        assert resident[what] < 2 * MIB, resident
