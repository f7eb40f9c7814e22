"""Which budgets work: from the least on all, with equal bits; below it there is no step at all."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from bench.models import gpt
from teraplan.errors import InfeasibleBudgetError
from teraplan.runtime.session import budget_shares
from teraplan.runtime.session.budget import GraphForecast
from teraplan.runtime.session.session import Session
from tests.end_to_end import moving
from tests.end_to_end.moving import adamw, budget_beside_others, states
from tests.end_to_end.training import (
    MLP,
    UNLIMITED,
    Program,
    Run,
    assert_same,
    run,
    sessions,
    training,
)

CONFIG = gpt.GPTConfig(num_layers=2, width=128, context=64)
BATCH = 8
MIB = 1 << 20
HOPELESS = MIB
NEAR = 0.87
"""Of the named least, a budget that does not work."""
MODEL_BYTES = 4 * sum(p.numel() for p in gpt.build(CONFIG).parameters())
STATE_BYTES = 4 * MODEL_BYTES
"""With gradients and what AdamW keeps."""


def training_gpt(steps: int, *, accumulate: int = 1) -> Program:
    def program(this: Run) -> None:
        net = gpt.build(CONFIG)
        this.compile(net)
        optimizer = adamw(net.parameters())
        for step in range(steps):
            loss = torch.zeros(())
            for micro in range(accumulate):
                batch = gpt.batch(CONFIG, BATCH, step * accumulate + micro)
                loss = net(*batch) / accumulate
                torch.autograd.backward(loss)
            optimizer.step()
            this.record(loss, net, others=states(optimizer))
            optimizer.zero_grad()

    return program


def session() -> Session:
    return max(sessions(), key=lambda one: one.last_used_ns)


def moves() -> bool:
    return session().keeper.moves


def comes_back() -> bool:
    """True if the graphs bring in what is away, and do not read it through the spill file."""
    state = session().keeper.state
    return state is not None and state.arena.log.traffic.read_bytes > 0


def within(program: Program, budget: int, **options: object) -> Run:
    """The program with `budget` bytes for its tensors."""
    return run(program, device_budget=budget_beside_others(budget), **options)


def refused(program: Callable[[Run], None], budget: int, **options: object) -> int:
    """The least budget that the refusal names, which comes before the first step is over."""
    beside = budget_beside_others(0)
    done: list[Run] = []

    def watched(this: Run) -> None:
        done.append(this)
        program(this)

    with pytest.raises(InfeasibleBudgetError) as caught:
        run(watched, device_budget=budget + beside, **options)
    assert not done[0].recorded, "parameters have changed"
    return caught.value.least_budget_bytes - beside


def check_all(program: Program, fractions: tuple[float, ...], **options: object) -> None:
    """Budgets at these fractions of the way from the least to that of the state and all else."""
    reference = run(program, device_budget=UNLIMITED, **options)
    unlimited = reference.final.unlimited_peak_bytes - budget_beside_others(0) + MODEL_BYTES
    least = refused(program, HOPELESS, **options)
    assert refused(program, int(NEAR * least), **options) == pytest.approx(least, rel=0.01)
    moved = []
    for fraction in fractions:
        limited = within(program, int(least + fraction * (unlimited - least)), **options)
        assert_same(reference, limited)
        moved.append(moves())
    assert moved == sorted(moved, reverse=True), "what has more memory moves less"
    assert moved[0]
    assert not moved[-1]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kernels", "fractions"),
    [
        ("aot_eager", (0, 0.1, 0.5, 1.1)),
        pytest.param("inductor", (0, 0.4, 1.1), marks=pytest.mark.exhaustive),
    ],
)
def test_a_sweep_of_budgets(kernels: str, fractions: tuple[float, ...]) -> None:
    check_all(training_gpt(12), fractions, kernels=kernels)


@pytest.mark.slow
def test_a_budget_for_the_state_alone_lets_it_move() -> None:
    """It holds the state, but nothing beside it."""
    limited = within(training_gpt(4), STATE_BYTES + MIB // 2)
    assert moves()
    assert_same(run(training_gpt(4), device_budget=UNLIMITED), limited)


@pytest.mark.slow
def test_an_evaluation_before_training_refuses_no_budget() -> None:
    """It says nothing of training, and the state can still start to move."""

    def program(this: Run) -> None:
        net = gpt.build(CONFIG)
        this.compile(net)
        optimizer = adamw(net.parameters())
        for step in range(3):
            with torch.no_grad():
                net(*gpt.batch(CONFIG, BATCH, step))
            loss = net(*gpt.batch(CONFIG, BATCH, step))
            torch.autograd.backward(loss)
            optimizer.step()
            this.record(loss, net, others=states(optimizer))
            optimizer.zero_grad()

    limited = within(program, STATE_BYTES + MIB // 8)
    assert moves()
    assert_same(run(program, device_budget=UNLIMITED), limited)


@pytest.mark.slow
def test_state_starts_to_move_when_a_step_takes_more_than_the_graphs_tell() -> None:
    """Gradients of two micro-batches are there at once; no graph knows of the other's."""
    program = training_gpt(6, accumulate=2)
    reference = run(program, device_budget=UNLIMITED)
    budgets: list[int] = []

    def one_graph(this: Run) -> None:
        training_gpt(1)(this)
        budgets.append(session()._shares.forecast.least_bytes)

    run(one_graph, device_budget=UNLIMITED)
    budget = int(budgets[0] * 1.01)
    limited = run(program, device_budget=budget)
    assert moves()
    assert comes_back()
    assert_same(reference, limited)
    with pytest.raises(InfeasibleBudgetError) as caught:
        run(program, device_budget=budget, training_state="stays")
    assert 'training_state="moves"' in caught.value.__notes__[0]


