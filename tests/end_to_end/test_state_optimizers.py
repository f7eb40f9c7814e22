"""Optimizers whose parameters and state move: attached, detached, by third parties, refused."""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

import teraplan
from teraplan.errors import UnsupportedError
from tests.end_to_end.costs import by_cost
from tests.end_to_end.moving import (
    DEPTH,
    LESS,
    STEPS,
    Optimizers,
    adamw,
    budget_beside_others,
    check,
    little_for_state,
    model,
    moving,
    run_least,
    run_moving,
    states,
    training,
)
from tests.end_to_end.training import Run, assert_same, run, sessions


class Lion(torch.optim.Optimizer):
    """The sign of a momentum, written from the formula (arXiv 2302.06675, algorithm 2)."""

    def __init__(self, parameters: Iterable[Tensor], lr: float = 1e-3) -> None:
        super().__init__(parameters, {"lr": lr, "betas": (0.9, 0.99), "weight_decay": 0.1})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            first, second = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                momentum = self.state[p].setdefault("momentum", torch.zeros_like(p))
                update = momentum.lerp(p.grad, 1 - first).sign_()
                p.mul_(1 - group["lr"] * group["weight_decay"]).sub_(update, alpha=group["lr"])
                momentum.lerp_(p.grad, 1 - second)


@pytest.mark.slow
def test_a_third_party_optimizer() -> None:
    state = check(training(Lion), budget=LESS)
    assert any("momentum" in block.label for block in state.arena.blocks)


class Replacing(Lion):
    """Gives parameters other memory, as `p.data = p.data - ..` does."""

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        super().step()
        for p in self.param_groups[0]["params"]:
            p.data = p.data.clone()


@pytest.mark.slow
def test_parameters_that_a_step_gives_other_memory_go_on_moving() -> None:
    state = check(training(Replacing), budget=LESS)
    assert sum("parameter" in block.label for block in state.arena.blocks) == DEPTH


class Counting(Lion):
    """Keeps the number of its steps: in attributes, in the group, and in `state` under names.

    MADGRAD (arXiv 2101.11075) as its authors wrote it does the last.
    """

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        super().__init__(parameters)
        self.count, self.tensor, self.log = 0, torch.zeros(()), [0]
        self.param_groups[0]["steps"] = 0

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        self.count += 1
        self.tensor += 1
        self.log.append(self.count)
        self.param_groups[0]["steps"] += 1
        loose = cast("dict[Any, Any]", self.state)
        loose.setdefault("k", torch.zeros(1, dtype=torch.long)).add_(1)
        loose.setdefault("of all", {"steps": torch.zeros(())})["steps"] += 1
        for group in self.param_groups:
            group["lr"] = 1e-3 / (self.count + int(loose["k"]))
        super().step()


@pytest.mark.slow
def test_what_an_optimizer_counts_is_counted_once_in_a_step() -> None:
    made: list[Counting] = []

    def make(parameters: Iterable[nn.Parameter]) -> Counting:
        made.append(Counting(parameters))
        return made[-1]

    check(training(make), budget=LESS)
    optimizer = made[-1]
    assert optimizer.count == optimizer.tensor == optimizer.param_groups[0]["steps"] == STEPS
    assert optimizer.log == list(range(STEPS + 1))
    loose = cast("dict[Any, Any]", optimizer.state)
    assert loose["k"].tolist() == [STEPS]
    assert loose["of all"]["steps"] == STEPS


class Noisy(Lion):
    """Adds random numbers to its updates, as Langevin dynamics does."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        super().step()
        for group in self.param_groups:
            for p in group["params"]:
                p.add_(torch.randn_like(p), alpha=1e-3)


@pytest.mark.slow
def test_random_numbers_are_drawn_in_the_same_order() -> None:
    check(training(Noisy), budget=LESS)


class Lookahead(torch.optim.Optimizer):
    """Goes half of the way back every second step of the optimizer within (arXiv 1907.08610)."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner = inner
        super().__init__(inner.param_groups, {})
        self.param_groups = inner.param_groups
        self.count = 0

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        self.inner.step()
        self.count += 1
        for group in self.param_groups:
            for p in group["params"]:
                slow = self.state[p].setdefault("slow", p.clone())
                if self.count % 2 == 0:
                    p.copy_(slow.lerp_(p, 0.5))


@pytest.mark.slow
def test_an_optimizer_around_another() -> None:
    check(training(lambda p: Lookahead(adamw(p))))


class Warm:
    """Counts how often it is asked."""

    def __init__(self) -> None:
        self.asked = 0

    def __call__(self) -> float:
        self.asked += 1
        return 1e-3 * min(1.0, self.asked / 3)


