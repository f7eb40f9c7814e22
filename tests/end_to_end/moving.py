"""What tests of a moving training state share: a small program, and the comparison of its bits."""

import gc
from collections.abc import Callable, Iterable

import pytest
import torch
from torch import Tensor, nn

import teraplan
from teraplan.errors import InfeasibleBudgetError
from teraplan.runtime.process import census
from teraplan.runtime.state import keeper
from teraplan.runtime.state.keeper import StateKeeper
from teraplan.runtime.state.memory.training_state import TrainingState
from tests.end_to_end.training import MLP, Program, Run, assert_same, run, sessions

Optimizers = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
Between = Callable[[MLP, torch.optim.Optimizer, int], None]
WIDTH, DEPTH, ROWS, STEPS = 192, 6, 128, 6
BUDGET = 3 << 20
"""Of 0.84 MiB of parameters with as many gradients and up to twice as much optimizer state, a
little more than a half."""
LESS = 2 << 20
"""The same for an optimizer whose state is as large as the parameters."""
_ATTEMPTS = 6


def model(depth: int = DEPTH) -> MLP:
    return MLP(width=WIDTH, depth=depth, rows=ROWS)


def moving() -> TrainingState:
    """The training state of the session that moves one."""
    (state,) = [s.keeper.state for s in sessions() if s.keeper.state is not None]
    return state


def states(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    of_parameters = [state for state in optimizer.state.values() if isinstance(state, dict)]
    values = [v for state in of_parameters for v in state.values()]
    return [v for v in values if isinstance(v, Tensor)]


def budget_beside_others(budget: int) -> int:
    """`budget` bytes and as many as the tensors have that other runs have left."""
    torch._dynamo.reset()
    gc.collect()
    return budget + census.tensor_nbytes("cpu")


def run_moving(program: Program, budget: int = BUDGET, **options: object) -> Run:
    """The program with `budget` bytes for its tensors and their state."""
    return run(
        program, device_budget=budget_beside_others(budget), training_state="moves", **options
    )


def check(
    program: Program, *, budget: int = BUDGET, least: bool = False, **options: object
) -> TrainingState:
    """The program's bits are the same whether its training state stays or moves.

    `least`: if the budget is too small, take the least that works.
    """
    reference = run(program, device_budget=100 << 30, training_state="stays", **options)
    if least:
        limited = run_least(program, budget, **options)
    else:
        limited = run_moving(program, budget, **options)
    assert_same(reference, limited)
    state = moving()
    arena = state.arena
    seen = (
        f"{arena.log.traffic.read_bytes} read of {arena.total_bytes}, {arena.limit_bytes} allowed"
    )
    assert arena.log.traffic.read_bytes > arena.total_bytes // 2, f"little had to come back: {seen}"
    if not least:
        assert arena.overrun_bytes == 0, seen
        device_budget = limited.options["device_budget"]
        assert isinstance(device_budget, int)
        assert arena.memory.held.peak_bytes <= device_budget
    return state


def little_for_state(monkeypatch: pytest.MonkeyPatch, share: float) -> None:
    """Let the state have `share` of the budget, where what a program does needs much beside it."""
    monkeypatch.setattr(keeper, "_FIRST_SHARE", share)
    monkeypatch.setattr(StateKeeper, "share_out", lambda *_: None)


def run_least(program: Program, budget: int, **options: object) -> Run:
    """The program with `budget`, or the least that works if that is more."""
    device_budget = budget_beside_others(budget)
    for attempt in range(_ATTEMPTS):
        try:
            return run(program, device_budget=device_budget, training_state="moves", **options)
        except InfeasibleBudgetError as error:
            assert error.least_budget_bytes > device_budget, "the least that works is no more"
            device_budget = int(error.least_budget_bytes * (1 + 0.05 * attempt))
    raise AssertionError(f"{device_budget} bytes, the least budget that works, does not")


def training(
    make_optimizer: Optimizers,
    *,
    accumulate: int = 1,
    clip: float | None = None,
    set_to_none: bool = True,
    make_model: Callable[[], MLP] = model,
    between: Callable[[MLP, torch.optim.Optimizer, int], None] | None = None,
    steps: int = STEPS,
    drops_gradients: bool = False,
) -> Program:
    """`drops_gradients`: right after each step, so that the run does not record them."""

    def program(this: Run) -> None:
        net = make_model()
        this.compile(net)
        optimizer = make_optimizer([p for p in net.parameters() if p.requires_grad])
        for step in range(steps):
            loss = torch.zeros(())
            for micro in range(accumulate):
                loss = net(*net.batch(step * accumulate + micro)) / accumulate
                torch.autograd.backward(loss)
            if clip is not None:
                torch.nn.utils.clip_grad_norm_(net.parameters(), clip)
            optimizer.step()
            if drops_gradients:
                optimizer.zero_grad(set_to_none=set_to_none)
            this.record(loss, net, others=states(optimizer))
            optimizer.zero_grad(set_to_none=set_to_none)
            if between is not None:
                between(net, optimizer, step)

    return program


def from_meta(this: Run) -> None:
    """Trains a model that was built on the meta device, and got its memory in the tiers."""
    with torch.device("meta"):
        net = model()
    teraplan.materialize(net, options=this.options)
    this.compile(net)
    optimizer = adamw(net.parameters())
    for step in range(STEPS):
        loss = net(*net.batch(step))
        torch.autograd.backward(loss)
        optimizer.step()
        this.record(loss, net, others=states(optimizer))
        optimizer.zero_grad()


class Averages:
    """Of a model's weights over the steps of one run, as users keep them."""

    def __init__(self) -> None:
        self._values: list[Tensor] = []

    def take_in(self, net: nn.Module, step: int) -> None:
        """The weights have changed; with step 0 a run begins."""
        if step == 0:
            self._values = [p.detach().clone() for p in net.parameters()]
        for average, p in zip(self._values, net.parameters(), strict=True):
            average.lerp_(p.detach(), 0.5)

    def put_into(self, net: nn.Module) -> None:
        """Let the weights be what they were on average."""
        with torch.no_grad():
            for average, p in zip(self._values, net.parameters(), strict=True):
                p.copy_(average)


def adamw(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2)


def sgd(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def weight(net: MLP, layer: int) -> Tensor:
    found = net.layers[layer].weight
    assert isinstance(found, Tensor)
    return found


def gradients(net: nn.Module) -> list[Tensor]:
    found = [p.grad for p in net.parameters()]
    return [g for g in found if g is not None]


def looping(
    step_of: Callable[[MLP, torch.optim.Optimizer, int], Tensor],
    make_model: Callable[[], MLP] = model,
    make_optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] = adamw,
    *,
    steps: int = STEPS,
    zeroing: bool = True,
) -> Callable[[Run], None]:
    """A loop whose steps are the user's own, and end with `zero_grad`, if `zeroing`."""

    def program(this: Run) -> None:
        net = make_model()
        this.compile(net)
        optimizer = make_optimizer(net.parameters())
        for step in range(steps):
            loss = step_of(net, optimizer, step)
            this.record(loss, net, others=states(optimizer))
            if zeroing:
                optimizer.zero_grad()

    return program
