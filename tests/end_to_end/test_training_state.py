"""Parameters, gradients and optimizer state under a budget that they do not fit: equal bits."""

import copy
import gc
import io
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import teraplan
from teraplan.errors import (
    ConfigError,
    FallbackRefusedError,
    InfeasibleBudgetError,
    UnsupportedError,
)
from teraplan.runtime.cpu.device import CpuDevice
from teraplan.runtime.process import census
from tests.end_to_end.costs import by_cost
from tests.end_to_end.moving import (
    BUDGET,
    DEPTH,
    ROWS,
    STEPS,
    WIDTH,
    Averages,
    Optimizers,
    adamw,
    budget_beside_others,
    check,
    from_meta,
    model,
    moving,
    run_moving,
    states,
    training,
)
from tests.end_to_end.training import MLP, Program, Run, run, sessions
from tests.runtime.state_arena import pages_of

OPTIMIZERS: dict[str, Optimizers] = {
    "AdamW": adamw,
    "AdamW fused": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
    "AdamW foreach": lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=True, amsgrad=True),
    "SGD momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=1e-3, momentum=0.5, centered=True),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=1e-3),
    "RAdam": lambda p: torch.optim.RAdam(p, lr=1e-3),
}


RARE = ("Adagrad", "RMSprop", "NAdam", "RAdam")
NAMES = by_cost(OPTIMIZERS, quick=("AdamW",), rare=RARE)


@pytest.mark.parametrize("name", NAMES)
def test_optimizers(name: str) -> None:
    check(training(OPTIMIZERS[name]))


def test_state_gets_no_more_memory_than_it_needs() -> None:
    """Of a budget that is ample, the rest is left to activations."""
    last = run_moving(training(adamw), budget=64 << 20).final
    assert last.moving_state_budget_bytes == 4 * 4 * WIDTH * WIDTH * DEPTH
    assert last.state_written_bytes == last.state_read_bytes == 0


@pytest.mark.slow
@pytest.mark.parametrize("set_to_none", [True, False])
def test_accumulation(set_to_none: bool) -> None:
    check(training(adamw, accumulate=4, set_to_none=set_to_none))


@pytest.mark.slow
def test_clipping_as_torch_does_it() -> None:
    check(training(adamw, clip=1e-3))


@pytest.mark.slow
def test_frozen_parameters_are_written_once() -> None:
    def make_model() -> MLP:
        net = model()
        for layer in net.layers[:4]:
            layer.weight.requires_grad_(False)
        return net

    state = check(training(adamw, make_model=make_model), budget=7 << 18)
    frozen = 4 * WIDTH * WIDTH * 4
    trained = 2 * WIDTH * WIDTH * 4
    # Each step may write a parameter, its gradient and two states of what is trained.
    # Of the whole run: what leaves or comes where one step ends and the next begins counts in
    # either, and on a busy machine that is several tensors.
    log = state.arena.log
    assert log.traffic.written_bytes <= frozen + 4 * trained * (STEPS + 1)
    assert state.last_step.written_bytes > 0
    assert log.traffic.read_bytes > log.traffic.written_bytes


def test_graphs_that_save_nothing_that_moves() -> None:
    def make_model() -> MLP:
        return MLP(width=WIDTH, depth=DEPTH, rows=8)

    state = check(training(adamw, make_model=make_model))
    assert state.last_step.read_bytes > 0


@pytest.mark.slow
def test_a_model_from_the_meta_device() -> None:
    """The same random numbers give the same model, and it has never been whole in memory."""
    state = check(from_meta)
    assert state.arena.memory.held.peak_bytes < state.arena.total_bytes
    torch.manual_seed(7)
    plain = model()
    torch.manual_seed(7)
    with torch.device("meta"):
        net = model()
    for mine, its in zip(teraplan.materialize(net).parameters(), plain.parameters(), strict=True):
        assert torch.equal(mine, its)