class Scheduled(Lion):
    """An object of its own says how far each step goes."""

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        super().__init__(parameters)
        self.warm = Warm()

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        self.param_groups[0]["lr"] = self.warm()
        super().step()


@pytest.mark.slow
def test_a_step_with_objects_that_may_count_runs_as_a_whole() -> None:
    deeper = partial(model, depth=DEPTH + 2)
    program = training(Scheduled, make_model=deeper, steps=STEPS + 4)
    limited = run_moving(program, LESS)
    assert_same(run(program, device_budget=100 << 30, training_state="stays"), limited)
    assert "Scheduled keeps an object in warm that" in str(limited.final.fallbacks)
    assert limited.final.state_read_bytes > 0


class Both(torch.optim.Optimizer):
    """Steps one optimizer for the matrices and one for the rest, both in a list."""

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        every = list(parameters)
        super().__init__(every, {})
        matrices, others = ([p for p in every if (p.ndim > 1) is two] for two in (True, False))
        self.all_of_them = [adamw(matrices), torch.optim.SGD(others, lr=0.1)]  # type: ignore[arg-type]

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for optimizer in self.all_of_them:
            optimizer.step()


@pytest.mark.slow
def test_an_optimizer_around_several() -> None:
    limited = run_moving(training(Both))
    assert_same(run(training(Both), device_budget=100 << 30, training_state="stays"), limited)
    assert not any("Both" in text for text in limited.final.fallbacks), "they run in buckets"


class Clipping(Lion):
    """Clips by the norm of all gradients within its step, as some LAMBs do."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        gradients = [p.grad for group in self.param_groups for p in group["params"]]
        norm = torch.stack([g.norm() for g in gradients]).norm()
        for gradient in gradients:
            gradient.div_(norm.clamp_min(1e-3))
        super().step()


def test_one_that_looks_at_all_gradients_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedError, match=r"Clipping does not update each .* teraplan.detach"):
        run_moving(training(Clipping))


class ClippingLater(Clipping):
    """Begins with that in its third step."""

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        super().__init__(parameters)
        self.count = 0

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        self.count += 1
        Clipping.step(self) if self.count > 2 else Lion.step(self)


def test_one_that_begins_later_to_look_at_all_gradients_is_refused_then() -> None:
    optimizers: list[ClippingLater] = []

    def make(parameters: Iterable[nn.Parameter]) -> ClippingLater:
        optimizers.append(ClippingLater(parameters))
        return optimizers[-1]

    with pytest.raises(UnsupportedError, match=r"ClippingLater does not update each"):
        run_moving(training(make))
    assert optimizers[-1].count == 2


class InPairs(Lion):
    """Needs its parameters two by two, as some for LoRA's factors do."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for _ in zip(group["params"][::2], group["params"][1::2], strict=True):
                pass
        super().step()


def test_one_whose_step_fails_for_some_parameters_alone_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedError, match=r"InPairs fails for one .* shorter .*detach"):
        run_moving(training(InPairs))


class WithAll(Lion):
    """Fails without the others where a large parameter is among those that it has."""

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        parameters = self.param_groups[0]["params"]
        if len(parameters) < 4 and any(p.ndim > 1 for p in parameters):
            raise ValueError("all or nothing")


def test_one_whose_step_fails_in_a_bucket_is_told_what_a_bucket_is() -> None:
    with pytest.raises(ValueError, match="all or nothing") as raised:
        run_moving(training(WithAll))
    assert any("some parameters at a time" in note for note in raised.value.__notes__)


class SharedStep(torch.optim.SGD):
    """Keeps a sum over all parameters in its group: not one parameter at a time."""

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            norms = [float(p.grad.norm()) for p in group["params"] if p.grad is not None]
            group["norm"] = sum(norms)
        super().step(closure)


def test_one_that_keeps_a_sum_over_all_is_refused_by_name() -> None:
    program = training(lambda p: SharedStep(p, lr=0.1))
    with pytest.raises(UnsupportedError, match=r"SharedStep does not update .* teraplan.detach"):
        run_moving(program)


def _lbfgs(optimizer_is: Callable[[torch.optim.Optimizer], object]) -> Callable[[Run], None]:
    def program(this: Run) -> None:
        net = model()
        this.compile(net)
        optimizer = torch.optim.LBFGS(net.parameters(), lr=0.1, max_iter=3, history_size=2)
        optimizer_is(optimizer)
        for step in range(3):

            def closure(step: int = step) -> Tensor:
                optimizer.zero_grad()
                loss: Tensor = net(*net.batch(step))
                torch.autograd.backward(loss)
                return loss

            loss = optimizer.step(closure)  # type: ignore[no-untyped-call]
            this.record(loss, net)

    return program


