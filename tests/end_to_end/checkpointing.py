"""Training that is saved and resumed; run as a program it saves, and is killed at once.

python -m tests.end_to_end.checkpointing DIRECTORY      what resumes is in test_state_checkpoints
"""

import os
import signal
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.optim.lr_scheduler import CosineAnnealingLR

from tests.end_to_end.training import MLP

WIDTH, DEPTH, ROWS, HALF = 192, 6, 128, 4


class Dropping(MLP):
    """With random numbers in its forward, whose state belongs to a checkpoint."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = nn.functional.dropout(torch.tanh(layer(x)), 0.1)
        return x.square().mean()


class Training:
    """A model, its optimizer and its schedule, the same in every process."""

    def __init__(self, options: Mapping[str, object]) -> None:
        torch.manual_seed(7)
        self.net = Dropping(width=WIDTH, depth=DEPTH, rows=ROWS)
        self.net.compile(backend="teraplan", options=dict(options))
        self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=1e-2)
        self.scheduler = CosineAnnealingLR(self.optimizer, 2 * HALF)

    def step(self, number: int) -> Tensor:
        """One step; returns its loss. Gradients are kept until the next one."""
        self.optimizer.zero_grad()
        loss: Tensor = self.net(*self.net.batch(number))
        torch.autograd.backward(loss)
        self.optimizer.step()
        self.scheduler.step()
        return loss.detach()

    def rest(self) -> dict[str, Any]:
        """What a checkpoint has beside model and optimizer."""
        return {"scheduler": self.scheduler.state_dict(), "random": torch.get_rng_state()}

    def set_rest(self, values: Mapping[str, Any]) -> None:
        self.scheduler.load_state_dict(values["scheduler"])
        torch.set_rng_state(values["random"])


def save_torch(training: Training, directory: Path) -> None:
    net, optimizer = training.net.state_dict(), training.optimizer.state_dict()
    torch.save({"model": net, "optimizer": optimizer, **training.rest()}, directory / "torch.pt")


def load_torch(training: Training, directory: Path) -> None:
    saved = torch.load(directory / "torch.pt")
    training.net.load_state_dict(saved["model"])
    training.optimizer.load_state_dict(saved["optimizer"])
    training.set_rest(saved)


def save_dcp(training: Training, directory: Path) -> None:
    net, optimizer = get_state_dict(training.net, training.optimizer)
    values = {"model": net, "optimizer": optimizer, **training.rest()}
    save(values, checkpoint_id=directory / "dcp", no_dist=True)


def load_dcp(training: Training, directory: Path) -> None:
    net, optimizer = get_state_dict(training.net, training.optimizer)
    values = {"model": net, "optimizer": optimizer, **training.rest()}
    load(values, checkpoint_id=directory / "dcp", no_dist=True)
    set_state_dict(
        training.net, training.optimizer, model_state_dict=net, optim_state_dict=optimizer
    )
    training.set_rest(values)


def save_safetensors(training: Training, directory: Path) -> None:
    """Weights there, and the rest as torch saves it."""
    from safetensors.torch import save_file

    save_file(training.net.state_dict(), directory / "model.safetensors")
    rest = {"optimizer": training.optimizer.state_dict(), **training.rest()}
    torch.save(rest, directory / "rest.pt")


def load_safetensors(training: Training, directory: Path) -> None:
    from safetensors.torch import load_file

    rest = torch.load(directory / "rest.pt", mmap=True)
    training.net.load_state_dict(load_file(directory / "model.safetensors"), assign=True)
    training.optimizer = torch.optim.AdamW(training.net.parameters(), lr=1e-2)
    training.scheduler = CosineAnnealingLR(training.optimizer, 2 * HALF)
    training.optimizer.load_state_dict(rest["optimizer"])
    training.set_rest(rest)


Way = Callable[[Training, Path], None]
WAYS: dict[str, tuple[Way, Way]] = {
    "torch": (save_torch, load_torch),
    "dcp": (save_dcp, load_dcp),
    "safetensors": (save_safetensors, load_safetensors),
}
"""How a training is saved in a directory, and how it is loaded from there."""


def main(directory: Path) -> None:
    """Train for half of the steps under a budget, save in all ways, and be killed."""
    torch.set_num_threads(1)
    training = Training(
        {
            "kernels": "aot_eager",
            "profile_steps": 1,
            "training_state": "moves",
            "device_budget": 3 << 20,
            "storage": str(directory),
        }
    )
    for number in range(HALF):
        training.step(number)
    for saving, _ in WAYS.values():
        saving(training, directory)
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
