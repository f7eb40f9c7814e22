"""What tests of updates in the backward share: loops, and what they do with gradients."""

from collections.abc import Callable

import torch
from torch import Tensor

from teraplan.values.status import Status
from tests.end_to_end import moving
from tests.end_to_end.moving import (
    DEPTH,
    Optimizers,
    adamw,
    check,
    gradients,
    model,
    weight,
)
from tests.end_to_end.test_state_optimizers import Lion
from tests.end_to_end.training import MLP, Program, Run

STEPS = 8
SHORT = 4
"""One plain step, one watched, two in which updates in the backward would be wrong."""
BUDGET = 9 << 18
"""Of 2.5 MiB of parameters and AdamW state, 0.84 MiB of gradients, and activations."""
WEIGHTS = DEPTH
"""The others, biases, are too small to move."""

Step = Callable[[MLP, torch.optim.Optimizer, int], Tensor]


def backward(net: MLP, batch: int) -> Tensor:
    loss: Tensor = net(*net.batch(batch))
    torch.autograd.backward(loss)
    return loss


def plain(net: MLP, optimizer: torch.optim.Optimizer, step: int) -> Tensor:
    loss = backward(net, step)
    optimizer.step()
    optimizer.zero_grad()
    return loss


def looping(
    step_of: Step = plain,
    make_optimizer: Optimizers = adamw,
    *,
    make_model: Callable[[], MLP] = model,
    steps: int = STEPS,
) -> Program:
    """A loop whose gradients are gone where its bits are recorded."""
    return moving.looping(step_of, make_model, make_optimizer, steps=steps, zeroing=False)


def compared(
    program: Program, budget: int = BUDGET, *, least: bool = False, **options: object
) -> Status:
    """The status after the last step of a run whose bits are those of a plain one."""
    found: list[Status] = []

    def noting(this: Run) -> None:
        program(this)
        found.append(this.statuses[-1])

    check(noting, budget=budget, least=least, update="gradient", **options)
    return found[-1]


def refusals(status: Status) -> list[str]:
    """Why updates are at the step."""
    return [text for text in status.fallbacks if "updates all parameters in its step" in text]


def twice(net: MLP, optimizer: torch.optim.Optimizer, step: int) -> Tensor:
    """One graph is called two times in a backward."""
    loss: Tensor = net(*net.batch(2 * step)) + net(*net.batch(2 * step + 1))
    torch.autograd.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    return loss


def changing(change: Callable[[MLP, torch.optim.Optimizer, int], object]) -> Step:
    """A step in which `change` comes between the backward and the optimizer's step."""

    def step_of(net: MLP, optimizer: torch.optim.Optimizer, step: int) -> Tensor:
        loss = backward(net, step)
        change(net, optimizer, step)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step_of


@changing
def clipping(net: MLP, optimizer: torch.optim.Optimizer, step: int) -> None:
    torch.nn.utils.clip_grad_norm_(net.parameters(), 1e-3)


@changing
def clamping(net: MLP, optimizer: torch.optim.Optimizer, step: int) -> None:
    """By `data`, which autograd does not count."""
    for gradient in gradients(net):
        gradient.data.clamp_(-1e-5, 1e-5)


def accumulating(net: MLP, optimizer: torch.optim.Optimizer, step: int) -> Tensor:
    backward(net, 2 * step)
    loss = backward(net, 2 * step + 1)
    optimizer.step()
    optimizer.zero_grad()
    return loss


def keeping(net: MLP, optimizer: torch.optim.Optimizer, step: int) -> Tensor:
    loss = backward(net, step)
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)
    return loss


@changing
def scheduling(net: MLP, optimizer: torch.optim.Optimizer, step: int) -> None:
    for group in optimizer.param_groups:
        group["lr"] = 1e-2 / (1 + step)


def scaling_from(scale: float) -> Step:
    """Steps by a GradScaler that begins with this scale."""

    def step_of(net: MLP, optimizer: torch.optim.Optimizer, step: int) -> Tensor:
        scaler = torch.amp.GradScaler("cpu", init_scale=scale)
        loss: Tensor = net(*net.batch(step))
        torch.autograd.backward(scaler.scale(loss))
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        return loss

    return step_of


class Told(Lion):
    """Its step is given how far to go."""

    def step(self, closure: None = None, *, far: float = 1.0) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["lr"] = 1e-3 * far
        super().step()


def with_arguments(net: MLP, optimizer: torch.optim.Optimizer, step: int) -> Tensor:
    loss = backward(net, step)
    optimizer.step(far=0.5 + step)  # type: ignore[call-overload]
    optimizer.zero_grad()
    return loss


def evaluating(net: MLP, optimizer: torch.optim.Optimizer, step: int) -> Tensor:
    backward(net, step)
    loss: Tensor = net(*net.batch(step))
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def dropping(net: MLP, optimizer: torch.optim.Optimizer, step: int) -> Tensor:
    """What two networks that train against each other do with one's gradients."""
    backward(net, step)
    optimizer.zero_grad()
    return plain(net, optimizer, step + 100)


@changing
def disturbing(net: MLP, optimizer: torch.optim.Optimizer, step: int) -> None:
    with torch.no_grad():
        weight(net, 2).mul_(0.99)
