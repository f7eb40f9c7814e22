"""Saved activations that are computed again: the same bits, and nothing that was not tried."""

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.models import encoder, gpt
from teraplan import planners
from teraplan.errors import PlanMismatchError
from teraplan.files.plan_file import read_plan
from teraplan.passes import recipes
from teraplan.runtime.session import case, feedback
from teraplan.runtime.session.calibration import Calibration
from teraplan.values.plan import Plan
from tests.end_to_end.moving import adamw, budget_beside_others, moving, run_moving, states
from tests.end_to_end.training import (
    UNLIMITED,
    Program,
    Run,
    assert_same,
    run,
    sessions,
    tight,
    training,
    unlimited,
)
from tests.fakes.slow_link import link_of, plan_with_storage
from tests.passes import random_graphs

GPT = gpt.GPTConfig(num_layers=3)
ENCODER = encoder.EncoderConfig(num_layers=2, width=64, context=32, dropout=0.1, vocab_size=64)
WIDTH = 512
"""Of random programs: their tensors outweigh what measuring memory is off by."""
SLOW = 4_000_000
"""Bytes per second that planning believes storage to carry."""


@pytest.fixture(scope="module", autouse=True)
def _deterministic() -> Iterator[None]:
    deterministic = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(deterministic)


@pytest.fixture(autouse=True)
def _first_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    """Storage seems slow, and no plan follows on the first because of what it really is."""
    plan_with_storage(monkeypatch, link_of(SLOW))
    monkeypatch.setattr(feedback, "_MAX_CORRECTIONS", 0)
    monkeypatch.setattr(feedback, "_COMPARED_AFTER", ())


def gpt_training(**changes: object) -> Program:
    config = dataclasses.replace(GPT, **changes)  # type: ignore[arg-type]
    return training(lambda: gpt.build(config), lambda step: gpt.batch(config, 8, step), steps=9)


@pytest.fixture(scope="module")
def reference(_deterministic: None) -> Run:
    """The small GPT's training with unlimited memory."""
    torch.set_num_threads(1)
    return unlimited(gpt_training())


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


