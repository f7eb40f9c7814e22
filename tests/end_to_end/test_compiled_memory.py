"""What Inductor's code takes, found out before it runs, beside what is measured when it does."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from teraplan.errors import InfeasibleBudgetError
from teraplan.files.trace_file import read_trace
from teraplan.simulation.memory_curve import least_budget
from teraplan.units import MIB
from tests.end_to_end.training import UNLIMITED, Program, Run, run

pytestmark = pytest.mark.slow

STEPS = 8
BEYOND = 1.3
"""At most so much is named: the margins of small nets are large."""


class Normed(nn.Module):
    """Its backward was named 18 % too small by rules: a kernel has two layouts of one gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 48, 1), nn.Conv2d(48, 48, 3, padding=1)
        self.norm, self.last = nn.GroupNorm(8, 48), nn.Conv2d(48, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.second(functional.relu(self.first(x)))
        return self.last(functional.silu(self.norm(y))).square().mean()  # type: ignore[no-any-return]


class Attending(nn.Module):
    """Its queries, keys and values are parts of one saved activation."""

    def __init__(self) -> None:
        super().__init__()
        self.ahead, self.behind = nn.Linear(96, 288), nn.Linear(96, 96)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            parts = self.ahead(x).chunk(3, dim=-1)
            query, key, value = (part.unflatten(-1, (4, -1)).transpose(1, 2) for part in parts)
            weights = functional.softmax(query @ key.transpose(-1, -2), dim=-1)
            x = x + self.behind((weights @ value).transpose(1, 2).flatten(2))
        return x.square().mean()


def images() -> Tensor:
    return torch.randn(16, 3, 48, 48)


def tokens() -> Tensor:
    return torch.randn(16, 96, 96)


def training(make: Callable[[], nn.Module], batch: Callable[[], Tensor]) -> Program:
    def program(this: Run) -> None:
        net = this.compile(make())
        optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
        x = batch()
        for _ in range(STEPS):
            loss = net(x)
            loss.backward()
            optimizer.step()
            this.record(loss, net)
            optimizer.zero_grad()

    return program


@pytest.mark.parametrize(("make", "batch"), [(Normed, images), (Attending, tokens)])
def test_the_least_budget_is_named_before_the_first_step(
    make: Callable[[], nn.Module], batch: Callable[[], Tensor], tmp_path: Path
) -> None:
    options = {"kernels": "inductor", "training_state": "stays"}
    program = training(make, batch)
    run(program, device_budget=UNLIMITED, report=str(tmp_path), **options)
    (path,) = tmp_path.glob("*trace*.json*")
    measured_bytes = least_budget(read_trace(path)).nbytes
    with pytest.raises(InfeasibleBudgetError, match="the graphs have at once") as refused:
        run(program, device_budget=MIB, **options)
    named_bytes = refused.value.least_budget_bytes
    assert measured_bytes <= named_bytes <= BEYOND * measured_bytes
    assert run(program, device_budget=named_bytes, **options).moved_bytes > 0
