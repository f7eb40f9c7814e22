"""What needs gradients that are used up: updates at the step, or errors that name it."""

import copy
from collections.abc import Iterable

import pytest
import torch
from torch import Tensor

from teraplan.errors import FallbackRefusedError, GradientGoneError, UnsupportedError
from tests.end_to_end.costs import by_cost
from tests.end_to_end.moving import (
    DEPTH,
    ROWS,
    WIDTH,
    adamw,
    gradients,
    model,
    run_moving,
    sgd,
    states,
    weight,
)
from tests.end_to_end.test_state_optimizers import Lion, Noisy
from tests.end_to_end.training import MLP, Run
from tests.end_to_end.updating_early import (
    BUDGET,
    SHORT,
    STEPS,
    WEIGHTS,
    Step,
    Told,
    accumulating,
    backward,
    changing,
    clamping,
    clipping,
    compared,
    disturbing,
    dropping,
    evaluating,
    keeping,
    looping,
    plain,
    refusals,
    scaling_from,
    scheduling,
    with_arguments,
)


@changing
def clipping_nothing(net: MLP, optimizer: torch.optim.Optimizer, step: int) -> None:
    torch.nn.utils.clip_grad_norm_(net.parameters(), 1e9)


@changing
def damping(net: MLP, optimizer: torch.optim.Optimizer, step: int) -> None:
    for state in optimizer.state.values():
        state["exp_avg"].data.mul_(0.5)


@changing
def forgetting(net: MLP, optimizer: torch.optim.Optimizer, step: int) -> None:
    optimizer.state.clear()


@changing
def disturbing_data(net: MLP, optimizer: torch.optim.Optimizer, step: int) -> None:
    weight(net, 0).data.mul_(0.9)


USED = "graphs use parameters between the backward and the optimizer's step (several backwards"
ADDED = "gradients are added to others"
AT_STEP: dict[str, tuple[Step, str]] = {
    "clip_grad_norm_": (clipping, "gradients are changed between"),
    "clamp of data": (clamping, "gradients are changed between"),
    "accumulation": (accumulating, USED),
    "set_to_none=False": (keeping, ADDED),
    "learning rate": (scheduling, "param_groups, such as the learning rate, are changed"),
    "GradScaler": (scaling_from(8.0), "a GradScaler is used"),
    "evaluation": (evaluating, USED),
    "arguments": (with_arguments, "is given arguments"),
    "dropped": (dropping, USED),
    "parameters": (disturbing, "parameters are changed between"),
    "clipping that changes nothing": (clipping_nothing, "gradients are changed between"),
    "a scale of 1": (scaling_from(1.0), "a GradScaler is used"),
    "optimizer state": (damping, "optimizer state is changed between"),
}
QUICK_AT_STEP = ("clip_grad_norm_",)
RARE_AT_STEP = ("clamp of data", "clipping that changes nothing", "a scale of 1", "dropped")


@pytest.mark.slow
@pytest.mark.parametrize("name", by_cost(AT_STEP, quick=QUICK_AT_STEP, rare=RARE_AT_STEP))
def test_what_needs_gradients_updates_at_the_step_and_says_so(name: str) -> None:
    step_of, reason = AT_STEP[name]
    make_optimizer = Told if name == "arguments" else adamw
    last = compared(looping(step_of, make_optimizer, steps=SHORT), 3 << 20)
    assert last.updates_in_backward == 0
    assert last.updates_in_step > WEIGHTS
    (refusal,) = refusals(last)
    assert reason in refusal


@pytest.mark.slow
def test_one_that_draws_random_numbers_updates_at_the_step() -> None:
    last = compared(looping(make_optimizer=Noisy, steps=SHORT), 2 << 20)
    assert last.updates_in_backward == 0
    assert "it draws random numbers" in refusals(last)[0]


