"""Whether an optimizer updates each parameter by itself: found out on copies, before a bucket."""

import random
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor

from teraplan.errors import UnsupportedError
from teraplan.runtime.state.updates.per_parameter import why_not_by_itself
from teraplan.runtime.state.updates.stand_in import keeps_anything_in

Make = Callable[[Iterable[Any]], torch.optim.Optimizer]


class Plain(torch.optim.Optimizer):
    """Descent, with what a subclass makes of each gradient."""

    def __init__(self, parameters: Iterable[Any]) -> None:
        super().__init__(parameters, {"lr": 0.1})
        self.begin()

    def begin(self) -> None:
        """What it keeps from the beginning."""

    @property
    def all(self) -> list[Tensor]:
        """Those that are in its groups."""
        return [p for group in self.param_groups for p in group["params"]]

    @property
    def finite(self) -> list[tuple[Tensor, Tensor]]:
        """Those whose gradients are, with these."""
        return [(p, p.grad) for p in self.all if p.grad is not None and p.grad.isfinite().all()]

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        found = self.all
        for number, p in enumerate(found):
            assert p.grad is not None
            p.sub_(self.direction(p, p.grad, number), alpha=0.1)

    def direction(self, p: Tensor, gradient: Tensor, number: int) -> Tensor:
        """Where it goes."""
        return gradient


class Refusing(Plain):
    """Raises where a gradient is not finite."""

    def direction(self, p: Tensor, gradient: Tensor, number: int) -> Tensor:
        if not gradient.isfinite().all():
            raise ArithmeticError("not finite")
        return gradient


class ByParameter(Plain):
    """A momentum of each parameter in a dict of its own."""

    def begin(self) -> None:
        self.momenta: dict[Any, Tensor] = {p: torch.zeros_like(p) for p in self.all}

    def direction(self, p: Tensor, gradient: Tensor, number: int) -> Tensor:
        return self.momenta[p].mul_(0.9).add_(gradient)


class ByIdentity(Plain):
    """The same, by the number that Python gives each."""

    def begin(self) -> None:
        self.momenta = {id(p): torch.zeros_like(p) for p in self.all}

    def direction(self, p: Tensor, gradient: Tensor, number: int) -> Tensor:
        return self.momenta[id(p)].mul_(0.9).add_(gradient)


class MadeLater(Plain):
    """The same, made when it is first needed."""

    def begin(self) -> None:
        self.momenta: dict[Any, Tensor] = {}
        self.rates: defaultdict[Any, float] = defaultdict(lambda: 0.5)

    def direction(self, p: Tensor, gradient: Tensor, number: int) -> Tensor:
        self.rates[p] *= 0.9
        return self.momenta.setdefault(p, torch.zeros_like(p)).add_(gradient) * self.rates[p]


class Constants(Plain):
    """Numbers in a list of tensors, the same for all."""

    def begin(self) -> None:
        self.factors = [torch.tensor(0.5), torch.tensor(0.25)]

    def direction(self, p: Tensor, gradient: Tensor, number: int) -> Tensor:
        return gradient * self.factors[0] + gradient.sign() * self.factors[1]


class Orthogonal(Plain):
    """Matrices take the sign of their singular values, as Muon's do."""

    def direction(self, p: Tensor, gradient: Tensor, number: int) -> Tensor:
        if gradient.ndim < 2:
            return gradient
        u, _, v = torch.linalg.svd(gradient, full_matrices=False)
        product: Tensor = u @ v
        return product


_traced: list[int] = []


def _tracing(graph: torch.fx.GraphModule, _: object) -> Callable[..., Any]:
    _traced.append(len(graph.graph.nodes))
    return graph.forward


@torch.compile(fullgraph=True, backend=_tracing)
def _halved(gradient: Tensor) -> Tensor:
    return gradient * 0.5


class Compiled(Plain):
    """A function that is compiled makes its direction."""

    def direction(self, p: Tensor, gradient: Tensor, number: int) -> Tensor:
        halved: Tensor = _halved(gradient)
        return halved


class WholeMatrices(Plain):
    """Takes matrices of a given size only."""

    def direction(self, p: Tensor, gradient: Tensor, number: int) -> Tensor:
        return gradient.reshape(40, 50) if p.ndim == 2 else gradient


@pytest.mark.parametrize(
    "make",
    [Plain, ByParameter, ByIdentity, MadeLater, Constants, Orthogonal, WholeMatrices, Compiled],
)
@pytest.mark.parametrize("each", [False, True])
def test_these_do(make: Make, each: bool) -> None:
    optimizer, before = _made(make, each)
    assert why_not_by_itself(optimizer, (), {}, remedy="") == ""
    assert _bytes(optimizer) == before
    assert not _traced, "nothing is compiled for copies"


