"""Updates in slices: the bits of a plain step for all that is cut, and nothing else cut."""

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from teraplan.runtime.state.updates import sliced_update
from teraplan.runtime.state.updates.sliced_update import cut_up, step_in_slices
from teraplan.runtime.state.updates.stand_in import stand_in, take_over
from teraplan.units import KIB

Optimizer = torch.optim.Optimizer
Make = Callable[[list[torch.nn.Parameter]], Optimizer]


@pytest.fixture(autouse=True)
def nothing_tried() -> Iterator[None]:
    """Each test tries for itself whether slices are exact."""
    before = dict(sliced_update._exact)
    sliced_update._exact.clear()
    yield
    sliced_update._exact.clear()
    sliced_update._exact.update(before)


def slice_numel() -> int:
    return sliced_update.SLICE_BYTES * torch.get_num_threads() // 4


def parameters(dtype: torch.dtype = torch.float32) -> list[torch.nn.Parameter]:
    """Small, of several slices with a part that no vector divides, and in another memory order."""
    torch.manual_seed(3)
    num = slice_numel()
    images = torch.randn(8, num // 64, 3, 7).to(memory_format=torch.channels_last)
    values = (torch.randn(100), torch.randn(3 * num + 13), torch.randn(7, num // 5), images)
    return [torch.nn.Parameter(value.to(dtype)) for value in values]


def set_gradients(ps: list[torch.nn.Parameter], seed: int) -> None:
    torch.manual_seed(seed)
    for p in ps:
        p.grad = torch.randn_like(p)


def step_whole_stand_in(optimizer: Optimizer) -> None:
    """As a bucket with all parameters is stepped."""
    made = stand_in(optimizer, {id(p) for group in optimizer.param_groups for p in group["params"]})
    step_in_slices(made, (), {})
    take_over(optimizer, made)


def pieces_of(optimizer: Optimizer) -> list[torch.Tensor]:
    made = stand_in(optimizer, {id(p) for group in optimizer.param_groups for p in group["params"]})
    cut = cut_up(made, (), {})
    return [] if cut is None else [p for g in cut.optimizer.param_groups for p in g["params"]]


def after_steps(make: Make, ps: list[torch.nn.Parameter], *, sliced: bool) -> Optimizer:
    optimizer = make(ps)
    for seed in range(5):
        set_gradients(ps, seed)
        if sliced and seed:
            step_whole_stand_in(optimizer)
        else:
            optimizer.step()
    return optimizer


def require_equal(a: Any, b: Any) -> None:  # noqa: ANN401
    assert type(a) is type(b)
    if isinstance(a, dict):
        assert a.keys() == b.keys()
        for name in a:
            require_equal(a[name], b[name])
    elif isinstance(a, list):
        assert len(a) == len(b)
        for one, other in zip(a, b, strict=True):
            require_equal(one, other)
    elif isinstance(a, torch.Tensor):
        assert a.stride() == b.stride()
        assert torch.equal(a, b)
    else:
        assert a == b


SLICED: dict[str, Make] = {
    "adam": lambda ps: torch.optim.Adam(ps, lr=0.01),
    "adam with decay": lambda ps: torch.optim.Adam(ps, weight_decay=0.1, maximize=True),
    "adamw": lambda ps: torch.optim.AdamW(ps, lr=0.01),
    "amsgrad": lambda ps: torch.optim.AdamW(ps, amsgrad=True),
    "lr in a tensor": lambda ps: torch.optim.AdamW(ps, lr=torch.tensor(0.01)),
    "momentum": lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9),
    "nesterov": lambda ps: torch.optim.SGD(ps, 0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
    "plain sgd": lambda ps: torch.optim.SGD(ps, lr=0.1, weight_decay=0.1),
    "adagrad": lambda ps: torch.optim.Adagrad(ps, lr=0.01, lr_decay=0.1),
    "rmsprop": lambda ps: torch.optim.RMSprop(ps, centered=True, momentum=0.9),
    "nadam": lambda ps: torch.optim.NAdam(ps, decoupled_weight_decay=True, weight_decay=0.1),
    "radam": lambda ps: torch.optim.RAdam(ps),
    "adamax": lambda ps: torch.optim.Adamax(ps),
    "adadelta": lambda ps: torch.optim.Adadelta(ps),
    "rprop": lambda ps: torch.optim.Rprop(ps),
    "groups": lambda ps: torch.optim.AdamW(
        [{"params": ps[:2], "lr": 0.2}, {"params": ps[2:], "lr": 0.1}]
    ),
}


@pytest.mark.parametrize("name", SLICED)
def test_the_bits_of_a_plain_step(name: str) -> None:
    plain_ps, ps = parameters(), parameters()
    plain = after_steps(SLICED[name], plain_ps, sliced=False)
    sliced = after_steps(SLICED[name], ps, sliced=True)
    require_equal(list(ps), list(plain_ps))
    require_equal(sliced.state_dict(), plain.state_dict())
    assert len(pieces_of(sliced)) > len(ps)
    assert all(sliced_update._exact.values())


def test_state_that_the_step_makes_beside_slices_lasts() -> None:
    """A parameter whose first gradient comes later than those of others in its bucket."""
    plain_ps, ps = parameters(), parameters()
    for late, sliced in ((plain_ps, False), (ps, True)):
        optimizer = SLICED["adamw"](late)
        for seed in range(5):
            set_gradients(late, seed)
            if seed < 2:
                late[0].grad = late[2].grad = None
            if sliced and seed:
                step_whole_stand_in(optimizer)
            else:
                optimizer.step()
        assert all(optimizer.state[p]["step"] == 5 - 2 * (k in (0, 2)) for k, p in enumerate(late))
    require_equal(list(ps), list(plain_ps))


def test_bfloat16() -> None:
    plain_ps, ps = parameters(torch.bfloat16), parameters(torch.bfloat16)
    after_steps(SLICED["adamw"], plain_ps, sliced=False)
    sliced = after_steps(SLICED["adamw"], ps, sliced=True)
    require_equal(list(ps), list(plain_ps))
    # two bytes each: twice as many in a slice
    assert max(piece.numel() for piece in pieces_of(sliced)) > slice_numel()


def test_slices_are_small_and_of_the_same_memory() -> None:
    ps = parameters()
    optimizer = after_steps(SLICED["adamw"], ps, sliced=False)
    set_gradients(ps, 0)
    pieces = pieces_of(optimizer)
    assert sum(piece.numel() for piece in pieces) == sum(p.numel() for p in ps)
    assert max(piece.numel() for piece in pieces) == slice_numel()
    memories = {p.untyped_storage().data_ptr() for p in ps}
    assert {piece.untyped_storage().data_ptr() for piece in pieces} == memories


def test_the_state_stays_in_its_tensors() -> None:
    """Others know them: the memory that moves, and whoever has kept `optimizer.state[p]`."""
    ps = parameters()
    optimizer = after_steps(SLICED["adamw"], ps, sliced=False)
    before = {p: dict(optimizer.state[p]) for p in ps}
    version = ps[1]._version
    step_whole_stand_in(optimizer)
    for p in ps:
        assert optimizer.state[p].keys() == before[p].keys()
        assert all(optimizer.state[p][name] is value for name, value in before[p].items())
    assert ps[1]._version > version


class NormPerParameter(torch.optim.SGD):
    """What no slice of a parameter can do by itself."""

    @torch.no_grad()
    def step(self, closure: object = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(p.grad / p.grad.norm())
                self.state[p]["step"] = self.state[p].get("step", 0) + 1


class GivesOthers(torch.optim.SGD):
    """Puts other tensors in the places of those of its state."""

    @torch.no_grad()
    def step(self, closure: object = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                before = self.state[p].get("sum")
                self.state[p]["sum"] = p.grad.clone() if before is None else before + p.grad
                p.sub_(self.state[p]["sum"])


@pytest.mark.parametrize("kind", [NormPerParameter, GivesOthers])
def test_a_trial_shows_what_cannot_be_sliced(
    kind: type[torch.optim.SGD], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sliced_update, "_ELEMENTWISE", (kind,))
    plain_ps, ps = parameters(), parameters()
    after_steps(lambda p: kind(p, lr=0.1), plain_ps, sliced=False)
    sliced = after_steps(lambda p: kind(p, lr=0.1), ps, sliced=True)
    require_equal(list(ps), list(plain_ps))
    assert not any(sliced_update._exact.values())
    assert sliced_update._exact
    assert not pieces_of(sliced)


class Counts(torch.optim.SGD):
    """Keeps numbers beside tensors: of a parameter, of a group, and its own."""

    steps = 0

    @torch.no_grad()
    def step(self, closure: object = None) -> None:  # type: ignore[override]
        self.steps += 1
        for group in self.param_groups:
            group["times"] = group.get("times", 0) + 1
            for p in group["params"]:
                self.state[p]["step"] = self.state[p].get("step", 0) + 1
                p.sub_(p.grad, alpha=self.steps + group["times"] + self.state[p]["step"])


def test_numbers_of_the_optimizers_own_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sliced_update, "_ELEMENTWISE", (Counts,))
    plain_ps, ps = parameters(), parameters()
    plain = after_steps(lambda p: Counts(p, lr=0.1), plain_ps, sliced=False)
    sliced = after_steps(lambda p: Counts(p, lr=0.1), ps, sliced=True)
    require_equal(list(ps), list(plain_ps))
    require_equal(sliced.state_dict(), plain.state_dict())
    assert pieces_of(sliced)


def test_parameters_in_one_memory() -> None:
    """As code keeps them that sends all gradients at once."""
    num = 3 * slice_numel() + 13
    values = torch.randn(2 * num)
    plain_ps, ps = (
        [torch.nn.Parameter(flat[7:num]), torch.nn.Parameter(flat[num:])]
        for flat in (values.clone(), values.clone())
    )
    assert ps[1].untyped_storage().data_ptr() == ps[0].untyped_storage().data_ptr()
    assert ps[1].untyped_storage().data_ptr() != plain_ps[1].untyped_storage().data_ptr()
    after_steps(SLICED["adamw"], plain_ps, sliced=False)
    sliced = after_steps(SLICED["adamw"], ps, sliced=True)
    require_equal(list(ps), list(plain_ps))
    assert pieces_of(sliced)


class Sizes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Bytes of what operators return."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: ANN401
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and not func.is_view:
            self.most = max(self.most, result.nbytes)
        return result


def test_a_trial_takes_no_memory_to_speak_of() -> None:
    """It runs where a step's memory is measured, and must keep to the budget."""
    ps = parameters()
    optimizer = after_steps(SLICED["adamw"], ps, sliced=False)
    with Sizes() as sizes:
        assert pieces_of(optimizer)
    assert sliced_update._exact
    assert 0 < sizes.most <= 16 * KIB


class Third(torch.optim.AdamW):
    """Someone's own."""


NOT_SLICED: dict[str, Make] = {
    "foreach": lambda ps: torch.optim.AdamW(ps, foreach=True),
    "fused": lambda ps: torch.optim.AdamW(ps, fused=True),
    "a subclass": Third,
    "factors": torch.optim.Adafactor,
}


@pytest.mark.parametrize("name", NOT_SLICED)
def test_left_whole(name: str) -> None:
    plain_ps, ps = parameters(), parameters()
    after_steps(NOT_SLICED[name], plain_ps, sliced=False)
    optimizer = after_steps(NOT_SLICED[name], ps, sliced=True)
    require_equal(list(ps), list(plain_ps))
    assert not pieces_of(optimizer)


def test_state_that_is_still_to_be_made_is_made_whole() -> None:
    ps = parameters()
    optimizer = SLICED["adamw"](ps)
    set_gradients(ps, 0)
    assert not pieces_of(optimizer)
    step_whole_stand_in(optimizer)
    assert {p: optimizer.state[p]["exp_avg"].shape for p in ps} == {p: p.shape for p in ps}
    assert pieces_of(optimizer)


def test_gradients_in_another_memory_order_or_none() -> None:
    ps = parameters()
    optimizer = after_steps(SLICED["adamw"], ps, sliced=False)
    plain_ps = [torch.nn.Parameter(p.detach().clone()) for p in ps]
    plain = SLICED["adamw"](plain_ps)
    plain.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for found in (ps, plain_ps):
        set_gradients(found, 0)
        found[1].grad = None
        found[3].grad = torch.randn(found[3].shape, generator=torch.Generator().manual_seed(5))
    step_whole_stand_in(optimizer)
    plain.step()
    require_equal(list(ps), list(plain_ps))
    require_equal(optimizer.state_dict(), plain.state_dict())
    assert not sliced_update._may_be_cut(ps[3], optimizer.state[ps[3]], optimizer.param_groups[0])
