"""What user code writes to tensors that are leaving is kept, whatever calls the state next."""

import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch import nn

from teraplan.runtime.cpu.page_memory import PageMemory
from teraplan.runtime.state.memory.block import Block
from teraplan.runtime.state.memory.materialize import materialize
from teraplan.runtime.state.memory.training_state import TrainingState
from teraplan.runtime.state.updates.optimizer_steps import OptimizerSteps, attach
from teraplan.runtime.storage import Storage, default_directory
from teraplan.runtime.storage.tiers import Tiers
from teraplan.units import MIB


class Trained(NamedTuple):
    """A parameter that moves, and what updates it."""

    state: TrainingState
    steps: OptimizerSteps
    parameter: nn.Parameter
    optimizer: torch.optim.Optimizer

    @property
    def block(self) -> Block:
        """Where it lives."""
        block = self.state.arena.block_of(self.parameter)
        assert block is not None
        return block


@pytest.fixture
def trained() -> Iterator[Trained]:
    """One step has been taken."""
    directory = tempfile.TemporaryDirectory(prefix="teraplan-test-", dir=default_directory())
    with directory as path, Storage.open([Path(path)]) as storage:
        state = TrainingState(PageMemory(Tiers(storage)), 64 * MIB)
        steps = OptimizerSteps(state, lambda nbytes: None)
        parameter = nn.Parameter(torch.ones(MIB))
        state.adopt_parameters([parameter])
        optimizer = torch.optim.AdamW([parameter], lr=0.1)
        parameter.grad = torch.ones(MIB)
        optimizer.step()
        yield Trained(state, steps, parameter, optimizer)
        steps.close()
        state.close()


def load_optimizer(trained: Trained) -> None:
    trained.optimizer.load_state_dict(trained.optimizer.state_dict())


def load_another(trained: Trained) -> None:
    """With its state still to be taken in, so that something else comes into memory."""
    saved = trained.optimizer.state_dict()
    saved["state"] = {0: {k: v.clone() for k, v in saved["state"][0].items()}}
    trained.optimizer.load_state_dict(saved)


def attach_it(trained: Trained) -> None:
    attach(trained.optimizer)


def build_more(trained: Trained) -> None:
    with torch.device("meta"):
        more = nn.Linear(1024, 1024)
    materialize(more, trained.state, None, "cpu")


def give_less(trained: Trained) -> None:
    trained.state.set_limit(8 * MIB)


def follow_no_plan(trained: Trained) -> None:
    trained.state.follow_plan(False)


def tidy(trained: Trained) -> None:
    trained.state.tidy()


def leave_it_alone(trained: Trained) -> None:
    trained.steps.close()


@pytest.mark.parametrize(
    "call",
    [
        load_optimizer,
        load_another,
        attach_it,
        build_more,
        give_less,
        follow_no_plan,
        tidy,
        leave_it_alone,
    ],
)
def test_what_is_written_while_it_leaves_is_kept(
    call: Callable[[Trained], None], trained: Trained
) -> None:
    block = trained.block
    trained.state.arena.send_out(block)
    assert block.leaving and block.record is not None
    while not block.record.done:
        time.sleep(0.001)
    with torch.no_grad():
        trained.parameter.copy_(torch.full((MIB,), 7.0))
    call(trained)
    trained.state.arena.user_may_have_run()  # as every graph tells
    for _ in range(3):
        trained.state.arena.see_out(block)
    assert bool((trained.parameter == 7.0).all())