class OwnList(Plain):
    """Goes through a list of its own."""

    def begin(self) -> None:
        self.found = [p for group in self.param_groups for p in group["params"]]

    @property
    def all(self) -> list[Tensor]:
        return self.found if hasattr(self, "found") else super().all


class RatesByPlace(Plain):
    """A rate for each place among the parameters."""

    def begin(self) -> None:
        self.rates = [torch.tensor(0.1 * (i + 1)) for i in range(len(self.all))]

    def direction(self, p: Tensor, gradient: Tensor, number: int) -> Tensor:
        return gradient * self.rates[number]


class MomentaByPlace(Plain):
    """A momentum for each place."""

    def begin(self) -> None:
        self.momenta = [torch.zeros_like(p) for p in self.all]

    def direction(self, p: Tensor, gradient: Tensor, number: int) -> Tensor:
        return self.momenta[number].mul_(0.9).add_(gradient)


class Normed(Plain):
    """Divides by the norm of all gradients that are finite."""

    def direction(self, p: Tensor, gradient: Tensor, number: int) -> Tensor:
        counted = [g for q, g in self.finite if self.counts(q)]
        norms = [g.norm() for g in counted] or [torch.ones(())]
        norm: Tensor = torch.stack(norms).norm()
        return gradient / norm

    def counts(self, p: Tensor) -> bool:
        """Whether it is in the norm."""
        return True


class NormOfMatrices(Normed):
    """Only matrices are in the norm."""

    def counts(self, p: Tensor) -> bool:
        return p.ndim > 1


class NormAndDict(ByParameter, Normed):
    """What it keeps is each parameter's own, and the norm is not."""

    def direction(self, p: Tensor, gradient: Tensor, number: int) -> Tensor:
        return ByParameter.direction(self, p, Normed.direction(self, p, gradient, number), number)


class Clipped(Normed):
    """Only a norm above 1 counts."""

    def direction(self, p: Tensor, gradient: Tensor, number: int) -> Tensor:
        clipped: Tensor = gradient / (gradient / super().direction(p, gradient, number)).clamp_min(
            1
        )
        return clipped


class Least(Plain):
    """Goes by the least of the largest elements of all gradients that are finite."""

    def direction(self, p: Tensor, gradient: Tensor, number: int) -> Tensor:
        return gradient * min(float(g.abs().max()) for _, g in self.finite)


class Cautious(Plain):
    """Goes nowhere where a gradient is not finite."""

    def direction(self, p: Tensor, gradient: Tensor, number: int) -> Tensor:
        return gradient * (len(self.finite) == len(self.all))


class Dice(Plain):
    """Draws a random number of Python's for each parameter."""

    def direction(self, p: Tensor, gradient: Tensor, number: int) -> Tensor:
        random.random()
        return gradient


class History(Plain):
    """Keeps something of each step in a list that is empty at first."""

    def begin(self) -> None:
        self.history: list[float] = []

    def direction(self, p: Tensor, gradient: Tensor, number: int) -> Tensor:
        if number == 0:
            self.history.append(float(gradient.sum()))
        return gradient


class Counts(Plain):
    """Counts the updates of parameters."""

    def begin(self) -> None:
        self.count = 0

    def direction(self, p: Tensor, gradient: Tensor, number: int) -> Tensor:
        self.count += 1
        return gradient


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (OwnList, "uses parameters"),
        (RatesByPlace, "becomes another"),
        (MomentaByPlace, "changes tensors in containers"),
        (Normed, "becomes another"),
        (NormOfMatrices, "becomes another"),
        (NormAndDict, "becomes another"),
        (Counts, "depends on all"),
        (Clipped, "becomes another"),
        (Least, "becomes another"),
        (Cautious, "becomes another"),
        (Dice, "random numbers of Python's"),
        (History, "'history' belongs to all"),
    ],
)
@pytest.mark.parametrize("each", [False, True])
def test_these_do_not(make: Make, reason: str, each: bool) -> None:
    optimizer, before = _made(make, each)
    assert reason in why_not_by_itself(optimizer, (), {}, remedy="")
    assert _bytes(optimizer) == before


def test_gradients_that_are_zero_hide_nothing() -> None:
    optimizer, _ = _made(Normed, each=False)
    for p in optimizer.param_groups[0]["params"]:
        p.grad.zero_()
    assert "becomes another" in why_not_by_itself(optimizer, (), {}, remedy="")


