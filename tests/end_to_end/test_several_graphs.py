"""Models of which Dynamo makes several graphs: what later ones use moves from the first one on."""

from collections.abc import Callable
from typing import Any, TypeVar, cast

import pytest
import torch
from torch import Tensor, nn

from teraplan.errors import InfeasibleBudgetError
from teraplan.runtime.cpu.device import CpuDevice
from teraplan.runtime.process import pages
from teraplan.runtime.state.memory.block import Place
from tests.end_to_end.moving import adamw, budget_beside_others, moving, run_least, states
from tests.end_to_end.training import UNLIMITED, Program, Run, assert_same, run, sessions
from tests.runtime.state_arena import pages_of

WIDTH, ROWS, STEPS = 512, 64, 6
LAYER_BYTES = WIDTH * WIDTH * 4
TIMES = 160
WIDE_BYTES = TIMES * ROWS * WIDTH * 4
_NONE = slice(0)


_Function = TypeVar("_Function", bound=Callable[..., object])


def eager(function: _Function) -> _Function:
    """The function, which Dynamo leaves alone."""
    return cast("_Function", torch.compiler.disable(function))  # type: ignore[no-untyped-call]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.linear = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(self.norm(x)))


class Beside(nn.Module):
    """Its matrices are of no graph."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(depth))

    @eager
    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


class Broken(nn.Module):
    """Three graphs, with eager code after the first."""

    def __init__(self, depth: int, *, beside: int) -> None:
        super().__init__()
        self.first = nn.Sequential(*(Block() for _ in range(depth)))
        self.beside = Beside(beside)
        self.middle = nn.Sequential(*(Block() for _ in range(depth)))
        self.last = nn.Sequential(*(Block() for _ in range(depth)))

    def forward(self, x: Tensor) -> Tensor:
        x = self.beside(self.first(x))
        x = self.middle(x)
        torch._dynamo.graph_break()
        result: Tensor = self.last(x)
        return result


def one_by_one(depth: int, *, frozen: slice = _NONE) -> Program:
    """Blocks that are compiled each by itself; some are in no optimizer."""

    def program(this: Run) -> None:
        blocks = nn.Sequential(*(Block() for _ in range(depth)))
        blocks[frozen].requires_grad_(False)
        for block in blocks:
            this.compile(block)
        _train(this, blocks)

    return program


def as_a_whole(depth: int, *, beside: int) -> Program:
    """A model in which the graph breaks."""

    def program(this: Run) -> None:
        model = Broken(depth, beside=beside)
        this.compile(model)
        _train(this, model)

    return program


class Wide(nn.Module):
    """The last graph of a step, which needs several times as much memory as the others."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.log_softmax(x.repeat(1, TIMES).sin(), dim=1)


def a_function(depth: int) -> Program:
    """A compiled function in which the graph breaks: only the optimizer has all parameters."""

    def program(this: Run) -> None:
        model = Broken(depth, beside=1)
        options: dict[str, Any] = this.options
        function = torch.compile(model.forward, backend="teraplan", options=options)
        model.forward = function  # type: ignore[method-assign]
        _train(this, model)

    return program


def before_eager_code(depth: int, *, beside: int) -> Program:
    """Blocks that are compiled each by itself, and matrices that are not compiled."""

    def program(this: Run) -> None:
        blocks = [Block() for _ in range(depth)]
        for block in blocks:
            this.compile(block)
        _train(this, nn.Sequential(*blocks, Beside(beside)))

    return program


def before_a_wide_one(after_step: Callable[[], object]) -> Program:
    """A few blocks and a `Wide`, each compiled by itself."""

    def program(this: Run) -> None:
        parts = nn.Sequential(*(Block() for _ in range(8)), Wide())
        for part in parts:
            this.compile(part)
        _train(this, parts, after_step)

    return program


def _train(this: Run, model: nn.Module, after_step: Callable[[], object] = lambda: None) -> None:
    optimizer = adamw([p for p in model.parameters() if p.requires_grad])
    random = torch.Generator().manual_seed(3)
    for _ in range(STEPS):
        loss = model(torch.randn(ROWS, WIDTH, generator=random)).square().mean()
        loss.backward()
        optimizer.step()
        this.record(loss, model, others=states(optimizer))
        after_step()
        optimizer.zero_grad()


