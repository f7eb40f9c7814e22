"""Training whose every step has a closure, the first one too, as with Lightning."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import teraplan
from tests.end_to_end.moving import DEPTH, STEPS, Optimizers, adamw, check, model, states
from tests.end_to_end.test_state_optimizers import Lion
from tests.end_to_end.training import Program, Run, assert_same, run, sessions

Seen = list[tuple[str, bool]]


class ClosingLion(Lion):
    """Not torch's: nobody knows that it begins with the closure."""

    def step(self, closure: Callable[[], Tensor] | None = None) -> Tensor:  # type: ignore[override]
        assert closure is not None
        loss = closure()
        super().step()
        return loss


def closing(
    make_optimizer: Optimizers,
    seen: Seen,
    *,
    at_forward: Callable[[int], object] = lambda _: None,
    after_step: Callable[[int], object] = lambda _: None,
) -> Program:
    """`seen`: gets what the user's own hooks and closure see of gradients."""

    def program(this: Run) -> None:
        net = model()
        this.compile(net)
        optimizer = make_optimizer(net.parameters())
        weight = next(net.parameters())
        optimizer.register_step_pre_hook(lambda *_: seen.append(("before", weight.grad is None)))
        optimizer.register_step_post_hook(lambda *_: seen.append(("after", weight.grad is None)))
        for step in range(STEPS):

            def closure(step: int = step) -> Tensor:
                seen.append(("closure", weight.grad is None))
                optimizer.zero_grad()
                loss: Tensor = net(*net.batch(step))
                at_forward(step)
                torch.autograd.backward(loss)
                return loss

            loss: Tensor = optimizer.step(closure)  # type: ignore[arg-type,assignment]
            this.record(loss, net, others=states(optimizer))
            after_step(step)
            optimizer.zero_grad()

    return program


def in_arena(what: str) -> int:
    """Blocks of that name in the arena of a state that moves."""
    found = [s.keeper.state for s in sessions() if s.keeper.state is not None]
    return sum(what in block.label for state in found for block in state.arena.blocks)


def test_the_first_step_makes_its_state_in_buckets() -> None:
    seen: Seen = []
    found: list[int] = []
    check(closing(adamw, seen, after_step=lambda _: found.append(in_arena("exp_avg"))))
    assert found == [0] * STEPS + [2 * DEPTH] * STEPS
    assert seen == [("before", True), ("closure", True), ("after", False)] * 2 * STEPS


@pytest.mark.slow
def test_state_of_an_optimizer_that_may_do_something_before_moves_after_the_first_step() -> None:
    found: list[int] = []
    check(closing(ClosingLion, [], at_forward=lambda _: found.append(in_arena("momentum"))))
    assert found == [0] * STEPS + [0] + [DEPTH] * (STEPS - 1)


@pytest.mark.slow
def test_one_that_calls_it_again_gets_other_results() -> None:
    """As long as the training state stays."""
    calls: Seen = []

    def lbfgs(parameters: object) -> torch.optim.Optimizer:
        return torch.optim.LBFGS(parameters, lr=1e-2, max_iter=4)  # type: ignore[arg-type]

    def left_alone(parameters: object) -> torch.optim.Optimizer:
        return teraplan.detach(lbfgs(parameters))

    assert_same(run(closing(left_alone, calls)), run(closing(lbfgs, calls)))
    half = len(calls) // 2
    assert calls[:half] == calls[half:]
    assert half > 4 * STEPS