def test_lbfgs_is_refused_by_name() -> None:
    message = r"LBFGS updates all parameters together.* teraplan.detach"
    with pytest.raises(UnsupportedError, match=message):
        teraplan.attach(torch.optim.LBFGS(model().parameters()))
    with pytest.raises(UnsupportedError, match=message):
        run_moving(_lbfgs(lambda _: None), budget=16 << 20)


def _compiled(optimizer_is: Callable[[torch.optim.Optimizer], object]) -> Callable[[Run], None]:
    """The whole step is compiled: PyTorch compiles the optimizer's, too."""

    def program(this: Run) -> None:
        net = model(depth=3)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.5)
        optimizer_is(optimizer)

        def train(x: Tensor) -> Tensor:
            loss: Tensor = net(x)
            torch.autograd.backward(loss)
            optimizer.step()
            return loss

        options: Any = this.options
        compiled = torch.compile(train, backend="teraplan", options=options)
        for step in range(4):
            this.record(compiled(*net.batch(step)), net, others=states(optimizer))
            optimizer.zero_grad()

    return program


def test_a_compiled_step_is_refused_by_name() -> None:
    message = r"SGD.step\(\) is called by code that torch.compile compiles.* teraplan.detach"
    with pytest.raises(UnsupportedError, match=message):
        run_moving(_compiled(lambda _: None))


@pytest.mark.slow
def test_a_compiled_step_detached() -> None:
    program = _compiled(teraplan.detach)
    assert_same(run(program, device_budget=100 << 30), run_moving(program))


@pytest.mark.slow
@pytest.mark.parametrize("make", [Clipping, lambda p: SharedStep(p, lr=0.1)])
def test_detached_optimizers_may_do_what_they_like(
    make: Optimizers, monkeypatch: pytest.MonkeyPatch
) -> None:
    little_for_state(monkeypatch, 0.05)
    check(training(lambda p: teraplan.detach(make(p))), least=True)


@pytest.mark.slow
def test_lbfgs_detached(monkeypatch: pytest.MonkeyPatch) -> None:
    little_for_state(monkeypatch, 0.05)
    check(_lbfgs(teraplan.detach), budget=16 << 20)