class InTwoGraphs(MLP):
    """The second graph needs more than the first."""

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.layers[0](x))
        torch._dynamo.graph_break()
        for layer in self.layers[1:]:
            x = torch.tanh(layer(x)) + torch.sigmoid(x) * torch.cat([x, x]).mean()
        return x.square().mean()


@pytest.mark.slow
def test_a_later_graph_that_needs_more() -> None:
    """Seen when it is compiled: from the next step on the state moves."""
    sizes = MLP(width=192, depth=6, rows=1024)
    program = training(
        lambda: InTwoGraphs(width=192, depth=6, rows=1024),
        sizes.batch,
        steps=9,
        make_optimizer=adamw,
    )
    reference = run(program, device_budget=UNLIMITED)
    state = 4 * 4 * 192 * 193 * 6
    limited = within(program, state + 5 * MIB)
    assert moves()
    assert comes_back()
    assert_same(reference, limited)


@pytest.mark.slow
def test_sizes_that_vary_and_state_that_starts_to_move() -> None:
    """Graphs have the ops from the beginning: none is compiled again."""
    rows = (96, 128, 160)

    def program(this: Run) -> None:
        net = MLP(width=192, depth=6, rows=128)
        this.compile(net, dynamic=True)
        optimizer = adamw(net.parameters())
        for step in range(8):
            for micro in range(3):
                x = net.batch(3 * step + micro)[0][: rows[micro]]
                torch.autograd.backward(net(x))
            optimizer.step()
            this.record(torch.zeros(()), net)
            optimizer.zero_grad(set_to_none=False)

    reference = run(program, device_budget=UNLIMITED)
    limited = within(program, int(5.2 * 4 * 192 * 193 * 6))
    assert moves()
    assert comes_back()
    assert_same(reference, limited)


@pytest.mark.slow
def test_percent_of_the_peak_let_no_state_move() -> None:
    with pytest.raises(InfeasibleBudgetError) as caught:
        run(training_gpt(4), device_budget="30%")
    assert not moves()
    assert 'training_state="moves"' in caught.value.__notes__[0]


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wide, self.narrow = torch.nn.Linear(128, 512), torch.nn.Linear(512, 128)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.narrow(torch.tanh(self.wide(x)))
        return y


@pytest.mark.slow
@pytest.mark.parametrize("budget", ["90%", "75%"])
def test_percent_of_the_peak_of_blocks_that_are_compiled_one_by_one(budget: str) -> None:
    """Each of them has a small part of what the step saves, which is known once all have run."""

    def program(this: Run) -> None:
        torch.manual_seed(0)
        net = torch.nn.Sequential(*(this.compile(Block()) for _ in range(6)))
        optimizer = adamw(net.parameters())
        for step in range(5):
            x = torch.randn(1024, 128, generator=torch.Generator().manual_seed(step))
            loss = net(x).square().mean()
            torch.autograd.backward(loss)
            optimizer.step()
            this.record(loss, net)
            optimizer.zero_grad()

    reference = run(program, device_budget="1000%", kernels="aot_eager")
    limited = run(program, device_budget=budget, kernels="aot_eager")
    assert_same(reference, limited)
    first, last = limited.statuses[1], limited.statuses[-1]
    assert first.device_budget_bytes >= 0.8 * last.device_budget_bytes
    assert not moves()
    with pytest.raises(InfeasibleBudgetError, match=r"device_budget is 1 % of the step's peak"):
        run(program, device_budget="1%", kernels="aot_eager")


