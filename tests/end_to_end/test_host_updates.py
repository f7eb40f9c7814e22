"""Updates on the host's cores: the bits of the plain optimizer, and what users do to it."""

import copy
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import teraplan
from teraplan.errors import UnsupportedError
from tests.end_to_end.costs import by_cost
from tests.end_to_end.hosting import check, host_updates, hosted, plain
from tests.end_to_end.moving import (
    STEPS,
    Optimizers,
    adamw,
    budget_beside_others,
    looping,
    model,
    moving,
    sgd,
    states,
    training,
    weight,
)
from tests.end_to_end.test_state_optimizers import Clipping, Counting, Lion, Lookahead, Noisy
from tests.end_to_end.training import MLP, Run, assert_same, run

pytestmark = pytest.mark.usefixtures("small_buckets")


class Centering(Lion):
    """Writes to gradients through `.data`, which counts no version."""

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            p.grad.data.sub_(p.grad.data.mean())
        super().step()


class Transposing(Lion):
    """Gives gradients other memory, with their elements in another order."""

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            p.grad.data = p.grad.mul(0.5).t().contiguous().t() if p.ndim == 2 else p.grad * 0.5
        super().step()


OPTIMIZERS: dict[str, Optimizers] = {
    "AdamW": lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=False),
    "AdamW foreach": lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=True),
    "AdamW fused": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
    "SGD": sgd,
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2),
}
MORE: dict[str, Optimizers] = {
    "AdamW amsgrad": lambda p: torch.optim.AdamW(p, lr=1e-2, amsgrad=True),
    "AdamW lr in a tensor": lambda p: torch.optim.AdamW(p, lr=torch.tensor(1e-2), foreach=False),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=1e-3, momentum=0.9),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=1e-2),
    "RAdam": lambda p: torch.optim.RAdam(p, lr=1e-2),
    "Adafactor": lambda p: torch.optim.Adafactor(p, lr=1e-2),
    "Lion": Lion,
    "Counting": Counting,
    "Centering": Centering,
    "Transposing": Transposing,
    "around another": lambda p: Lookahead(adamw(p)),
}


@pytest.mark.parametrize("name", by_cost(OPTIMIZERS, quick=("AdamW", "SGD")))
def test_optimizers(name: str) -> None:
    check(training(OPTIMIZERS[name]))


RARE = ("RMSprop", "NAdam", "RAdam", "AdamW amsgrad", "Centering", "around another")


@pytest.mark.parametrize("name", by_cost(MORE, rare=RARE))
def test_more_optimizers(name: str) -> None:
    check(training(MORE[name]))


@pytest.mark.slow
def test_all_but_the_smallest_on_the_host() -> None:
    found = check(training(adamw, accumulate=2, clip=0.01), share=1.0, updates=6)
    assert found.statuses[-1].host_state_bytes == 6 * 2 * 192 * 192 * 4
    assert found.statuses[-1].host_update_ns > 0
    assert "updates on host            6 in" in str(found.statuses[-1])


