"""Training states of many small tensors, which move together."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from teraplan.files.plan_file import read_plan
from teraplan.runtime.state import keeper
from teraplan.runtime.state.memory.block import Block
from teraplan.units import KIB
from teraplan.values.step_trace import TensorKind
from tests.end_to_end import moving, updating_early
from tests.end_to_end.moving import adamw, check, model, sgd, training
from tests.end_to_end.training import MLP, assert_same, run

TOGETHER = 2
"""Tensors in a chunk."""


@pytest.fixture(autouse=True)
def _chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of some tensors each, which for a state as small as this would not be done."""
    nbytes = TOGETHER * 4 * moving.WIDTH * moving.WIDTH
    monkeypatch.setattr(keeper, "chunk_nbytes", lambda *_, **__: nbytes)


def blocks_by_kind() -> Counter[TensorKind]:
    return Counter(block.key[0] for block in moving.moving().arena.blocks)


@pytest.mark.parametrize(
    ("make", "num_states", "budget"), [(adamw, 2, moving.BUDGET), (sgd, 1, 9 << 18)]
)
def test_bits(make: moving.Optimizers, num_states: int, budget: int) -> None:
    state = check(training(make), budget=budget)
    found = blocks_by_kind()
    assert found[TensorKind.PARAMETER] == -(-moving.DEPTH // TOGETHER)
    assert found[TensorKind.OPTIMIZER_STATE] == num_states * moving.DEPTH // TOGETHER
    assert state.arena.log.traffic.written_bytes > 0


@pytest.mark.slow
def test_a_replayed_plan_says_what_moves_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the link, or the memory that is free, would have other tensors move together."""
    budget = moving.budget_beside_others(moving.BUDGET)
    first = run(training(adamw), device_budget=budget, training_state="moves", report=str(tmp_path))
    planned = read_plan(tmp_path / "plan.json")
    monkeypatch.setattr(keeper, "chunk_nbytes", lambda *_, **__: 0)
    torch._dynamo.reset()
    replayed = run(training(adamw), plan=str(tmp_path / "plan.json"))
    assert_same(first, replayed)
    assert replayed.statuses[-1].diverged_steps == 0
    assert replayed.statuses[-1].predicted_step_ns == planned.prediction.step_ns
    assert blocks_by_kind()[TensorKind.PARAMETER] == -(-moving.DEPTH // TOGETHER)


@pytest.mark.slow
@pytest.mark.parametrize("set_to_none", [True, False])
def test_gradients_of_several_batches(set_to_none: bool) -> None:
    check(training(adamw, accumulate=3, clip=0.01, set_to_none=set_to_none))


@pytest.mark.slow
def test_updates_at_the_gradients() -> None:
    last = updating_early.compared(updating_early.looping(), moving.BUDGET)
    assert last.updates_in_backward == moving.DEPTH


@pytest.mark.slow
def test_frozen_ones_are_not_with_those_that_are_written() -> None:
    made: list[MLP] = []

    def some_frozen() -> MLP:
        made.append(moving.model())
        for number, parameter in enumerate(made[-1].parameters()):
            parameter.requires_grad_(number % 3 == 0)
        return made[-1]

    state = check(training(sgd, make_model=some_frozen), least=True, budget=1 << 20)
    trained: dict[Block, set[bool]] = {}
    for parameter in made[-1].parameters():
        block = state.arena.block_of(parameter)
        if block is not None:
            trained.setdefault(block, set()).add(parameter.requires_grad)
    assert len(trained) == moving.DEPTH // TOGETHER
    assert sorted(map(len, trained.values())) == [1] * len(trained)


def _thawed(net: MLP, optimizer: torch.optim.Optimizer, step: int) -> None:
    """Between two steps: another one is frozen, and weights are read and written."""
    weights = list(net.parameters())
    weights[step % len(weights)].requires_grad_(step % 2 == 0)
    with torch.no_grad():
        weights[0].mul_(0.5)
        assert torch.isfinite(torch.stack([w.sum() for w in weights])).all()
    for group in optimizer.param_groups:
        group["lr"] *= 0.9


@pytest.mark.slow
def test_what_users_do_between_steps() -> None:
    check(training(adamw, between=_thawed))


class Mixed(nn.Module):
    """Small weights beside large ones, in an order that has both in each layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.wide = nn.ModuleList(nn.Linear(160, 640) for _ in range(3))
        self.narrow = nn.ModuleList(nn.Linear(640, 160) for _ in range(3))
        self.gates = nn.ParameterList(torch.randn(160, 160) / 16 for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for wide, narrow, gate in zip(self.wide, self.narrow, self.gates, strict=True):
            x = x + narrow(torch.tanh(wide(x))) * torch.sigmoid(x @ gate)
        return x.square().mean()

    def batch(self, step: int) -> tuple[Tensor]:
        return (torch.randn(96, 160, generator=torch.Generator().manual_seed(step)),)


@pytest.mark.slow
@pytest.mark.parametrize("nbytes", [256 * KIB, 512 * KIB])
def test_small_ones_beside_large_ones(nbytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keeper, "chunk_nbytes", lambda *_, **__: nbytes)
    make: Callable[[], MLP] = Mixed  # type: ignore[assignment]
    check(training(adamw, make_model=make), budget=6 << 20)
    assert max(block.num_tensors for block in moving.moving().arena.blocks) > 1


@pytest.mark.slow
def test_steps_end_where_all_that_is_trained_is_too_small_to_move() -> None:
    def biases() -> MLP:
        net = model()
        for p in net.parameters():
            p.requires_grad_(p.ndim == 1)
        return net

    state = check(training(sgd, make_model=biases), least=True, budget=1 << 20)
    assert state.last_step.read_bytes > 0
    assert state.arena.timeline.past
