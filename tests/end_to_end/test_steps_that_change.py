"""Training that goes on in another way: parts are thawed, or are called more often."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from teraplan.errors import InfeasibleBudgetError
from tests.end_to_end.costs import by_cost
from tests.end_to_end.moving import adamw, budget_beside_others, run_moving, states
from tests.end_to_end.training import (
    MLP,
    UNLIMITED,
    Program,
    Run,
    assert_same,
    run,
    sessions,
    tight,
    unlimited,
)

WIDTH, ROWS, ROWS_OF_TABLE = 128, 64, 16_384
MATRIX_BYTES = WIDTH * WIDTH * 4
TABLE_BYTES = ROWS_OF_TABLE * WIDTH * 4
BUDGET = TABLE_BYTES + (4 << 20)
"""Room for the table, not for a second one."""
MUCH_BYTES = 96 << 20
CHANGES_AT, STEPS = 5, 13


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linears = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for linear in self.linears:
            x = x + torch.tanh(linear(x))
        return x


class Table(nn.Module):
    """Most of the model, frozen at first."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Embedding(ROWS_OF_TABLE, WIDTH).requires_grad_(False)

    def forward(self, x: Tensor, chosen: Tensor) -> Tensor:
        loss: Tensor = (torch.tanh(x) * self.rows(chosen)).square().mean()
        return loss


class Both(nn.Module):
    """In one graph."""

    def __init__(self, layers: Layers, table: Table) -> None:
        super().__init__()
        self.layers, self.table = layers, table

    def forward(self, x: Tensor, chosen: Tensor) -> Tensor:
        loss: Tensor = self.table(self.layers(x), chosen)
        return loss


def thawing(*, at: int, in_one_graph: bool) -> Program:
    """The table is trained from step `at` on."""

    def program(this: Run) -> None:
        layers, table = Layers(), Table()
        model = Both(layers, table)
        for part in [model] if in_one_graph else [layers, table]:
            this.compile(part)
        optimizer = adamw(model.parameters())
        random = torch.Generator().manual_seed(3)
        for step in range(STEPS):
            if step == at:
                table.requires_grad_(True)
            x = torch.randn(ROWS, WIDTH, generator=random)
            loss = model(x, torch.randint(ROWS_OF_TABLE, (ROWS,), generator=random))
            torch.autograd.backward(loss)
            optimizer.step()
            this.record(loss, model, others=states(optimizer))
            optimizer.zero_grad()

    return program


THAWED = {
    f"{what} {where}, {training_state}": (at, where == "alone", training_state)
    for what, at in {"measuring": 2, "planned": 6}.items()
    for where in ("alone", "behind")
    for training_state in ("moves", "stays")
}
"""The step, whether one graph has all, and where the training state is."""


@pytest.mark.slow
@pytest.mark.parametrize(
    "which",
    by_cost(
        THAWED,
        quick=["measuring alone, moves"],
        rare=THAWED.keys() - {"planned behind, moves", "planned behind, stays"},
    ),
)
def test_a_large_part_that_cannot_be_trained_is_refused_when_it_is_thawed(which: str) -> None:
    at, in_one_graph, training_state = THAWED[which]
    runs: list[Run] = []

    def program(this: Run) -> None:
        runs.append(this)
        thawing(at=at, in_one_graph=in_one_graph)(this)

    budget = budget_beside_others(BUDGET)
    with pytest.raises(InfeasibleBudgetError) as caught:
        run(program, device_budget=budget, training_state=training_state)
    assert len(runs[0].recorded) == at, "no step with it has been taken"
    missing = caught.value.least_budget_bytes - budget
    assert missing > 2 * TABLE_BYTES
    del caught  # its traceback has the model
    enough = budget_beside_others(BUDGET) + missing
    limited = run(program, device_budget=enough, training_state=training_state)
    assert_same(run(program, device_budget=UNLIMITED, training_state="stays"), limited)


def changing(rest_of: Callable[[Layers, Tensor], Tensor], *, until: int = STEPS) -> Program:
    """In steps from `CHANGES_AT` on, the rest is made by `rest_of` of a part and what it gets."""

    def program(this: Run) -> None:
        first, second = Layers(), Layers()
        for part in (first, second):
            this.compile(part)
        model = nn.ModuleList([first, second])
        optimizer = adamw(model.parameters())
        random = torch.Generator().manual_seed(3)
        for step in range(STEPS):
            x = first(torch.randn(ROWS, WIDTH, generator=random))
            x = rest_of(second, x) if CHANGES_AT <= step < until else second(x)
            loss = x.square().mean()
            torch.autograd.backward(loss)
            optimizer.step()
            this.record(loss, model, others=states(optimizer))
            optimizer.zero_grad()

    return program


def twice(part: Layers, x: Tensor) -> Tensor:
    """Graphs that the plan knows, one of them once more."""
    result: Tensor = part(part(x))
    return result