def test_empty_parameters_are_passed_over() -> None:
    optimizer, _ = _made(Plain, each=False)
    empty = torch.nn.Parameter(torch.empty(0))
    empty.grad = torch.empty(0)
    optimizer.add_param_group({"params": [empty]})
    assert why_not_by_itself(optimizer, (), {}, remedy="") == ""


def test_gradients_that_are_tiny_hide_no_limit() -> None:
    optimizer, _ = _made(Clipped, each=False)
    for p in optimizer.param_groups[0]["params"]:
        p.grad.mul_(1e-9)
    assert "becomes another" in why_not_by_itself(optimizer, (), {}, remedy="")


def test_objects_of_which_nobody_knows_what_they_do() -> None:
    optimizer, _ = _made(Plain, each=False)
    known: dict[str, object] = {
        "none": None,
        "numbers": [1, (2.0, {"a": 3})],
        "tensors": [torch.ones(2), (torch.ones(3),)],
        "own": {optimizer.param_groups[0]["params"][0]: torch.ones(1)},
        "rate": lambda step: 0.1 * step,
    }
    for name, value in known.items():
        setattr(optimizer, name, value)
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5)
    assert keeps_anything_in(optimizer) == ""
    steps = 0

    def counting() -> int:
        return steps

    unknown = (
        counting,
        optimizer.zero_grad,
        object(),
        {"steps": 0, "kept": torch.ones(1)},
        [known],
    )
    for value in (*unknown, iter([1])):
        optimizer.unknown = value  # type: ignore[attr-defined]
        assert keeps_anything_in(optimizer) == "unknown", value
    del optimizer.unknown  # type: ignore[attr-defined]
    optimizer.param_groups[0]["kept"] = [torch.ones(1)]
    assert keeps_anything_in(optimizer) == "param_groups[..]['kept']"


def test_hooks_of_the_user_are_not_called_for_copies() -> None:
    class Outer(torch.optim.SGD):
        def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
            super().step()

    torch.optim.SGD([torch.ones(1)])  # PyTorch puts hooks around the step of a class with objects
    parameter = torch.nn.Parameter(torch.ones(2))
    parameter.grad = torch.ones(2)
    optimizer, called = Outer([parameter], lr=0.1), [0]
    optimizer.register_step_post_hook(lambda *_: called.append(1))
    assert why_not_by_itself(optimizer, (), {}, remedy="") == ""
    assert called == [0]


def test_a_closure_that_is_called_again() -> None:
    class Twice(Plain):
        def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
            assert closure is not None
            closure()
            super().step()
            closure()

    optimizer, before = _made(Twice, each=False)
    assert "closure more than once" in why_not_by_itself(optimizer, (lambda: 0,), {}, remedy="")
    assert _bytes(optimizer) == before


def test_one_that_fails_alone_says_how() -> None:
    class Pairs(Plain):
        def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
            self.all[1].zero_()

    with pytest.raises(UnsupportedError, match=r"Pairs fails for one .*IndexError.*; do this"):
        why_not_by_itself(_made(Pairs, each=False)[0], (), {}, remedy="do this")


def _made(make: Make, each: bool) -> tuple[torch.optim.Optimizer, list[bytes]]:
    """An optimizer with all its parameters in one group, or each in a group of its own."""
    torch.manual_seed(0)
    sizes = [(40, 50), (50,), (50, 40), (30,), (40,)]
    parameters = [torch.nn.Parameter(torch.randn(size)) for size in sizes]
    for p in parameters:
        p.grad = torch.randn_like(p)
    optimizer = make([{"params": [p]} for p in parameters] if each else parameters)
    return optimizer, _bytes(optimizer)


def _bytes(optimizer: torch.optim.Optimizer) -> list[bytes]:
    """Of all that a step might change."""
    own = vars(optimizer)
    containers = [own[name] for name in ("momenta", "rates", "factors", "count") if name in own]
    found = [p for group in optimizer.param_groups for p in group["params"]]
    for container in containers:
        if isinstance(container, dict):
            found += container.values()
        elif isinstance(container, list):
            found += container
        else:
            found.append(torch.tensor(container))
    return [torch.as_tensor(t).detach().numpy().tobytes() for t in found]


def test_one_that_raises_where_a_gradient_is_not_finite_is_told_of_by_that() -> None:
    """A trial on copies has such a gradient, whatever the user's are."""
    with pytest.raises(UnsupportedError, match=r"not finite; tried on copies, where another one's"):
        why_not_by_itself(_made(Refusing, each=False)[0], (), {}, remedy="")
