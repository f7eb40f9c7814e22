"""Several losses, optimizers and backward passes over what was saved: the same bits, one plan."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from teraplan.runtime.process import census
from tests.end_to_end.training import (
    MLP,
    UNLIMITED,
    Program,
    Run,
    assert_kept_to_plan,
    assert_same,
    moving,
    run,
    tight,
    unlimited,
)


class _Layers(nn.Module):
    """Does not save its own result."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = F.gelu(layer(x))
        return x


class _Squashed(_Layers):
    """Saves its own result."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(super().forward(x))


def _keeping(
    *,
    keeps: Callable[[int], bool] = lambda _: True,
    second: Callable[[int], bool] = lambda _: True,
    rows: int = 2048,
    steps: int = 8,
) -> Program:
    """Steps whose first backward keeps the graph, for a second one, or for nothing."""

    def program(this: Run) -> None:
        torch.manual_seed(2)
        model = this.compile(_Layers())
        optimizer = torch.optim.AdamW(model.parameters())
        for step in range(steps):
            random = torch.Generator().manual_seed(step)
            out = model(torch.randn(rows, 64, generator=random))
            loss = out.square().mean()
            torch.autograd.backward(loss, retain_graph=keeps(step))
            if second(step):
                torch.autograd.backward(out.abs().mean())
            optimizer.step()
            this.record(loss, model)
            optimizer.zero_grad()

    return program


@pytest.mark.slow
@pytest.mark.parametrize("ending", [_Layers, _Squashed])
def test_two_optimizers_as_in_a_gan(ending: type[_Layers]) -> None:
    """Squashed, what is made is saved by three graphs, between two of which a backward runs."""

    def program(this: Run) -> None:
        torch.manual_seed(2)
        make, judge = this.compile(ending()), this.compile(_Layers())
        make_optimizer = torch.optim.Adam(make.parameters(), lr=1e-3)
        judge_optimizer = torch.optim.Adam(judge.parameters(), lr=1e-3)
        for step in range(10):
            (real,) = MLP().batch(step)
            fake = make(torch.randn_like(real))
            judge_loss = judge(fake.detach()).mean() - judge(real).mean()
            judge_optimizer.zero_grad()
            torch.autograd.backward(judge_loss)
            judge_optimizer.step()
            make_loss = -judge(fake).mean()
            make_optimizer.zero_grad()
            torch.autograd.backward(make_loss)
            make_optimizer.step()
            this.record(judge_loss + make_loss, make, judge)

    reference = unlimited(program)
    assert_same(reference, tight(program, reference, 0.6))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("losses", "kernels"), [(1, "aot_eager"), (2, "aot_eager"), (2, "inductor")]
)
def test_graphs_that_are_kept_after_their_backward(losses: int, kernels: str) -> None:
    """Two losses of one forward, one after the other; or a graph that is kept for nothing."""
    program = _keeping(second=lambda _: losses == 2, steps=9)
    reference = unlimited(program, kernels=kernels)
    limited = moving(program, reference, 0.6, kernels=kernels)
    assert_same(reference, limited)
    assert limited.final.diverged_steps == 0
    assert limited.moved_bytes > 0


@pytest.mark.parametrize("kernels", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_what_two_backwards_need_is_away_between_and_within_them(kernels: str) -> None:
    """It leaves a second time without being written again."""
    program = _keeping(rows=32768)
    reference = unlimited(program, kernels=kernels)
    limited = tight(program, reference, 0.4, kernels=kernels)
    assert_same(reference, limited)
    assert_kept_to_plan(limited)
    assert limited.statuses[-1].phase == "planned"
    before, after = (limited.statuses[step].stores[0] for step in (-3, -1))
    written_bytes = after.written_bytes - before.written_bytes
    assert after.read_bytes - before.read_bytes > 1.3 * written_bytes > 0


@pytest.mark.parametrize("kernels", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_a_graph_is_kept_only_in_some_steps(kernels: str) -> None:
    in_odd_steps = lambda step: step % 2 == 1  # noqa: E731
    program = _keeping(keeps=in_odd_steps, second=in_odd_steps)
    assert_same(
        unlimited(program, kernels=kernels), run(program, device_budget="90%", kernels=kernels)
    )


class _AndHidden(_Layers):
    """Its further results, or what they are views of, are saved for the backward of the first."""

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]
        hidden = super().forward(x)
        last = torch.tanh(self.layers[0](hidden))
        return self.layers[1](last), hidden, last.flatten(), last[1:]


@pytest.mark.parametrize("kernels", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.parametrize("retain", [False, True])
def test_a_graph_that_is_dropped_gives_back_what_it_has_saved(
    kernels: str, *, retain: bool
) -> None:
    """After a backward that has kept it, or with none."""
    nbytes: list[int] = []

    def program(this: Run) -> None:
        model = this.compile(_AndHidden())
        optimizer = torch.optim.AdamW(model.parameters())
        for step in range(8):
            if not retain:
                model(*MLP().batch(step))
            loss = model(*MLP().batch(step))[0].square().mean()
            torch.autograd.backward(loss, retain_graph=retain)
            optimizer.step()
            this.record(loss, model)
            optimizer.zero_grad()
            del loss
            nbytes.append(census.tensor_nbytes("cpu"))

    run(program, device_budget=UNLIMITED, kernels=kernels)
    assert nbytes[-1] <= nbytes[3] + 64 * 4


@pytest.mark.slow
@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_around_compiled_layers(*, reentrant: bool) -> None:
    """What the first forward saves is given up at once, and is not there until the step ends.

    The reentrant kind runs it without gradients: all that saves anything is within the backward.
    """

    def program(this: Run) -> None:
        torch.manual_seed(2)
        models = nn.ModuleList(this.compile(_Layers()) for _ in range(3))
        optimizer = torch.optim.AdamW(models.parameters())
        for step in range(9):
            out = MLP().batch(step)[0].requires_grad_()
            for model in models:
                out = checkpoint(model, out, use_reentrant=reentrant)
            loss = out.square().mean()
            torch.autograd.backward(loss)
            optimizer.step()
            this.record(loss, models)
            optimizer.zero_grad()

    reference = unlimited(program)
    final = reference.final
    assert final.steps == 8, "parts of a step are taken for steps, or several for one"
    assert abs(final.predicted_managed_peak_bytes / final.managed_peak_bytes - 1) < 0.05
    assert_same(reference, tight(program, reference, 0.6))


@pytest.mark.slow
def test_micro_batches_before_the_optimizer_has_state() -> None:
    """What is measured in the first step's micro-batches lacks two thirds of the state."""

    def program(this: Run) -> None:
        torch.manual_seed(2)
        model = this.compile(_Layers())
        optimizer = torch.optim.AdamW(model.parameters())
        for step in range(6):
            loss = torch.zeros(())
            for micro_batch in range(5):
                loss = model(*MLP().batch(5 * step + micro_batch)).square().mean()
                torch.autograd.backward(loss)
            optimizer.step()
            this.record(loss, model)
            optimizer.zero_grad()

    reference = unlimited(program)
    assert reference.final.sites > 100, "a step is all of its micro-batches"
    assert_same(reference, tight(program, reference, 0.6))