@pytest.mark.slow
def test_gpt(reference: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    limited = tight(gpt_training(), reference, 0.7, recompute="auto")
    assert_same(reference, limited)
    assert limited.final.recomputed_bytes > 0
    plan = plan_of()
    names = [plan.trace.tensors[choice.tensor_id].layer for choice in plan.recomputed]
    assert len(names) == limited.final.recomputed > 0
    assert all(name.endswith("down") for name in names), "what goes into the second product"
    assert "computed again" in str(limited.final)
    (session,) = sessions()
    assert session.active is not None
    monkeypatch.setattr(planners, "with_recomputed", None)
    corrected = session.plans.make(session.active, like=plan)
    assert corrected.recomputed == plan.recomputed, "without a search"


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("kernels", "update"),
    [
        ("aot_eager", "step"),
        pytest.param("aot_eager", "gradient", marks=pytest.mark.exhaustive),
        pytest.param("inductor", "step", marks=pytest.mark.exhaustive),
    ],
)
def test_beside_a_training_state_that_moves(kernels: str, update: str) -> None:
    """Activations are computed again, and parameters, gradients and optimizer state move."""

    def program(this: Run) -> None:
        model = this.compile(gpt.build(GPT))
        optimizer = adamw(model.parameters())
        for step in range(10):
            loss = model(*gpt.batch(GPT, 8, step))
            torch.autograd.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            this.record(loss, model, others=states(optimizer))

    reference = run(program, device_budget=UNLIMITED, kernels=kernels)
    whole = reference.final.unlimited_peak_bytes - budget_beside_others(0)
    limited = run_moving(program, whole // 2, kernels=kernels, update=update, recompute="auto")
    assert_same(reference, limited)
    assert limited.final.recomputed_bytes > 0
    assert moving().arena.log.traffic.read_bytes > 0
    assert limited.final.diverged_steps == 0


@pytest.mark.slow
def test_never_is_never(reference: Run) -> None:
    limited = tight(gpt_training(), reference, 0.7, recompute="never")
    assert_same(reference, limited)
    assert limited.final.recomputed == 0
    (session,) = sessions()
    assert session.config.recompute == "never"
    assert session.active is not None
    assert not session.active.recomputes


def slowed_down(
    known: Calibration, plan: Plan, *_: object, may_slow_down: bool
) -> Calibration | None:
    """As if steps under the first plan took twice as long because of what they move."""
    if known != Calibration() or not may_slow_down:
        return None
    twice_ns = plan.trace.duration_ns / plan.prediction.moved_bytes
    return Calibration(slowdown=2.0, contention_ns_per_byte=twice_ns)


@pytest.mark.slow
def test_where_moving_slows_the_computation_down(
    reference: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next plan moves less, and expects to be slowed down less."""
    plan_with_storage(monkeypatch, link_of(1 << 40))
    monkeypatch.setattr(feedback, "_COMPARED_AFTER", (2,))
    monkeypatch.setattr(feedback, "_SLOWER", 100)
    monkeypatch.setattr(case, "calibrated", slowed_down)
    # Each recipe is timed in every measured step: memory touched for the first time makes one slow.
    limited = tight(gpt_training(), reference, 0.7, profile_steps=3)
    assert_same(reference, limited)
    assert limited.final.plans == 2
    assert limited.final.recomputed > 0
    assert 1.0 < limited.final.slowdown < 2.0


def no_compiler(program: str, *, fused: bool) -> recipes.CompiledRecipe:
    raise RuntimeError(f"{len(program)} characters, fused: {fused}")


@pytest.mark.slow
def test_recipes_that_cannot_be_compiled(reference: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("teraplan.backend.compile_recipe", no_compiler)
    limited = tight(gpt_training(), reference, 0.7)
    assert_same(reference, limited)
    assert limited.final.recomputed == 0
    assert sum(limited.final.bytes_out.values()) > 0


@pytest.mark.slow
def test_gradients_accumulated_over_batches() -> None:
    def program(this: Run) -> None:
        config = dataclasses.replace(GPT, num_layers=1)
        model = this.compile(gpt.build(config))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        for step in range(6):
            losses = [model(*gpt.batch(config, 8, 2 * step + part)) for part in range(2)]
            loss = torch.stack(losses).sum()
            torch.autograd.backward(loss)
            optimizer.step()
            this.record(loss, model)
            optimizer.zero_grad()

    check(program)


def wrong_bits(program: str, *, fused: bool) -> recipes.CompiledRecipe:
    """A recipe that is off by the last bit of one element, from its second use on."""
    right = recipes.compile_recipe(program, fused=fused)
    uses = 0

    def run(values: Sequence[Tensor], result: Tensor) -> None:
        nonlocal uses
        right.run(values, result)
        uses += 1
        if uses == 1:
            return
        result.view(torch.int32).flatten()[-1] ^= 1

    return dataclasses.replace(right, run=run)


@pytest.mark.slow
def test_a_recipe_with_a_wrong_bit_is_refused(
    reference: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("teraplan.backend.compile_recipe", wrong_bits)
    limited = tight(gpt_training(), reference, 0.7, recompute="auto")
    assert_same(reference, limited)
    assert limited.final.recomputed == 0
    (session,) = sessions()
    assert session.active is not None
    assert set(session.active.recomputes.values()) == {None}


def no_run(program: str, *, fused: bool) -> recipes.CompiledRecipe:
    """A recipe whose generated code refuses its inputs."""

    def run(values: Sequence[Tensor], result: Tensor) -> None:
        raise AssertionError(f"{len(values)} inputs of other strides")

    return dataclasses.replace(recipes.compile_recipe(program, fused=fused), run=run)


@pytest.mark.slow
def test_recipes_that_cannot_be_run(reference: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("teraplan.backend.compile_recipe", no_run)
    limited = tight(gpt_training(), reference, 0.7, recompute="auto")
    assert_same(reference, limited)
    assert limited.final.recomputed == 0


@pytest.mark.slow
def test_a_replayed_plan_is_tried_first(
    reference: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program, path = gpt_training(), tmp_path / "plan.json"
    limited = tight(program, reference, 0.7, recompute="auto", report=str(tmp_path))
    assert limited.final.recomputed > 0
    plan = read_plan(path)
    options = {"plan": str(path), "device_budget": plan.budgets.device_bytes}
    replayed = run(program, **options)
    assert_same(reference, replayed)
    assert replayed.final.recomputed == limited.final.recomputed
    assert plan_of() == plan
    monkeypatch.setattr("teraplan.backend.compile_recipe", wrong_bits)
    with pytest.raises(PlanMismatchError, match="not possible with equal bits"):
        run(program, **options)


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


def parameters_of_recipes() -> list[int]:
    """Number of parameters that each recipe takes. Keeps no session, and so no plan, alive."""
    tables = [table for session in sessions() for table in session.tables.values()]
    slots = [slot for table in tables for slot in table.slots]
    return [slot.recipe.program.count("[256],[1]") for slot in slots if slot.recipe is not None]


@pytest.mark.slow
def test_small_inputs_may_change() -> None:
    """Unseen by autograd, between forward and backward: what is computed again is as it was."""

    def program(this: Run) -> None:
        net = Scaled()
        model = this.compile(net)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        for step in range(9):
            random = torch.Generator().manual_seed(step)
            loss = model(torch.randn(1024, 256, generator=random))
            net.scale.data.mul_(1.5)
            torch.autograd.backward(loss)
            optimizer.step()
            this.record(loss, model)
            optimizer.zero_grad()

    reference = unlimited(program)
    limited = tight(program, reference, 0.7)
    assert_same(reference, limited)
    assert limited.final.recomputed > 0
    assert any(parameters_of_recipes())


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

    return training(lambda: Random(seed), batch, steps=9)


FEW, MANY = pytest.mark.slow, pytest.mark.exhaustive


@pytest.mark.parametrize(
    "seed", [pytest.param(n, marks=FEW if n in (1, 2) else MANY) for n in range(12)]
)
def test_random_graphs(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(random_graphs, "WIDTH", WIDTH)
    program = random_training(seed)
    reference = unlimited(program, recompute="auto")
    assert_same(reference, tight(program, reference, 0.4, recompute="auto"))


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_fused_kernels() -> None:
    check(gpt_training(num_layers=1, dropout=0.1), kernels="inductor")


@pytest.mark.exhaustive
def test_fused_kernels_of_an_encoder() -> None:
    check(
        training(
            lambda: encoder.build(ENCODER), lambda step: encoder.batch(ENCODER, 16, step), steps=6
        ),
        kernels="inductor",
    )


class ChannelsAndLayers(nn.Module):
    """Inductor has the statistics of the norms in another order than they were traced in."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norms = nn.Conv2d(3, 32, 4, 4), nn.ModuleList([nn.LayerNorm(32)] * 2)
        self.depthwise = nn.Conv2d(32, 32, 7, padding=3, groups=32)
        self.up, self.down = nn.Linear(32, 128), nn.Linear(128, 32)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norms[0](self.stem(x).permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        rows = self.norms[1](self.depthwise(x).permute(0, 2, 3, 1))
        rows = self.down(nn.functional.gelu(self.up(rows)))
        result: Tensor = (x + rows.permute(0, 3, 1, 2)).square().mean()
        return result


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_fused_kernels_of_convolutions_between_layer_norms() -> None:
    def batch(step: int) -> tuple[Tensor]:
        return (torch.randn(16, 3, 64, 64, generator=torch.Generator().manual_seed(step)),)

    check(training(ChannelsAndLayers, batch, steps=9), kernels="inductor")
