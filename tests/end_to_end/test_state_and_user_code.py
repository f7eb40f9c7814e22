"""What users do in a step with a model whose state moves: gradients, modules, buffers."""

import itertools
import time

import pytest
import torch
from torch import Tensor

from tests.end_to_end.moving import (
    BUDGET,
    DEPTH,
    ROWS,
    STEPS,
    WIDTH,
    adamw,
    check,
    gradients,
    little_for_state,
    looping,
    model,
    moving,
    run_least,
    sgd,
    states,
    training,
    weight,
)
from tests.end_to_end.training import MLP, UNLIMITED, Run, assert_same, run

_UPDATE_S = 0.015
"""What has been touched by then is taken out of memory before the next update touches more."""

# -- updates ---------------------------------------------------------------------------------------


@pytest.mark.slow
def test_an_update_of_the_user_s_own_ends_a_step() -> None:
    """Without an optimizer nothing says so: what a step moves was 0, and nothing came ahead."""

    def program(this: Run) -> None:
        net = MLP(width=4 * WIDTH, depth=DEPTH, rows=ROWS)
        this.compile(net)
        loss = torch.zeros(())
        for step in range(STEPS):
            loss = net(*net.batch(step))
            torch.autograd.backward(loss)
            this.record(loss, others=[weight(net, 0).grad])
            with torch.no_grad():
                for p in net.parameters():
                    assert p.grad is not None
                    p.sub_(p.grad, alpha=0.1)
                    p.grad = None
                    time.sleep(_UPDATE_S)
        this.record(loss, net)

    reference = run(program, device_budget=UNLIMITED, training_state="stays")
    limited = run_least(program, 16 << 20)
    assert_same(reference, limited)
    assert limited.statuses[-1].state_read_bytes > 0
    assert moving().arena.timeline.past


# -- gradients -------------------------------------------------------------------------------------


@pytest.mark.slow
def test_clip_grad_value() -> None:
    def step(net: MLP, optimizer: torch.optim.Optimizer, step: int) -> Tensor:
        loss: Tensor = net(*net.batch(step))
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_value_(net.parameters(), 1e-6)
        optimizer.step()
        return loss

    check(looping(step))


@pytest.mark.slow
def test_clipping_in_a_closure() -> None:
    """The gradients change between the last graph and the first bucket, while they leave."""

    def step(net: MLP, optimizer: torch.optim.Optimizer, step: int) -> Tensor:
        def closure() -> float:
            losses = [net(*net.batch(2 * step + micro)) for micro in range(2)]
            for loss in losses:
                torch.autograd.backward(loss)
            torch.nn.utils.clip_grad_norm_(net.parameters(), 1e-3)
            return float(sum(loss.item() for loss in losses))

        return torch.tensor(optimizer.step(closure))

    check(looping(step, make_optimizer=sgd), budget=9 << 18)


@pytest.mark.slow
def test_gradients_that_a_hook_of_the_user_changes() -> None:
    """Each after it was added to, while the backward goes on and it is about to leave."""

    def halve(p: Tensor) -> None:
        assert p.grad is not None
        p.grad.mul_(0.5)

    def between(net: MLP, _: torch.optim.Optimizer, step: int) -> None:
        if step == 0:
            for p in net.parameters():
                p.register_hook(lambda gradient: gradient * 0.5)  # type: ignore[no-untyped-call]
                p.register_post_accumulate_grad_hook(halve)  # type: ignore[no-untyped-call]

    check(training(sgd, between=between, accumulate=3), budget=9 << 18)


@pytest.mark.slow
def test_an_optimizer_for_each_parameter_that_steps_in_the_backward() -> None:
    def program(this: Run) -> None:
        net = model()
        this.compile(net)
        optimizers = {p: adamw([p]) for p in net.parameters()}

        def update(p: Tensor) -> None:
            optimizers[p].step()  # type: ignore[index]
            optimizers[p].zero_grad()  # type: ignore[index]

        for p in net.parameters():
            p.register_post_accumulate_grad_hook(update)  # type: ignore[no-untyped-call]
        for step in range(STEPS):
            loss = net(*net.batch(step))
            torch.autograd.backward(loss)
            this.record(loss, net, others=[t for o in optimizers.values() for t in states(o)])

    check(program)


@pytest.mark.slow
def test_gradients_taken_and_given_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """`torch.autograd.grad` returns them; the user sums them up and puts them in."""

    def step(net: MLP, optimizer: torch.optim.Optimizer, step: int) -> Tensor:
        parameters = list(net.parameters())
        loss: Tensor = net(*net.batch(step))
        first = torch.autograd.grad(loss, parameters)
        second = torch.autograd.grad(net(*net.batch(100 + step)), parameters)
        for p, a, b in zip(parameters, first, second, strict=True):
            p.grad = a + b
        optimizer.step()
        return loss.detach()

    little_for_state(monkeypatch, 0.1)
    check(looping(step), budget=16 << 20)


@pytest.mark.slow
@pytest.mark.parametrize("fused", [False, True])
def test_grad_scaler(fused: bool) -> None:
    """With scaling up and down, and steps that are left out since a gradient is infinite."""
    scales: list[float] = []

    def program(this: Run) -> None:
        net = model()
        this.compile(net)
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2, fused=fused)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
        for step in range(STEPS):
            loss = net(*net.batch(step))
            torch.autograd.backward(scaler.scale(loss))
            if step == 3:
                gradients(net)[4][0] = torch.inf
            if step % 2:
                scaler.unscale_(optimizer)
                torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            scales.append(scaler.get_scale())
            this.record(loss, net, others=states(optimizer))
            optimizer.zero_grad()

    check(program)
    assert scales[:STEPS] == scales[STEPS:]
    assert max(scales) > 2**10, "it has grown"
    assert any(b < a for a, b in itertools.pairwise(scales)), "it has shrunk"


@pytest.mark.slow
def test_autocast() -> None:
    def step(net: MLP, optimizer: torch.optim.Optimizer, step: int) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss: Tensor = net(*net.batch(step))
        torch.autograd.backward(loss)
        optimizer.step()
        return loss

    check(looping(step))


# -- what models are made of -----------------------------------------------------------------------


class Twice(MLP):
    """Goes through its layers twice: each parameter is used twice in a graph."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in (*self.layers, *self.layers):
            x = torch.tanh(layer(x))
        return x.square().mean()


@pytest.mark.slow
def test_shared_modules() -> None:
    check(training(adamw, make_model=lambda: Twice(width=WIDTH, depth=DEPTH, rows=ROWS)))


class WithBuffers(MLP):
    """A running mean as large as a weight, and one that is read only."""

    mean: Tensor
    scale: Tensor

    def __init__(self) -> None:
        super().__init__(width=WIDTH, depth=DEPTH, rows=ROWS)
        self.register_buffer("mean", torch.zeros(ROWS, WIDTH))
        self.register_buffer("scale", torch.full((WIDTH, WIDTH), 0.1))

    def forward(self, x: Tensor) -> Tensor:
        self.mean.lerp_(x.detach(), 0.1)
        loss: Tensor = super().forward((x - self.mean) @ self.scale)
        return loss


@pytest.mark.slow
def test_buffers() -> None:
    check(training(adamw, make_model=WithBuffers), budget=BUDGET + (1 << 19))