@pytest.mark.slow
def test_a_parameter_of_two_optimizers_is_updated_at_the_steps() -> None:
    def program(this: Run) -> None:
        net = model()
        this.compile(net)
        first, second = sgd(net.parameters()), sgd(net.layers[:1].parameters())
        for step in range(SHORT):
            loss = backward(net, step)
            first.step()
            second.step()
            first.zero_grad()
            this.record(loss, net)

    last = compared(program, 2 << 20)
    assert last.updates_in_backward == 0
    assert len(refusals(last)) == 1
    assert "another optimizer has some of its parameters" in refusals(last)[0]


def test_strict_refuses_to_update_at_the_step() -> None:
    with pytest.raises(FallbackRefusedError, match=r"SGD updates all .* gradients are changed"):
        run_moving(looping(clipping, sgd, steps=SHORT), BUDGET, update="gradient", strict=True)


# -- what comes too late to update at the step -----------------------------------------------


def reading(net: MLP, optimizer: torch.optim.Optimizer, step: int) -> Tensor:
    loss = backward(net, step)
    return loss + torch.stack([g.norm() for g in gradients(net)]).sum()


def clipping_values(net: MLP, optimizer: torch.optim.Optimizer, step: int) -> Tensor:
    loss = backward(net, step)
    torch.nn.utils.clip_grad_value_(net.parameters(), 1e-3)
    return loss


def dropping_then_stepping(net: MLP, optimizer: torch.optim.Optimizer, step: int) -> Tensor:
    loss = backward(net, step)
    optimizer.zero_grad()
    optimizer.step()
    return loss


def skipping(net: MLP, optimizer: torch.optim.Optimizer, step: int) -> Tensor:
    backward(net, step)
    optimizer.zero_grad()
    return plain(net, optimizer, step)


def stepping_twice(net: MLP, optimizer: torch.optim.Optimizer, step: int) -> Tensor:
    loss = backward(net, step)
    optimizer.step()
    optimizer.step()
    return loss


def never_zeroing(net: MLP, optimizer: torch.optim.Optimizer, step: int) -> Tensor:
    backward(net, step)
    optimizer.step()
    return backward(net, step)


def with_another(net: MLP, optimizer: torch.optim.Optimizer, step: int) -> Tensor:
    loss = backward(net, step)
    optimizer.step()
    sgd(net.parameters()).step()
    return loss


class Late(Noisy):
    """Draws random numbers from its fourth step on."""

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        super().__init__(parameters)
        self.param_groups[0]["steps"] = 0

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        self.param_groups[0]["steps"] += 1
        late = self.param_groups[0]["steps"] > 3
        super().step() if late else Lion.step(self)


FIRST = r"parameter \(layers\.0\.weight"
TOO_LATE: dict[str, tuple[Step, str]] = {
    "reading": (
        reading,
        rf"gradient of a {FIRST}, 192x192\) is needed \(linalg_vector_norm",
    ),
    "clip_grad_norm_": (clipping, "is needed .* load a checkpoint"),
    "clip_grad_value_": (clipping_values, r"is needed \(clamp_\)"),
    "clamp of data": (clamping, r"is needed \(clamp_\)"),
    "accumulation": (
        accumulating,
        rf"a {FIRST}, .* has been updated .* a graph uses it",
    ),
    "evaluation": (evaluating, "parameter .* has been updated .* a graph uses it between"),
    "another optimizer": (with_another, r"is needed \(another step\)"),
    "zero_grad without None": (keeping, "call zero_grad"),
    "learning rate": (scheduling, "param_groups, such as the learning rate, have changed"),
    "GradScaler": (scaling_from(8.0), "is needed"),
    "arguments": (with_arguments, "is given arguments"),
    "two steps": (stepping_twice, r"is needed \(another step\)"),
    "dropped before the step": (dropping_then_stepping, "was dropped or replaced between"),
    "left out": (skipping, "has been updated .* or its step left out, load a checkpoint"),
    "parameters": (disturbing, r"a parameter \(layers\.\d\.weight, 192x192\) was changed between"),
    "parameters through .data": (disturbing_data, "a parameter .* was changed between"),
    "optimizer state": (damping, "the optimizer state of a parameter .* was changed between"),
    "optimizer state dropped": (forgetting, "the optimizer state of a parameter .* was changed"),
    "never zeroed": (never_zeroing, r"is needed \(add\w*\)"),
    "random numbers": (plain, "Late does not update each parameter by itself: it draws random"),
}