@pytest.mark.parametrize("num_freed", [0, 7])
def test_what_is_garbage_does_not_count(num_freed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that is gone may be in a cycle that Python has not looked for yet."""
    collections: list[int] = []
    refuse = GraphForecast.refuse

    def with_garbage(self: GraphForecast, budget_bytes: int, **options: Any) -> None:  # noqa: ANN401
        if not collections:
            raise InfeasibleBudgetError("with what is garbage")
        refuse(self, budget_bytes, **options)

    def collect() -> int:
        collections.append(num_freed)
        return num_freed

    monkeypatch.setattr(GraphForecast, "refuse", with_garbage)
    monkeypatch.setattr(budget_shares, "gc", SimpleNamespace(collect=collect))
    net = MLP()
    net.compile(
        backend="teraplan",
        options={"device_budget": UNLIMITED, "kernels": "aot_eager", "training_state": "stays"},
    )
    if num_freed:
        net(*net.batch(0))
    else:
        with pytest.raises(InfeasibleBudgetError, match="with what is garbage"):
            net(*net.batch(0))
    assert collections == [num_freed]


class Table(torch.nn.Module):
    """One large parameter."""

    def __init__(self, num_rows: int) -> None:
        super().__init__()
        self.rows = torch.nn.Embedding(num_rows, 128)

    def forward(self, indices: Tensor) -> Tensor:
        return torch.tanh(self.rows(indices)).square().mean()


def test_what_sgd_makes_on_the_way_is_not_taken_to_be_as_much_as_of_adamw() -> None:
    """One large parameter, its gradient and its momentum are there at once, and no more of them."""
    table_bytes = 4 * MIB
    moved: list[bool] = []

    def program(this: Run) -> None:
        torch.manual_seed(0)
        net = Table(table_bytes // 512)
        model = this.compile(net)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
        for step in range(5):
            random = torch.Generator().manual_seed(step)
            loss = model(torch.randint(table_bytes // 512, (64,), generator=random))
            torch.autograd.backward(loss)
            optimizer.step()
            this.record(loss, net)
            moved.append(moves())
            optimizer.zero_grad()

    reference = run(program, device_budget=UNLIMITED)
    limited = within(program, 3 * table_bytes + 2 * MIB)
    assert not any(moved)
    assert_same(reference, limited)


@pytest.mark.slow
@pytest.mark.parametrize("held", [False, True])
def test_a_refusal_names_tensors_that_something_else_has_where_there_are_some(held: bool) -> None:
    """Small parameters stay, too, and nothing can be done about these."""
    budget = budget_beside_others(7 * MIB)
    torch.manual_seed(0)
    net = torch.nn.Sequential(*[torch.nn.Linear(120, 120) for _ in range(40)])
    large = torch.nn.Linear(120, 4000)
    net.append(large)
    views = [large.weight.detach()] if held else []
    options: dict[str, Any] = {
        "device_budget": budget,
        "training_state": "moves",
        "kernels": "aot_eager",
    }
    model = torch.compile(net, backend="teraplan", options=options)
    optimizer = adamw(net.parameters())
    with pytest.raises(InfeasibleBudgetError) as error:
        for _ in range(3):
            torch.autograd.backward(model(torch.randn(256, 120)).square().mean())
            optimizer.step()
            optimizer.zero_grad()
    assert ("something else has" in str(error.value)) == bool(views)
    assert str(error.value).count("1.83 MiB of it stay") == len(views)


class WithTables(MLP):
    """Frozen tables, each larger than anything that is trained, which are used together."""

    ROWS = 8_192
    NBYTES = 4 * ROWS * 128

    def __init__(self, number: int) -> None:
        super().__init__(width=128, depth=4, rows=64)
        tables = (torch.nn.Embedding(self.ROWS, 128) for _ in range(number))
        self.tables = torch.nn.ModuleList(tables).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        rows = torch.arange(len(x))
        return super().forward(x + torch.stack([table(rows) for table in self.tables]).sum(0))


@pytest.mark.slow
def test_what_is_frozen_has_no_gradient_and_no_state_that_would_need_room() -> None:
    program = moving.training(adamw, make_model=lambda: WithTables(1), steps=4)
    reference = within(program, UNLIMITED)
    assert_same(reference, within(program, WithTables.NBYTES + MIB, training_state="moves"))
    assert moves()


@pytest.mark.slow
def test_what_a_graph_uses_at_once_has_to_have_room_from_the_beginning() -> None:
    program = moving.training(adamw, make_model=lambda: WithTables(3), steps=4)
    with pytest.raises(InfeasibleBudgetError, match="what the graphs have at once") as refused:
        within(program, 2 * WithTables.NBYTES, training_state="moves")
    least = refused.value.least_budget_bytes
    assert least > 3 * WithTables.NBYTES
    limited = within(program, int(1.02 * least), training_state="moves")
    assert_same(within(program, UNLIMITED), limited)