def test_a_module_that_cannot_set_its_parameters_is_named() -> None:
    class Scale(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.factor = nn.Parameter(torch.ones(3))

    with torch.device("meta"):
        net = nn.Sequential(Scale())
    with pytest.raises(UnsupportedError, match=r"0 \(Scale\) has parameters .* initialize="):
        teraplan.materialize(net)


def test_values_left_on_the_meta_device_are_named() -> None:
    def replace(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            module.bias = nn.Parameter(torch.empty_like(module.bias, device="meta"))

    with torch.device("meta"):
        net = model()
    with pytest.raises(UnsupportedError, match=r"layers\.0 \(Linear\) has bias on the meta device"):
        teraplan.materialize(net, initialize=replace)


def test_what_initializes_is_a_function() -> None:
    with torch.device("meta"):
        net = model()
    with pytest.raises(ConfigError, match=r"initialize is a dict; .* load_state_dict"):
        teraplan.materialize(net, initialize={})  # type: ignore[arg-type]


@pytest.mark.slow
def test_several_storage_directories(disk: Path) -> None:
    """Tensors go to both files, and are shown from both."""

    def make_model() -> MLP:
        return MLP(width=512, depth=8, rows=32)

    def between(net: MLP, optimizer: torch.optim.Optimizer, step: int) -> None:
        if step == 2:
            with torch.no_grad():
                next(net.parameters()).mul_(0.5)

    directories = [disk / "a", disk / "b"]
    for directory in directories:
        directory.mkdir()
    state = check(
        training(adamw, make_model=make_model, between=between),
        budget=24 << 20,
        storage=[str(directory) for directory in directories],
    )
    assert all(store.written_bytes > 0 for store in pages_of(state.arena).tiers.storage.stores)


class Tied(MLP):
    """The last layer's weight is the first one's."""

    def __init__(self) -> None:
        super().__init__(width=WIDTH, depth=DEPTH, rows=ROWS)
        self.layers[-1].weight = self.layers[0].weight


@pytest.mark.slow
def test_tied_weights() -> None:
    check(training(adamw, make_model=Tied))


@pytest.mark.slow
def test_groups_and_a_scheduler() -> None:
    def program(this: Run) -> None:
        net = model()
        this.compile(net)
        first, second = list(net.layers[:3].parameters()), list(net.layers[3:].parameters())
        groups = [{"params": first, "lr": 1e-2}, {"params": second, "lr": 1e-3}]
        optimizer = torch.optim.AdamW(groups, weight_decay=0.1)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, [1e-2, 1e-3], total_steps=20)
        for step in range(STEPS):
            loss = net(*net.batch(step))
            torch.autograd.backward(loss)
            optimizer.step()
            scheduler.step()
            assert [g["params"] for g in optimizer.param_groups] == [first, second]
            this.record(loss, net, others=states(optimizer))
            optimizer.zero_grad()

    check(program)


@pytest.mark.slow
def test_closure_is_called_once() -> None:
    def program(this: Run) -> None:
        net = model()
        this.compile(net)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
        calls: list[int] = []
        for step in range(STEPS):

            def closure(step: int = step) -> Tensor:
                calls.append(step)
                optimizer.zero_grad()
                loss: Tensor = net(*net.batch(step))
                torch.autograd.backward(loss)
                return loss

            result = optimizer.step(closure)
            assert isinstance(result, Tensor)
            this.record(result, net, others=states(optimizer))
        assert calls == list(range(STEPS))

    check(program)


@pytest.mark.slow
def test_hooks_of_the_user_see_a_whole_optimizer() -> None:
    def program(this: Run) -> None:
        net = model()
        this.compile(net)
        parameters = list(net.parameters())
        optimizer = adamw(parameters)
        seen: list[int] = []

        def before(*_: object) -> None:
            seen.append(len(optimizer.param_groups[0]["params"]))
            for p in parameters:
                assert p.grad is not None
                p.grad.mul_(0.5)

        def after(*_: object) -> None:
            seen.append(len(optimizer.param_groups[0]["params"]))

        optimizer.register_step_pre_hook(before)
        optimizer.register_step_post_hook(after)
        for step in range(STEPS):
            loss = net(*net.batch(step))
            torch.autograd.backward(loss)
            optimizer.step()
            this.record(loss, net, others=states(optimizer))
            optimizer.zero_grad()
        assert seen == [len(parameters)] * 2 * STEPS

    check(program)


@pytest.mark.slow
def test_what_users_do_between_steps() -> None:
    """An average of the weights, weights swapped in place, a step by hand, evaluation."""
    averages = Averages()

    def between(net: MLP, optimizer: torch.optim.Optimizer, step: int) -> None:
        averages.take_in(net, step)
        if step == 2:
            averages.put_into(net)
        with torch.no_grad():
            if step == 3:
                for p in net.parameters():
                    p.data.numpy()[...] *= 0.5
            net.eval()
            net(*net.batch(100))
            net.train()

    check(training(adamw, between=between), budget=7 << 19)


@pytest.mark.slow
def test_checkpoints_and_copies() -> None:
    """What is saved is what plain PyTorch saves, and loads there; loading works in place."""
    saved: list[bytes] = []

    def between(net: MLP, optimizer: torch.optim.Optimizer, step: int) -> None:
        if step == 0:
            twin = copy.deepcopy(net)
            for mine, its in zip(net.parameters(), twin.parameters(), strict=True):
                assert torch.equal(mine, its)
            buffer = io.BytesIO()
            torch.save([net.state_dict(), optimizer.state_dict()], buffer)
            saved.append(buffer.getvalue())
            weights, moments = torch.load(io.BytesIO(saved[-1]))
            plain = model()
            plain.load_state_dict(weights)
            plain_optimizer = adamw(plain.parameters())
            plain_optimizer.load_state_dict(moments)
            for p, its in zip(net.parameters(), plain.parameters(), strict=True):
                assert torch.equal(p, its)
            for one, other in zip(states(optimizer), states(plain_optimizer), strict=True):
                assert torch.equal(one, other)
        if step == 3:
            weights, moments = torch.load(io.BytesIO(saved[-1]))
            net.load_state_dict(weights)
            optimizer.load_state_dict(moments)

    check(training(adamw, between=between))
    with_it, without_it = saved[1], saved[0]
    assert with_it == without_it, "a checkpoint is the same bytes as without moving"


def test_tensors_stay_readable_when_everything_is_over() -> None:
    kept: list[Tensor] = []

    def keeping(this: Run) -> None:
        net = model()
        this.compile(net)
        optimizer = adamw(net.parameters())
        for step in range(3):
            torch.autograd.backward(net(*net.batch(step)))
            optimizer.step()
            this.record(torch.zeros(1), net)
            optimizer.zero_grad()
        kept.extend(p.detach() for p in net.parameters())

    run_moving(keeping)
    expected, arena = [k.clone() for k in kept], moving().arena
    for session in sessions():
        session.close()
    torch._dynamo.reset()
    gc.collect()
    assert all(map(torch.equal, kept, expected))
    assert len(arena.blocks) == DEPTH, "the weights, and nothing of the optimizer"
    kept.clear()
    assert not arena.blocks, "their memory goes with them"
    assert arena.held_bytes == 0


@pytest.mark.slow
def test_where_it_is_not_implemented_it_stays_and_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(CpuDevice, "why_state_stays", "not implemented")
    stays = run(training(adamw), device_budget=1 << 30, training_state="moves")
    (fallback,) = stays.statuses[-1].fallbacks
    assert "parameters stay on the device on CPU: not implemented" in fallback
    with pytest.raises(FallbackRefusedError, match="parameters stay on the device"):
        run(training(adamw), device_budget=1 << 30, training_state="moves", strict=True)


def test_the_least_budget_is_that_of_state_and_rest_together() -> None:
    with pytest.raises(InfeasibleBudgetError, match="for the training state that moves") as e:
        run(training(adamw), device_budget=1 << 20, training_state="moves")
    assert e.value.least_budget_bytes > 1 << 20


def _least(program: Program, budget: int) -> int:
    """What a refused budget names, beside what other runs have left."""
    others = budget_beside_others(0)
    with pytest.raises(InfeasibleBudgetError) as e:
        run_moving(program, budget=budget)
    return e.value.least_budget_bytes - others


@pytest.mark.slow
def test_the_least_budget_is_the_same_whatever_was_given() -> None:
    """Also where a graph has nothing to move: few rows, and weights that are too small."""
    program = training(adamw, make_model=lambda: MLP(width=96, depth=40, rows=8))
    named = [_least(program, budget) for budget in (1 << 16, 3 << 20)]
    assert abs(named[1] - named[0]) < 1 << 18
    run_moving(program, budget=max(named))


@pytest.mark.slow
def test_what_another_session_has_moved_away_takes_no_memory_of_the_device() -> None:
    kept: list[torch.optim.Optimizer] = []

    def make_optimizer(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        kept.append(adamw(parameters))
        return kept[-1]

    run_moving(training(make_optimizer), budget=BUDGET - BUDGET // 8)
    others = Run({"kernels": "aot_eager", "device_budget": 100 << 30, "training_state": "stays"})
    training(adamw)(others)
    (staying,) = [s for s in sessions() if s.keeper.state is None]
    holds, storages = moving().arena.memory.holds, census.storages("cpu")
    away_bytes = sum(s.nbytes() for s in storages if holds(s.data_ptr()) is False)
    assert away_bytes > 0
    assert staying.device.state_bytes() == census.tensor_nbytes("cpu") - away_bytes