@pytest.mark.slow
def test_last_layers_come_first() -> None:
    on_host: list[bool] = []

    def between(net: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
        assert isinstance(net, MLP)
        chosen = host_updates().placement
        on_host[:] = [p in chosen._placed[optimizer].chosen for p in net.parameters()]

    hosted(training(adamw, between=between))
    assert on_host[::2] == [False, False, False, True, True, True], "weights"
    assert on_host[1::2] == [False] * 6, "biases are too small to be worth it"


@pytest.mark.slow
def test_groups_and_a_scheduler() -> None:
    def program(this: Run) -> None:
        net = model()
        this.compile(net)
        parameters = list(net.parameters())
        groups = [{"params": parameters[:7], "lr": 1e-2}, {"params": parameters[7:], "lr": 1e-3}]
        optimizer = torch.optim.AdamW(groups)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        seen: list[float] = []
        optimizer.register_step_pre_hook(lambda o, *_: seen.append(o.param_groups[0]["lr"]))
        for step in range(STEPS):
            loss = net(*net.batch(step))
            torch.autograd.backward(loss)
            optimizer.step()
            scheduler.step()
            this.record(loss, net, others=states(optimizer))
            optimizer.zero_grad(set_to_none=False)
        assert seen == [1e-2 * 0.5**step for step in range(STEPS)]

    check(program)


@pytest.mark.slow
def test_master_weights() -> None:
    """A model in bfloat16, whose attached optimizer updates copies in float32."""

    def program(this: Run) -> None:
        net = model().bfloat16()
        this.compile(net)
        parameters = list(net.parameters())
        masters = [p.detach().float().requires_grad_() for p in parameters]
        everything: list[Tensor] = [*masters, *parameters]
        optimizer = teraplan.attach(torch.optim.AdamW(everything, lr=1e-2))
        for step in range(STEPS):
            loss = net(net.batch(step)[0].bfloat16())
            torch.autograd.backward(loss)
            for master, p in zip(masters, parameters, strict=True):
                assert p.grad is not None
                master.grad, p.grad = p.grad.float(), None
            optimizer.step()
            with torch.no_grad():
                for master, p in zip(masters, parameters, strict=True):
                    p.copy_(master)
            this.record(loss, net, others=[*masters, *states(optimizer)])
            optimizer.zero_grad()

    check(program, share=1.0, updates=6)


@pytest.mark.slow
def test_weights_in_bfloat16() -> None:
    def step_of(net: MLP, optimizer: torch.optim.Optimizer, step: int) -> Tensor:
        loss: Tensor = net(net.batch(step)[0].bfloat16())
        torch.autograd.backward(loss)
        optimizer.step()
        return loss

    check(looping(step_of, lambda: model().bfloat16()))


@pytest.mark.slow
def test_tied_and_frozen_weights() -> None:
    def make() -> MLP:
        net = model()
        weight(net, 4).requires_grad = False
        net.layers[2] = net.layers[5]
        return net

    check(training(adamw, make_model=make), share=0.7, updates=3)


@pytest.mark.slow
def test_parameters_over_one_memory_stay_on_the_device() -> None:
    def make() -> MLP:
        net = model()
        weight(net, 4).data = weight(net, 5).data
        return net

    check(training(adamw, make_model=make), updates=3)


@pytest.mark.slow
def test_parameters_frozen_added_and_thawed() -> None:
    def between(net: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
        assert isinstance(net, MLP)
        weight(net, 5).requires_grad_(step != 1)
        if step == 2:
            optimizer.add_param_group({"params": [nn.Parameter(torch.ones(200, 200))], "lr": 0.1})

    program = training(adamw, between=between)
    assert_same(plain(program), hosted(program))


def test_closure_is_called_once_and_hooks_see_a_whole_optimizer() -> None:
    calls: list[int] = []

    def step_of(net: MLP, optimizer: torch.optim.Optimizer, step: int) -> Tensor:
        def closure() -> float:
            calls.append(step)
            loss: Tensor = net(*net.batch(step))
            torch.autograd.backward(loss)
            torch.nn.utils.clip_grad_norm_(net.parameters(), 0.01)
            return float(loss.detach())

        def whole(seen: torch.optim.Optimizer, *_: object) -> None:
            assert seen is optimizer
            assert len(seen.param_groups[0]["params"]) == 12
            assert len(seen.state) in (0, 12)

        handles = [
            optimizer.register_step_pre_hook(whole),
            optimizer.register_step_post_hook(whole),
        ]
        loss = optimizer.step(closure)
        for handle in handles:
            handle.remove()
        return torch.tensor(loss)

    program = looping(step_of)
    found = hosted(program)
    assert_same(plain(program), found)
    numbers = [status.host_updates for status in found.statuses]
    assert numbers == [0] + [3] * (STEPS - 1), "in the first step the closure compiles the model"
    assert calls == 2 * list(range(STEPS))


@pytest.mark.slow
@pytest.mark.parametrize("fused", [False, True])
def test_grad_scaler(fused: bool) -> None:
    """A fused step unscales the gradients that it leaves behind."""

    def program(this: Run) -> None:
        net = model()
        this.compile(net)
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2, fused=fused)
        scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
        for step in range(STEPS):
            loss = net(*net.batch(step))
            torch.autograd.backward(scaler.scale(loss))
            if step == 3:
                grad = weight(net, 5).grad
                assert grad is not None
                grad[0, 0] = torch.inf
            scaler.step(optimizer)
            scaler.update()
            this.record(loss, net, others=states(optimizer))
            optimizer.zero_grad()

    assert_same(plain(program), hosted(program))


class Zeroing(Lion):
    """Drops the gradients at the end of its step, and keeps new tensors as its state."""

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        super().step()
        for state in self.state.values():
            state["momentum"] = state["momentum"].clone()
        self.zero_grad()


@pytest.mark.slow
def test_a_step_that_drops_gradients() -> None:
    def step_of(net: MLP, optimizer: torch.optim.Optimizer, step: int) -> Tensor:
        loss: Tensor = net(*net.batch(step))
        torch.autograd.backward(loss)
        optimizer.step()
        assert all(p.grad is None for p in net.parameters())
        return loss

    check(looping(step_of, make_optimizer=Zeroing))


def test_saved_loaded_copied_and_detached() -> None:
    """Between steps the optimizer is replaced by its saved state, and let go and taken again.

    What was loaded is the optimizer's own from then on, also when it is loaded once more.
    """
    kept: dict[str, Any] = {}

    def step_of(net: MLP, optimizer: torch.optim.Optimizer, step: int) -> Tensor:
        loss: Tensor = net(*net.batch(step))
        torch.autograd.backward(loss)
        if step == 3:
            teraplan.detach(optimizer)
        optimizer.step()
        if step == 3:
            teraplan.attach(optimizer)
        if step == 1:
            kept.update(copy.deepcopy(optimizer.state_dict()))
            assert list(kept["state"]) == list(range(12)), "in the order of the parameters"
        if step in (1, 4):
            optimizer.load_state_dict(kept)
        if step == 2:
            twin = copy.deepcopy(optimizer)
            assert [len(s) for s in twin.state.values()] == [3] * 12
            twin.step()
        return loss

    program = looping(step_of)
    found = hosted(program)
    assert_same(plain(program), found)
    assert [s.host_updates for s in found.statuses] == [3] * STEPS
    whole = found.statuses[1].host_state_bytes
    assert [s.host_state_bytes == whole for s in found.statuses] == [True] * 3 + [False] + [
        True
    ] * 2


@pytest.mark.slow
def test_one_that_looks_at_all_gradients_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedError, match=r"Clipping does not update each .* teraplan.detach"):
        hosted(training(Clipping))
    with pytest.raises(
        UnsupportedError, match=r"LBFGS updates all .* on the host.*teraplan.detach"
    ):
        hosted(training(torch.optim.LBFGS))
    program = training(lambda p: teraplan.detach(Clipping(p)))
    assert_same(plain(program), hosted(program))


