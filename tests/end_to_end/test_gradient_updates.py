"""Updates in the backward, as soon as a gradient is complete: equal bits, or at the step."""

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import teraplan
from bench.models import gpt, moe
from teraplan.runtime.state.memory.digests import is_as_it_left
from teraplan.runtime.state.updates import bits, gradient_rehearsal
from teraplan.values.step_trace import UPDATE_GRAPH, TensorKind
from tests.end_to_end.costs import by_cost
from tests.end_to_end.moving import (
    DEPTH,
    ROWS,
    WIDTH,
    Optimizers,
    adamw,
    model,
    run_moving,
    sgd,
    states,
    weight,
)
from tests.end_to_end.test_state_optimizers import Counting, Lion, Replacing
from tests.end_to_end.test_training_state import Tied
from tests.end_to_end.training import MLP, Run, sessions
from tests.end_to_end.updating_early import (
    BUDGET,
    STEPS,
    WEIGHTS,
    Step,
    backward,
    compared,
    looping,
    plain,
    refusals,
    twice,
)

OPTIMIZERS: dict[str, Optimizers] = {
    "AdamW": adamw,
    "SGD momentum": sgd,
    "Lion": Lion,
    "AdamW fused": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
    "AdamW foreach": lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=True, amsgrad=True),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
    "counting": Counting,
    "giving other memory": Replacing,
}
QUICK = ("AdamW",)
RARE = ("AdamW fused", "Adagrad", "SGD momentum", "Lion")
NAMES = by_cost(OPTIMIZERS, quick=QUICK, rare=RARE)


@pytest.mark.parametrize("name", NAMES)
def test_optimizers(name: str) -> None:
    budget = BUDGET if "AdamW" in name else 2 << 20
    last = compared(looping(make_optimizer=OPTIMIZERS[name]), budget, least=True)
    assert (last.updates_in_backward, last.updates_in_step) == (WEIGHTS, DEPTH)
    assert refusals(last) == []
    assert last.phase == "planned"
    assert last.diverged_steps == 0


@pytest.mark.slow
def test_gradients_are_in_no_plan_and_updates_are_in_the_backward() -> None:
    run_moving(looping(), BUDGET, update="gradient")
    (session,) = [s for s in sessions() if s.keeper.state is not None]
    assert session.active is not None
    assert session.active.schedule is not None
    trace = session.active.schedule.plan.trace
    kinds = [tensor.kind for tensor in trace.tensors]
    assert TensorKind.GRADIENT not in kinds
    assert kinds.count(TensorKind.PARAMETER) == WEIGHTS
    assert kinds.count(TensorKind.OPTIMIZER_STATE) == 2 * WEIGHTS
    updates = [k for k, site in enumerate(trace.sites) if site.graph == UPDATE_GRAPH]
    last_of_graph = max(k for k, site in enumerate(trace.sites) if site.graph != UPDATE_GRAPH)
    assert updates[0] < last_of_graph, "the first update comes before the end of the backward"
    for tensor in trace.tensors:
        if tensor.kind is TensorKind.PARAMETER:
            assert tensor.changed_in == (len(tensor.windows) - 1,)
            assert tensor.windows[-1][0] in updates


@pytest.mark.slow
def test_less_is_moved() -> None:
    """No gradient goes to storage and comes back."""
    moved: dict[str, tuple[int, int]] = {}
    for update in ("step", "gradient"):
        last = run_moving(looping(), BUDGET, update=update).statuses[-1]
        moved[update] = last.state_written_bytes, last.state_read_bytes
    assert 0 < moved["gradient"][0] < moved["step"][0]
    assert 0 < moved["gradient"][1] < moved["step"][1]


class Unbiased(MLP):
    """In its backward a weight's gradient is there before the weight is used."""

    def __init__(self) -> None:
        super().__init__(width=WIDTH, depth=DEPTH, rows=ROWS)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(DEPTH))


@pytest.mark.slow
@pytest.mark.parametrize(
    "make_model", [model, pytest.param(Unbiased, marks=pytest.mark.exhaustive)]
)
def test_fused_kernels(make_model: Callable[[], MLP]) -> None:
    last = compared(looping(make_model=make_model), kernels="inductor")
    assert last.updates_in_backward == WEIGHTS