def _least(program: Program) -> tuple[int, list[str]]:
    """The least budget that works, bit for bit, beside what other tests have left.

    And what the status says of parameters for eager code.
    """
    reference = run(program, device_budget=UNLIMITED, training_state="stays")
    others = budget_beside_others(0)
    limited = run_least(program, LAYER_BYTES)
    assert_same(reference, limited)
    budget = limited.options["device_budget"]
    assert isinstance(budget, int)
    return budget - others, _left_to_eager_code(limited)


@pytest.mark.slow
def test_blocks_compiled_one_by_one_need_less_than_all_of_their_parameters() -> None:
    least, told = _least(one_by_one(depth=24))
    assert least < 20 * LAYER_BYTES
    assert not told


@pytest.mark.slow
@pytest.mark.parametrize(
    "frozen",
    [
        pytest.param(slice(1, None), id="behind"),
        pytest.param(slice(23), id="in front", marks=pytest.mark.exhaustive),
    ],
)
def test_frozen_blocks_compiled_one_by_one_need_less_than_all_of_their_parameters(
    frozen: slice,
) -> None:
    least, told = _least(one_by_one(depth=24, frozen=frozen))
    assert least < 20 * LAYER_BYTES
    assert not told


@pytest.mark.slow
def test_graphs_behind_a_break_need_less_than_all_of_their_parameters() -> None:
    least, told = _least(as_a_whole(depth=6, beside=8))
    assert least < 25 * LAYER_BYTES
    assert len(told) == 1
    assert told[0].startswith("8 parameters (8.00 MiB) are used by no compiled graph")


@pytest.mark.exhaustive
@pytest.mark.slow
def test_a_function_in_several_graphs_needs_less_than_all_of_its_parameters() -> None:
    least, _ = _least(a_function(depth=10))
    assert least < 28 * LAYER_BYTES


@pytest.mark.slow
def test_eager_code_beside_compiled_blocks() -> None:
    least, told = _least(before_eager_code(depth=4, beside=24))
    assert least < 60 * LAYER_BYTES  # with gradients and optimizer state they would be 96
    assert len(told) == 1


@pytest.mark.slow
def test_what_only_eager_code_uses_returns_where_there_is_room() -> None:
    inside: list[bool] = []

    def program(this: Run) -> None:
        model = Broken(4, beside=4)
        this.compile(model)
        weight = next(model.beside.parameters())
        note = eager(lambda *_: inside.append(_moves(weight)))
        model.beside.register_forward_hook(note)
        _train(this, model)

    reference = run(program, device_budget=UNLIMITED, training_state="stays")
    inside.clear()
    budget = budget_beside_others(50 * LAYER_BYTES)
    limited = run(program, device_budget=budget, training_state="moves")
    assert_same(reference, limited)
    assert inside == [True] + [False] * (STEPS - 1)
    assert not _left_to_eager_code(limited)


def _left_to_eager_code(run: Run) -> list[str]:
    return [what for what in run.statuses[-1].fallbacks if "by no compiled graph" in what]


def _moves(weight: Tensor) -> bool:
    alive = [s.keeper.state for s in sessions() if s.keeper.state is not None]
    return any(state.arena.block_of(weight) is not None for state in alive)


@pytest.mark.slow
def test_a_functional_call_has_results_in_the_places_of_parameters() -> None:
    def program(this: Run) -> None:
        net = Broken(3, beside=1)
        this.compile(net)
        optimizer = adamw(net.parameters())
        for step in range(STEPS):
            values = {name: p * 1.0 for name, p in net.named_parameters()}
            x = torch.full((ROWS, WIDTH), float(step))
            loss = torch.func.functional_call(net, values, (x,)).square().mean()
            torch.autograd.backward(loss)
            optimizer.step()
            this.record(loss, net, others=states(optimizer))
            optimizer.zero_grad()

    reference = run(program, device_budget=UNLIMITED, training_state="stays")
    assert_same(reference, run_least(program, 60 * LAYER_BYTES))


