"""Saved activations that are computed again: the same bits, and nothing that was not tried."""

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.models import convnet, encoder, gpt
from teraplan.errors import PlanMismatchError, UnsupportedError
from teraplan.passes import recipes
from teraplan.plan import Plan
from teraplan.plan_file import read_plan
from teraplan.runtime.recompute import Remake
from teraplan.runtime.session import Session
from tests.end_to_end.training import (
    Program,
    Run,
    assert_same,
    run,
    sessions,
    tight,
    training,
    unlimited,
)
from tests.fakes.slow_link import plan_with_slow_storage
from tests.passes import random_graphs

GPT = gpt.GPTConfig(num_layers=3)
ENCODER = encoder.EncoderConfig(num_layers=2, width=64, context=32, dropout=0.1, vocab_size=64)
WIDTH = 512
"""Of random programs: their tensors outweigh what measuring memory is off by."""
SLOW = 4_000_000
"""Bytes per second that planning believes storage to carry."""


@pytest.fixture(autouse=True)
def _slow_storage(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    plan_with_slow_storage(monkeypatch, SLOW)
    deterministic = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(deterministic)


def gpt_training(steps: int = 8, **changes: object) -> Program:
    config = dataclasses.replace(GPT, **changes)  # type: ignore[arg-type]
    return training(lambda: gpt.build(config), lambda step: gpt.batch(config, 8, step), steps=steps)


def check(program: Program, fraction: float = 0.7, **options: object) -> Run:
    """The same bits as with unlimited memory, with activations computed again; that run."""
    reference = unlimited(program, recompute="auto", **options)
    limited = tight(program, reference, fraction, recompute="auto", **options)
    assert_same(reference, limited)
    assert limited.final.recomputed > 0
    assert limited.final.recomputed_bytes > 0
    assert limited.final.diverged_steps == 0
    return limited


def plan_of() -> Plan:
    (session,) = sessions()
    assert session.active is not None
    assert session.active.schedule is not None
    return session.active.schedule.plan


def test_gpt() -> None:
    limited = check(gpt_training())
    plan = plan_of()
    names = [plan.trace.tensors[choice.tensor_id].layer for choice in plan.recomputed]
    assert names
    assert all(name.endswith("down") for name in names), "what goes into the second product"
    assert "computed again" in str(limited.final)


def test_never_is_never() -> None:
    program = gpt_training(steps=6)
    reference = unlimited(program)
    limited = tight(program, reference, 0.7)
    assert_same(reference, limited)
    assert limited.final.recomputed == 0
    (session,) = sessions()
    assert session.config.recompute == "never"
    assert session.active is not None
    assert not session.active.recomputes


def test_dropout_is_not_drawn_again() -> None:
    check(gpt_training(dropout=0.1))


@pytest.mark.slow
def test_convnet() -> None:
    config = convnet.ConvNetConfig(num_stages=2, blocks_per_stage=1, image_size=16)
    program = training(
        lambda: convnet.build(config), lambda step: convnet.batch(config, 8, step), steps=8
    )
    reference = unlimited(program, recompute="auto")
    assert_same(reference, tight(program, reference, 0.7, recompute="auto"))


@pytest.mark.slow
def test_gradients_accumulated_over_batches() -> None:
    def program(this: Run) -> None:
        model = this.compile(gpt.build(GPT))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        for step in range(6):
            losses = [model(*gpt.batch(GPT, 8, 2 * step + part)) for part in range(2)]
            loss = torch.stack(losses).sum()
            torch.autograd.backward(loss)
            optimizer.step()
            this.record(loss, model)
            optimizer.zero_grad()

    check(program)


def wrong_bits(program: str, *, fused: bool) -> recipes.CompiledRecipe:
    """A recipe that is off by the last bit of one element."""
    right = recipes.compile_recipe(program, fused=fused)

    def run(values: Sequence[Tensor], result: Tensor) -> None:
        right.run(values, result)
        result.view(torch.int32).flatten()[-1] ^= 1

    return dataclasses.replace(right, run=run)


def test_a_recipe_with_a_wrong_bit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("teraplan.backend.compile_recipe", wrong_bits)
    program = gpt_training(steps=6)
    reference = unlimited(program, recompute="auto")
    limited = tight(program, reference, 0.7, recompute="auto")
    assert_same(reference, limited)
    assert limited.final.recomputed == 0
    (session,) = sessions()
    assert session.active is not None
    assert set(session.active.recomputes.values()) == {None}


def test_a_plan_is_replayed(tmp_path: Path) -> None:
    program = gpt_training(steps=6)
    reference = unlimited(program, recompute="auto")
    limited = tight(program, reference, 0.7, recompute="auto", report=str(tmp_path))
    assert limited.final.recomputed > 0
    path = tmp_path / "plan.json"
    plan = read_plan(path)
    replayed = run(program, plan=str(path), device_budget=plan.budgets.device_bytes)
    assert_same(reference, replayed)
    assert replayed.final.recomputed == limited.final.recomputed
    assert plan_of() == plan


def test_a_replayed_plan_is_tried_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = gpt_training(steps=6)
    reference = unlimited(program)
    tight(program, reference, 0.7, recompute="auto", report=str(tmp_path))
    monkeypatch.setattr("teraplan.backend.compile_recipe", wrong_bits)
    path = tmp_path / "plan.json"
    budget = read_plan(path).budgets.device_bytes
    with pytest.raises(PlanMismatchError, match="not possible with equal bits"):
        run(program, plan=str(path), device_budget=budget)


class Scaled(nn.Module):
    """Its hidden layer is scaled by a small parameter that no product reads."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.up = nn.ModuleList(nn.Linear(256, 256) for _ in range(8))
        self.scale = nn.Parameter(torch.full((256,), 0.5))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.up:
            x = F.gelu(layer(x)) + self.scale.detach()
        return x.square().mean()


def scaled_training(steps: int = 8) -> Program:
    def batch(step: int) -> tuple[Tensor]:
        return (torch.randn(1024, 256, generator=torch.Generator().manual_seed(step)),)

    return training(Scaled, batch, steps=steps)


def changed(_: Remake) -> bool:
    return False


def test_inputs_that_change_before_the_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    """While steps are measured that is noticed, and nothing is computed from them."""
    reference = unlimited(scaled_training(), recompute="auto")
    plain = tight(scaled_training(), reference, 0.7, recompute="auto")
    assert_same(reference, plain)
    assert plain.final.recomputed > 0
    (session,) = sessions()
    assert any(remake_sources(session))
    monkeypatch.setattr(Remake, "intact", property(changed))
    limited = tight(scaled_training(), reference, 0.7, recompute="auto")
    assert_same(reference, limited)
    assert limited.final.recomputed == 0


def remake_sources(session: Session) -> list[int]:
    """Number of parameters that each recipe of the session's graphs takes."""
    slots = [slot for table in session.tables.values() for slot in table.slots]
    recipes_found = [slot.recipe for slot in slots if slot.recipe is not None]
    return [recipe.program.count("[256],[1]") for recipe in recipes_found]


def test_inputs_that_change_under_a_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    reference = unlimited(scaled_training(), recompute="auto")

    def program(this: Run) -> None:
        model = this.compile(Scaled())
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        for step in range(8):
            if step == 7:
                monkeypatch.setattr(Remake, "intact", property(changed))
            random = torch.Generator().manual_seed(step)
            loss = model(torch.randn(1024, 256, generator=random))
            torch.autograd.backward(loss)
            optimizer.step()
            this.record(loss, model)
            optimizer.zero_grad()

    with pytest.raises(UnsupportedError, match="changed between the forward"):
        tight(program, reference, 0.7, recompute="auto")


class Random(nn.Module):
    """A random program of this seed as a model."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.program = random_graphs.random_program(seed)
        self.weights = nn.ParameterList(p.clone() for p in self.program.parameters)

    def forward(self, x: Tensor) -> Tensor:
        return self.program.function(x, *self.weights)


def random_training(seed: int) -> Program:
    def batch(step: int) -> tuple[Tensor]:
        random = torch.Generator().manual_seed(step)
        return (torch.randn(WIDTH, WIDTH, generator=random).requires_grad_(),)

    return training(lambda: Random(seed), batch, steps=6)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(12))
def test_random_graphs(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(random_graphs, "WIDTH", WIDTH)
    program = random_training(seed)
    reference = unlimited(program, recompute="auto")
    assert_same(reference, tight(program, reference, 0.4, recompute="auto"))


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "program",
    [
        gpt_training(),
        gpt_training(dropout=0.1),
        training(
            lambda: encoder.build(ENCODER), lambda step: encoder.batch(ENCODER, 16, step), steps=8
        ),
    ],
    ids=["gpt", "dropout", "encoder"],
)
def test_fused_kernels(program: Program) -> None:
    check(program, kernels="inductor")