@pytest.mark.slow
def test_what_is_away_is_not_mapped_to_see_whether_it_changes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A watched step looks at all optimizer state: it mapped as much of the spill file."""
    num_away, num_read, digest_of = 0, 0, bits.digest_of

    def watched(tensor: Tensor) -> int:
        nonlocal num_away, num_read
        states = [s.keeper.state for s in sessions() if s.keeper.state is not None]
        block = states[0].arena.block_of(tensor) if states else None
        num_read += 1
        num_away += block is not None and is_as_it_left(block) and block.nbytes == tensor.nbytes
        return digest_of(tensor)

    for module in (bits, gradient_rehearsal):
        monkeypatch.setattr(module, "digest_of", watched)
    compared(looping())
    assert num_read > 0
    assert num_away == 0


class Dropping(MLP):
    """Its backward draws again the random numbers of the forward, and lacks one of its weights."""

    def __init__(self) -> None:
        super().__init__(width=WIDTH, depth=DEPTH, rows=ROWS)
        self.added = nn.Parameter(torch.zeros(ROWS, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        def block(x: Tensor, layer: nn.Module) -> Tensor:
            return x + F.dropout(torch.relu(layer(x)), 0.1)

        x = x + self.added
        for layer in self.layers:
            x = checkpoint(block, x, layer, use_reentrant=False)
        return x.square().mean()


@pytest.mark.slow
@pytest.mark.parametrize(
    "kernels", ["aot_eager", pytest.param("inductor", marks=pytest.mark.exhaustive)]
)
def test_checkpointed_blocks_with_random_numbers(kernels: str) -> None:
    """What the backward is given of a random state has another name there, and comes last."""
    last = compared(looping(make_model=Dropping), 3 << 20, least=True, kernels=kernels)
    assert last.updates_in_backward == WEIGHTS + 1
    assert refusals(last) == []


GPT = gpt.GPTConfig(num_layers=2, width=128, context=32, vocab_size=256, tie_embeddings=True)
MOE = moe.MoEConfig(width=128, num_layers=1, num_experts=2, experts_per_token=1)
MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], Iterable[Tensor]]]] = {
    "GPT, tied embeddings": (lambda: gpt.build(GPT), lambda step: gpt.batch(GPT, 2, step)),
    "mixture of experts": (lambda: moe.build(MOE), lambda step: moe.batch(MOE, 2, step)),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        "GPT, tied embeddings",
        pytest.param("mixture of experts", marks=pytest.mark.exhaustive),
    ],
)
def test_models(name: str) -> None:
    make_model, batches = MODELS[name]

    def program(this: Run) -> None:
        torch.manual_seed(3)
        net = make_model()
        this.compile(net)
        optimizer = adamw(net.parameters())
        for step in range(2 * STEPS):
            loss = net(*batches(step))
            torch.autograd.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            this.record(loss, net, others=states(optimizer))

    last = compared(program, 2 << 20, least=True)
    assert last.updates_in_backward > 0
    assert refusals(last) == []


@pytest.mark.slow
def test_tied_weights_in_one_graph() -> None:
    last = compared(looping(make_model=Tied))
    assert last.updates_in_backward == WEIGHTS - 1


def tying(net: MLP, optimizer: torch.optim.Optimizer, step: int) -> Tensor:
    """From the fourth step on a graph, the same as before, uses the first weight twice."""
    if step == 4:
        net.layers[-1].weight = net.layers[0].weight
    loss = backward(net, step)
    optimizer.step()
    optimizer.zero_grad()
    return loss


def test_a_weight_that_is_tied_between_steps() -> None:
    last = compared(looping(tying, steps=8), 3 << 20)
    assert last.updates_in_backward == WEIGHTS - 2


class InTwoGraphs(MLP):
    """Its first weight is used in both, its other ones in one of them."""

    def __init__(self) -> None:
        super().__init__(width=WIDTH, depth=DEPTH, rows=ROWS)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers[:3]:
            x = torch.tanh(layer(x))
        torch._dynamo.graph_break()
        for layer in (*self.layers[3:], self.layers[0]):
            x = torch.tanh(layer(x))
        return x.square().mean()


@pytest.mark.slow
def test_a_weight_of_two_graphs_is_updated_at_the_step() -> None:
    last = compared(looping(make_model=InTwoGraphs), 3 << 20)
    assert last.updates_in_backward == WEIGHTS - 1


def decaying(net: MLP, optimizer: torch.optim.Optimizer, step: int) -> Tensor:
    """Code outside of the graph adds to a gradient."""
    loss: Tensor = net(*net.batch(step)) + weight(net, 0).square().mean()
    torch.autograd.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    return loss


@pytest.mark.slow
@pytest.mark.parametrize(("step_of", "num_early"), [(twice, 0), (decaying, WEIGHTS - 1)])
def test_gradients_from_several_places(step_of: Step, num_early: int) -> None:
    last = compared(looping(step_of, steps=6), 3 << 20)
    assert last.updates_in_backward == num_early


def closing(net: MLP, optimizer: torch.optim.Optimizer, step: int) -> Tensor:
    def closure() -> Tensor:
        optimizer.zero_grad()
        return backward(net, step)

    loss: Any = optimizer.step(closure)  # type: ignore[arg-type]
    optimizer.zero_grad()
    assert isinstance(loss, Tensor)
    return loss


@pytest.mark.slow
def test_a_closure() -> None:
    last = compared(looping(closing))
    assert last.updates_in_backward == WEIGHTS


@pytest.mark.slow
def test_a_hook_of_the_user_sees_its_gradient() -> None:
    """From the third step on, that parameter is updated at the step."""
    seen: list[float] = []

    def step_of(net: MLP, optimizer: torch.optim.Optimizer, step: int) -> Tensor:
        if step == 3:
            reads: Any = weight(net, 2)
            reads.register_hook(lambda g: seen.append(float(g.sum())))
            halves: Any = weight(net, 3)
            halves.register_hook(lambda g: g * 0.5)
        return plain(net, optimizer, step)

    last = compared(looping(step_of))
    assert len(seen) == 2 * (STEPS - 3)
    assert last.updates_in_backward == WEIGHTS - 2


@pytest.mark.slow
def test_gradients_taken_by_hand_update_nothing() -> None:
    def step_of(net: MLP, optimizer: torch.optim.Optimizer, step: int) -> Tensor:
        if step < 3:
            return plain(net, optimizer, step)
        loss: Tensor = net(*net.batch(step))
        parameters = list(net.parameters())
        for p, gradient in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
            p.grad = gradient
        optimizer.step()
        optimizer.zero_grad()
        return loss

    compared(looping(step_of))


@pytest.mark.slow
def test_another_forward_updates_at_the_step() -> None:
    """A step whose forward uses parameters in another way is not trusted."""

    def step_of(net: MLP, optimizer: torch.optim.Optimizer, step: int) -> Tensor:
        if step == 5:
            return twice(net, optimizer, step)
        return plain(net, optimizer, step)

    last = compared(looping(step_of))
    assert last.updates_in_backward == WEIGHTS


@pytest.mark.slow
def test_anomalies_are_looked_for() -> None:
    """It reads every gradient, so updates are at the step."""

    def step_of(net: MLP, optimizer: torch.optim.Optimizer, step: int) -> Tensor:
        with torch.autograd.set_detect_anomaly(step >= 3):
            return plain(net, optimizer, step)

    last = compared(looping(step_of))
    assert last.updates_in_backward == 0


@pytest.mark.slow
def test_parameters_taken_from_the_optimizer_and_given_back() -> None:
    def step_of(net: MLP, optimizer: torch.optim.Optimizer, step: int) -> Tensor:
        group, its = optimizer.param_groups[0], weight(net, 1)
        if step == 3:
            group["params"] = [p for p in group["params"] if p is not its]
        if step == 6:
            group["params"].append(its)
        return plain(net, optimizer, step)

    def program(this: Run) -> None:
        net = model()
        this.compile(net)
        optimizer = adamw(list(net.parameters()))
        for step in range(STEPS):
            loss = step_of(net, optimizer, step)
            net.zero_grad()
            this.record(loss, net, others=states(optimizer))

    compared(program)


@pytest.mark.slow
def test_detached_between_steps() -> None:
    def step_of(net: MLP, optimizer: torch.optim.Optimizer, step: int) -> Tensor:
        if step == 5:
            teraplan.detach(optimizer)
        return plain(net, optimizer, step)

    compared(looping(step_of))