def in_halves(part: Layers, x: Tensor) -> Tensor:
    """Graphs of another size."""
    return torch.cat([part(x[: ROWS // 4]), part(x[ROWS // 4 :])])


CHANGED = {
    f"{what} graphs, {moves}": (rest_of, num_diverged, moves == "state moves")
    for what, rest_of, num_diverged in (("known", twice, 3), ("new", in_halves, 1))
    for moves in ("activations", "state moves")
}
"""The rest of the step, how many steps leave their plan, and whether the training state moves."""


@pytest.mark.slow
@pytest.mark.parametrize(
    "which",
    by_cost(CHANGED, quick=["known graphs, activations"], rare=["new graphs, activations"]),
)
def test_steps_that_go_on_in_another_way_get_a_plan_of_their_own(which: str) -> None:
    rest_of, num_diverged, moves = CHANGED[which]
    program = changing(rest_of)
    reference = unlimited(program)
    limited = run_moving(program, 24 * MATRIX_BYTES) if moves else tight(program, reference, 0.4)
    assert_same(reference, limited)
    before, last = limited.statuses[CHANGES_AT - 1], limited.statuses[-1]
    assert before.phase == last.phase == "planned"
    assert last.diverged_steps == num_diverged


def in_turn(pattern: Sequence[int], steps: int) -> Program:
    """Steps of so many batches each, over and over; their graphs and sizes are equal."""

    def program(this: Run) -> None:
        net = MLP(width=WIDTH, depth=6, rows=512)
        this.compile(net)
        optimizer = adamw(net.parameters())
        for step in range(steps):
            losses: list[Tensor] = [
                net(*net.batch(10 * step + number))
                for number in range(pattern[step % len(pattern)])
            ]
            loss = torch.stack(losses).sum()
            torch.autograd.backward(loss)
            optimizer.step()
            this.record(loss, net, others=states(optimizer))
            optimizer.zero_grad()

    return program


@pytest.mark.slow
@pytest.mark.parametrize("pattern", [(1, 2), (1, 2, 3), (1, 1, 2)], ids=lambda p: f"{p}")
@pytest.mark.parametrize("moves", [False, True], ids=["activations", "state moves"])
def test_steps_that_take_turns_have_plans_of_their_own(pattern: Sequence[int], moves: bool) -> None:
    """They are told apart by those before."""
    program = in_turn(pattern, 10 * len(pattern) + 12)
    reference = unlimited(program)
    limited = run_moving(program, 3 << 20) if moves else tight(program, reference, 0.5)
    assert_same(reference, limited)
    turns = limited.statuses[-len(pattern) :]
    assert [status.phase for status in turns] == ["planned"] * len(pattern)
    assert turns[-1].diverged_steps == turns[0].diverged_steps
    assert not [what for status in turns for what in status.fallbacks if "different" in what]


@pytest.mark.slow
def test_steps_that_are_never_alike_are_not_kinds_without_end() -> None:
    random = torch.Generator().manual_seed(5)
    numbers = torch.randint(1, 25, (60,), generator=random).tolist()
    program = in_turn([int(number) for number in numbers], len(numbers))
    reference = run(program, device_budget=UNLIMITED)
    budget = budget_beside_others(16 << 20)
    limited = run(program, device_budget=budget, training_state="stays")
    assert_same(reference, limited)
    (session,) = sessions()
    assert len(session.cases) == 1 + 12, "that they all begin like, and after some others"
    assert "run without a plan, then they are measured again" in str(limited.statuses[-1].fallbacks)


def beside_much(part: Layers, x: Tensor) -> Tensor:
    """As `twice`, and takes far more memory than is left to it."""
    much = torch.ones(MUCH_BYTES, dtype=torch.uint8)
    return twice(part, x) + 0 * much[:1].sum()


@pytest.mark.slow
def test_a_step_that_leaves_its_plan_once_teaches_it_nothing() -> None:
    program = changing(beside_much, until=CHANGES_AT + 1)
    budget = budget_beside_others(24 * MATRIX_BYTES)
    found = run(program, device_budget=budget, training_state="moves")
    assert_same(unlimited(program), found)
    last = found.statuses[-1]
    assert last.phase == "planned"
    assert last.diverged_steps == 1
    assert "steps off their plan       1 of" in str(last)
    assert 0 < last.actual_peak_bytes < MUCH_BYTES // 2


@pytest.mark.slow
def test_steps_that_do_not_follow_a_replayed_plan_are_told_of(tmp_path: Path) -> None:
    budget = budget_beside_others(24 * MATRIX_BYTES)
    options: dict[str, Any] = {"device_budget": budget, "training_state": "moves"}
    run(changing(twice, until=0), **options, report=str(tmp_path))
    options["plan"] = str(tmp_path / "plan.json")
    assert not _off_plan(run(changing(twice, until=0), **options))[-1]
    replayed = run(changing(twice), **options)
    assert_same(unlimited(changing(twice)), replayed)
    assert _off_plan(replayed) == [0] * (CHANGES_AT + 3) + [1] * (STEPS - CHANGES_AT - 3)


def _off_plan(found: Run) -> list[int]:
    """How often each step's status says that the replayed plan is not followed."""
    text = "another way than the replayed plan"
    return [sum(text in what for what in status.fallbacks) for status in found.statuses]


def in_batches_of(
    *rows: int, dynamic: bool | None = None, refused: list[str] | None = None
) -> Program:
    """Steps with so many rows; of those that are refused, it is only noted when they were."""

    def program(this: Run) -> None:
        net = MLP(width=128, depth=4)
        this.compile(net, dynamic=dynamic)
        optimizer = adamw(net.parameters())
        for num_rows in rows:
            net.rows, now = num_rows, "forward"
            try:
                loss = net(*net.batch(len(this.recorded)))
                now = "backward"
                torch.autograd.backward(loss)
            except InfeasibleBudgetError:
                if refused is not None:
                    refused.append(now)
                continue
            optimizer.step()
            this.record(loss, net, others=states(optimizer))
            optimizer.zero_grad()

    return program


def test_a_smaller_batch_trains_after_a_refusal() -> None:
    """Also for those who look for the largest batch that fits."""
    large, small = 16384, 64
    program = in_batches_of(large, large, *[small] * 4)
    limited = run(program, device_budget=budget_beside_others(4 << 20))
    assert len(limited.recorded) == 4
    assert_same(run(in_batches_of(*[small] * 4), device_budget=UNLIMITED), limited)


@pytest.mark.parametrize(
    "dynamic",
    [
        pytest.param(False, id="static", marks=pytest.mark.slow),
        pytest.param(None, id="by itself"),
        pytest.param(True, id="symbolic", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize(("budget_bytes", "when"), [(4 << 20, "forward"), (24 << 20, "backward")])
def test_a_larger_batch_is_refused_before_it_goes_over(
    dynamic: bool | None, budget_bytes: int, when: str
) -> None:
    """Whether each size has a graph, or all have one; and smaller ones go on training.

    Where the forward fits, it may be an evaluation.
    """
    large, small = 16384, 64
    rows, refused = (*[small] * 4, *[large] * 2, *[small] * 2), list[str]()
    program = in_batches_of(*rows, dynamic=dynamic, refused=refused)
    budget = budget_beside_others(budget_bytes)
    limited = run(program, device_budget=budget, training_state="stays")
    assert refused == [when] * 2
    small_ones = in_batches_of(*[small] * 6, dynamic=dynamic)
    assert_same(run(small_ones, device_budget=UNLIMITED), limited)


def test_a_large_forward_without_a_backward_refuses_no_small_step() -> None:
    """An evaluation that keeps its graph, in the middle of the next step as far as can be seen."""
    large, small = 16384, 64

    def program(this: Run) -> None:
        net = MLP(width=128, depth=4)
        this.compile(net, dynamic=True)
        optimizer = adamw(net.parameters())
        for step in range(7):
            if step == 4:
                net.rows = large
                net(*net.batch(step))
            net.rows = small
            loss = net(*net.batch(step))
            torch.autograd.backward(loss)
            optimizer.step()
            this.record(loss, net, others=states(optimizer))
            optimizer.zero_grad()

    budget = budget_beside_others(24 << 20)
    limited = run(program, device_budget=budget, training_state="stays")
    assert_same(run(program, device_budget=UNLIMITED), limited)


@pytest.mark.parametrize(
    ("budget_bytes", "state", "when"),
    [
        (6 << 20, "stays", "forward"),
        (16 << 20, "stays", "backward"),
        (16 << 20, "auto", "backward"),
    ],
)
def test_a_larger_micro_batch_in_a_planned_step_is_refused_before_it_goes_over(
    budget_bytes: int, state: str, when: str
) -> None:
    """What is refused is the step's second call; the first has made its gradients."""
    small, large, refused = 64, 16384, list[str]()

    def program(this: Run) -> None:
        net = MLP(width=128, depth=4)
        this.compile(net, dynamic=True)
        optimizer = adamw(net.parameters())
        for step in range(9):
            loss = torch.zeros(())
            for rows in (small, large if 6 <= step < 8 else small):
                net.rows, now = rows, "forward"
                try:
                    loss = net(*net.batch(step))
                    now = "backward"
                    torch.autograd.backward(loss)
                except InfeasibleBudgetError:
                    refused.append(f"{this.statuses[-1].phase} {now}")
            optimizer.step()
            this.record(loss, net, others=states(optimizer))
            optimizer.zero_grad()

    run(program, device_budget=budget_beside_others(budget_bytes), training_state=state)
    assert refused == [f"planned {when}"] * 2