@pytest.mark.slow
@pytest.mark.parametrize(
    "kernels", ["aot_eager", pytest.param("inductor", marks=pytest.mark.exhaustive)]
)
def test_evaluation_does_not_read_through_the_file(kernels: str) -> None:
    """Weights that are away come to where the graph wants them."""
    seen: list[int] = []

    def program(this: Run) -> None:
        model = Broken(4, beside=0)
        this.compile(model)
        _train(this, model, lambda: seen.append(evaluated(model)))

    def evaluated(model: nn.Module) -> int:
        alive = [s.keeper.state for s in sessions() if s.keeper.state is not None]
        for state in alive:
            state.tidy()
        with torch.no_grad():
            model(torch.ones(ROWS, WIDTH))
        shown = [block for state in alive for block in list(pages_of(state.arena).shown)]
        away = [block for block in shown if block.place is Place.AWAY]
        return sum(pages.touched_bytes(block.address, block.nbytes) for block in away)

    options: dict[str, Any] = {"kernels": kernels}
    reference = run(program, device_budget=UNLIMITED, training_state="stays", **options)
    budget = budget_beside_others(26 * LAYER_BYTES)
    limited = run(program, device_budget=budget, training_state="moves", **options)
    assert_same(reference, limited)
    assert not any(seen)


@pytest.mark.slow
def test_gradients_of_a_model_that_is_called_twice_are_added_where_they_are() -> None:
    """Autograd adds up all of a graph's at once: in memory of their own they would all be there."""
    inside: list[bool] = []

    def program(this: Run) -> None:
        blocks = [Block() for _ in range(8)]
        model = nn.Sequential(*blocks)
        for block in blocks:
            this.compile(block)
            weight: Any = block.linear.weight
            weight.register_post_accumulate_grad_hook(lambda p: inside.append(_moves(p.grad)))
        optimizer = adamw(model.parameters())
        random = torch.Generator().manual_seed(3)
        for _ in range(STEPS):
            one, other = (model(torch.randn(ROWS, WIDTH, generator=random)) for _ in range(2))
            loss = one.square().mean() - other.abs().mean()
            torch.autograd.backward(loss)
            optimizer.step()
            this.record(loss, model, others=states(optimizer))
            optimizer.zero_grad()

    reference = run(program, device_budget=UNLIMITED, training_state="stays")
    inside.clear()
    limited = run_least(program, 16 * LAYER_BYTES)
    assert_same(reference, limited)
    assert len(inside) >= STEPS * 8
    assert all(inside)


@pytest.mark.slow
def test_what_others_have_compiled_stays() -> None:
    other = Block().requires_grad_(False)
    other.compile(backend="aot_eager")
    beside = Block().requires_grad_(False)
    beside.compile(backend="teraplan", options={"device_budget": "1GiB", "kernels": "aot_eager"})
    program = one_by_one(depth=8)
    run(program, device_budget=budget_beside_others(20 * LAYER_BYTES), training_state="moves")
    for module in (other, beside):
        assert moving().arena.block_of(module.linear.weight) is None


@pytest.mark.slow
def test_a_later_graph_that_needs_more_has_it_in_the_first_step() -> None:
    left: list[int] = []
    budget = 0
    program = before_a_wide_one(lambda: left.append(budget - moving().limit_bytes))
    reference = run(
        before_a_wide_one(lambda: None), device_budget=UNLIMITED, training_state="stays"
    )
    others = budget_beside_others(0)
    budget = others + 40 * LAYER_BYTES + 4 * WIDE_BYTES
    limited = run(program, device_budget=budget, training_state="moves")
    assert_same(reference, limited)
    assert left[0] - others >= 2 * WIDE_BYTES  # the logits and their gradient


def test_a_later_graph_that_needs_far_more_than_there_is_is_refused_before_it_runs() -> None:
    stepped: list[bool] = []
    program = before_a_wide_one(lambda: stepped.append(True))
    budget = budget_beside_others(44 * LAYER_BYTES)
    with pytest.raises(InfeasibleBudgetError, match="they predict to be enough") as raised:
        run(program, device_budget=budget, training_state="moves")
    assert not stepped
    assert raised.value.least_budget_bytes > budget


@pytest.mark.parametrize("short_of_memory", [False, True])
@pytest.mark.parametrize("depth", [1, 4])
def test_a_refusal_says_whether_there_are_graphs_that_it_knows_nothing_of(
    depth: int, short_of_memory: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It waits for the others, if there is memory for the forward."""
    if short_of_memory:
        monkeypatch.setattr(CpuDevice, "capacity_bytes", lambda _: 0)
    with pytest.raises(InfeasibleBudgetError, match="they predict to be enough") as raised:
        run(one_by_one(depth), device_budget=budget_beside_others(1), training_state="moves")
    told = "graphs still to run may need more" in str(raised.value)
    assert told == (short_of_memory and depth > 1), raised.value