@pytest.mark.slow
def test_attached_and_detached_between_steps() -> None:
    """The state that an optimizer has moves when it is attached, and stays away afterwards."""
    moved: list[bool] = []

    def between(_: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
        if step == 1:
            assert teraplan.attach(optimizer) is optimizer
        if step == 3:
            assert teraplan.detach(optimizer) is optimizer
        if step in (0, 1, STEPS - 1) and len(moved) < 6:
            moved.append(_moves(optimizer))

    check(training(lambda p: teraplan.detach(adamw(p)), between=between))
    assert moved == [False] * 3 + [False, True, True]


def _moves(optimizer: torch.optim.Optimizer) -> bool:
    found = [s.keeper.state for s in sessions() if s.keeper.state is not None]
    large = [t for t in states(optimizer) if t.nbytes >= 1 << 16]
    return bool(found) and all(found[0].arena.block_of(t) is not None for t in large)


def test_only_optimizers_are_attached() -> None:
    with pytest.raises(UnsupportedError, match=r"a Tensor is no torch.optim.Optimizer"):
        teraplan.attach(torch.ones(1))  # type: ignore[arg-type]
    with pytest.raises(UnsupportedError, match=r"a int is no torch.optim.Optimizer"):
        teraplan.detach(3)  # type: ignore[arg-type]


@pytest.mark.slow
def test_master_weights_move_with_an_attached_optimizer() -> None:
    """A model in bfloat16, whose optimizer updates copies in float32."""

    def program(this: Run) -> None:
        net = model().bfloat16()
        this.compile(net)
        parameters = list(net.parameters())
        masters = [p.detach().float().requires_grad_() for p in parameters]
        optimizer = teraplan.attach(adamw(masters))  # type: ignore[arg-type]
        for step in range(STEPS):
            loss = net(net.batch(step)[0].bfloat16())
            torch.autograd.backward(loss)
            for master, p in zip(masters, parameters, strict=True):
                assert p.grad is not None
                master.grad = p.grad.float()
            optimizer.step()
            with torch.no_grad():
                for master, p in zip(masters, parameters, strict=True):
                    p.copy_(master)
            this.record(loss, net, others=[*masters, *states(optimizer)])
            net.zero_grad()
            optimizer.zero_grad()

    state = check(program)
    masters = [b for b in state.arena.blocks if "parameter" in b.label]
    assert len(masters) == 12, "six in bfloat16 are read by graphs, six in float32 by the optimizer"


def test_a_step_that_fails_in_the_midst_says_how_far_it_came() -> None:
    calls: list[int] = []
    fails = [False]
    trained: set[int] = set()

    class Failing(Lion):
        def step(self, closure: None = None) -> None:  # type: ignore[override]
            if not trained.isdisjoint(map(id, self.param_groups[0]["params"])):  # no copies of them
                calls.append(len(self.param_groups[0]["params"]))
            if fails[0] and len(calls) == 3:
                raise ValueError("the third bucket")
            super().step()

    def program(this: Run) -> None:
        net = model()
        this.compile(net)
        optimizer = Failing(net.parameters())
        trained.update(map(id, net.parameters()))
        for step in range(3):
            torch.autograd.backward(net(*net.batch(step)))
            fails[0] = step == 2
            calls.clear()
            optimizer.step()

    with pytest.raises(ValueError, match="the third bucket") as raised:
        run_moving(program)
    note = f"is half done: {sum(calls[:2])} of {len(list(model().parameters()))} parameters"
    assert any(note in text for text in raised.value.__notes__)


def test_a_step_that_fails_leaves_the_optimizer_whole() -> None:
    """Also when it fails in the part that is left to the user's own call."""

    first: list[Tensor] = []

    class Failing(Lion):
        fails = False

        def step(self, closure: None = None) -> None:  # type: ignore[override]
            super().step()
            if self.fails and any(p is first[0] for p in self.param_groups[0]["params"]):
                raise KeyboardInterrupt

    def program(this: Run) -> None:
        net = model()
        this.compile(net)
        parameters = list(net.parameters())
        first[:] = parameters[:1]  # from the second step on the last to be updated
        optimizer = Failing(parameters)
        for step in range(4):
            torch.autograd.backward(net(*net.batch(step)))
            optimizer.fails = step == 2
            if step != 2:
                optimizer.step()
            else:
                with pytest.raises(KeyboardInterrupt):
                    optimizer.step()
            assert optimizer.param_groups[0]["params"] == parameters
            whole: Any = optimizer.state_dict()
            assert len(whole["param_groups"][0]["params"]) == len(parameters)
            optimizer.zero_grad()
            assert all(p.grad is None for p in parameters)

    run_moving(program)
    assert all(block.uses == 0 for block in moving().arena.blocks)


MORE: dict[str, Optimizers] = {
    "Adam": lambda p: torch.optim.Adam(p, lr=1e-2),
    "Adamax": lambda p: torch.optim.Adamax(p, lr=1e-3),
    "Adadelta": lambda p: torch.optim.Adadelta(p, lr=0.1),
    "ASGD": lambda p: torch.optim.ASGD(p, lr=0.1),
    "Rprop": lambda p: torch.optim.Rprop(p, lr=1e-3),
    "Adafactor": lambda p: torch.optim.Adafactor(p, lr=1e-2),
    "lr in a tensor": lambda p: torch.optim.AdamW(p, lr=torch.tensor(1e-2), foreach=False),
}


@pytest.mark.parametrize("name", by_cost(MORE, rare=("Adamax", "Adadelta", "Rprop")))
def test_more_optimizers_of_torch(name: str) -> None:
    check(training(MORE[name]), budget=5 << 19 if name in ("ASGD", "Adafactor") else 3 << 20)


class MostlyEmbedding(nn.Module):
    def __init__(self, rows: int, width: int) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(rows, width), nn.Linear(width, 8)

    def forward(self, indices: Tensor) -> Tensor:
        result: Tensor = self.head(self.embedding(indices))
        return result.square().mean()


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_an_optimizer_that_keeps_little_needs_little(momentum: float) -> None:
    """Where one parameter is most of the model, what its update takes is the least budget."""
    rows, width = 1 << 13, 128
    whole = rows * width * 4 * (3 if momentum else 2)

    def program(this: Run) -> None:
        net = MostlyEmbedding(rows, width)
        this.compile(net)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=momentum)
        for step in range(STEPS):
            indices = torch.randint(rows, (64,), generator=torch.Generator().manual_seed(step))
            loss = net(indices)
            loss.backward()
            optimizer.step()
            this.record(loss, net, others=states(optimizer))
            optimizer.zero_grad()

    reference = run(program, device_budget=100 << 30, training_state="stays")
    others = budget_beside_others(0)
    limited = run_least(program, 1 << 20)
    assert_same(reference, limited)
    given = limited.options["device_budget"]
    assert isinstance(given, int)
    of_a_gradient = rows * width * 4  # while a graph makes it
    assert given - others <= whole + of_a_gradient + (2 << 20)