RARE_TOO_LATE = (
    *("clip_grad_value_", "clamp of data", "another optimizer", "zero_grad without None"),
    *("arguments", "parameters through .data", "optimizer state dropped", "never zeroed"),
)
"""By the same route as another of them."""


@pytest.mark.parametrize("name", by_cost(TOO_LATE, rare=RARE_TOO_LATE))
def test_what_begins_later_raises(name: str) -> None:
    step_of, message = TOO_LATE[name]
    later: list[int] = []
    make_optimizer = {"arguments": Told, "random numbers": Late}.get(name, adamw)

    def begins_later(net: MLP, optimizer: torch.optim.Optimizer, step: int) -> Tensor:
        if step < 3:
            return plain(net, optimizer, step)
        later.append(step)
        if step == 4:
            raise AssertionError("nothing was raised")
        return step_of(net, optimizer, step)

    error = UnsupportedError if name == "random numbers" else GradientGoneError
    with pytest.raises(error, match=message):
        run_moving(looping(begins_later, make_optimizer), BUDGET, update="gradient")
    assert later == [3]


def test_printing_and_copying_a_gradient_that_is_gone() -> None:
    shown: list[str] = []

    def step_of(net: MLP, optimizer: torch.optim.Optimizer, step: int) -> Tensor:
        loss = backward(net, step)
        optimizer.step()
        if step == 2:
            gradient = weight(net, 1).grad
            assert gradient is not None
            assert gradient.shape == (WIDTH, WIDTH)
            shown.append(repr(gradient))
            for use in (gradient.clone, gradient.data_ptr, gradient.numpy, gradient.tolist):
                with pytest.raises(GradientGoneError, match="is needed"):
                    use()
        optimizer.zero_grad()
        return loss

    run_moving(looping(step_of, steps=3), BUDGET, update="gradient")
    assert shown == ["TakenGradient(192x192, used up by its parameter's update)"]


class Failing(MLP):
    """Its backward fails after the updates of the last layers, when it is told to."""

    fails = False

    def __init__(self) -> None:
        super().__init__(width=WIDTH, depth=DEPTH, rows=ROWS)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers[:3]:
            x = torch.tanh(layer(x))
        torch._dynamo.graph_break()
        if self.fails and x.requires_grad:
            x.register_hook(self.fail)  # type: ignore[no-untyped-call]
        for layer in self.layers[3:]:
            x = torch.tanh(layer(x))
        return x.square().mean()

    def fail(self, _: Tensor) -> None:
        raise ZeroDivisionError


@pytest.mark.slow
def test_a_backward_that_fails_has_updated_some_and_a_checkpoint_helps() -> None:
    def program(this: Run) -> None:
        net = Failing()
        this.compile(net)
        optimizer = adamw(net.parameters())
        saved: list[object] = []
        for step in range(STEPS):
            if step == 5:
                net.fails = True
                with pytest.raises(ZeroDivisionError):
                    backward(net, step)
                net.fails = False
                optimizer.zero_grad()
                with pytest.raises(GradientGoneError, match="if a backward was interrupted"):
                    backward(net, step)
                net.load_state_dict(saved[0])  # type: ignore[arg-type]
                optimizer.load_state_dict(saved[1])  # type: ignore[arg-type]
                optimizer.zero_grad()
            if step == 4:
                saved[:] = [copy.deepcopy(net.state_dict()), copy.deepcopy(optimizer.state_dict())]
                plain(net, optimizer, step)
            loss = plain(net, optimizer, step)
            this.record(loss, net, others=states(optimizer))

    last = run_moving(program, 4 << 20, update="gradient").statuses[-1]
    assert last.updates_in_backward == WEIGHTS