class TwoNames(Lion):
    """Has one tensor of each parameter's state under two names."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        super().step()
        for state in self.state.values():
            state.setdefault("again", state["momentum"]).mul_(0.9)


class RowBefore(Lion):
    """Keeps a row of each gradient, in the gradient itself."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            if "row" in self.state[p]:
                p[:1].sub_(self.state[p]["row"])
        super().step()
        for p in self.param_groups[0]["params"]:
            self.state[p]["row"] = p.grad[:1]


class GradientsBefore(Lion):
    """Keeps gradients in a list."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        super().step()
        for p in self.param_groups[0]["params"]:
            kept = self.state[p].setdefault("kept", [])
            kept.append(p.grad)
            p.sub_(kept[0], alpha=1e-2)


@pytest.mark.slow
def test_what_copies_would_not_become_stays_on_the_device() -> None:
    class Listing(Lion):
        def __init__(self, parameters: Iterable[Tensor]) -> None:
            super().__init__(parameters)
            self.seen = [p.detach().clone() for p in self.param_groups[0]["params"]]

    made = (
        (Noisy, "draws random numbers"),
        (Listing, "keeps tensors"),
        (TwoNames, "shares memory"),
        (RowBefore, "shares memory"),
        (GradientsBefore, "shares memory"),
    )
    for make, why in made:
        found = hosted(training(make))
        assert_same(plain(training(make)), found)
        assert any(why in text for text in found.statuses[-1].fallbacks)
        assert found.statuses[-1].host_state_bytes == 0


@pytest.mark.slow
@pytest.mark.parametrize("name", ["AdamW", pytest.param("SGD", marks=pytest.mark.slow)])
def test_beside_a_training_state_that_moves(name: str) -> None:
    """What is updated on the host has its state there; its value and gradient move as others do."""
    program = training(OPTIMIZERS[name], accumulate=2, clip=0.01)
    options = {"host_updates": 0.45, "host_budget": 16 << 20}
    budget = budget_beside_others(6 << 20)
    reference = plain(program)
    found = run(program, device_budget=budget, training_state="moves", **options)
    assert_same(reference, found)
    assert [s.host_updates for s in found.statuses] == [3] * STEPS
    assert found.statuses[-1].host_state_bytes > 0
    labels = [block.label for block in moving().arena.blocks]
    assert sum("parameter" in label for label in labels) == 6
