"""The budget that a refusal names before the first step, from the graphs alone, is enough."""

import functools
import re
from collections.abc import Callable, Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from teraplan.errors import InfeasibleBudgetError
from tests.end_to_end.training import UNLIMITED, Program, Run, assert_same, run

MIB = 1 << 20


class Pooled(nn.Module):
    """Batch norm's backward reads a gradient twice over; that of max pooling adds up pieces."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 32, 3, 1, 1), nn.Conv2d(32, 32, 3, 1, 1)
        self.norms = nn.ModuleList(nn.BatchNorm2d(32) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.norms[0](self.first(x))), 2)
        result: Tensor = F.silu(self.norms[1](self.second(x))).square().mean()
        return result


class Stylized(nn.Module):
    """Instance norm's backward reads through views what lies in another order in memory."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 32, 3, 1, 1), nn.Conv2d(32, 64, 3, 1, 1)
        self.norms = nn.ModuleList(nn.InstanceNorm2d(n, affine=True) for n in (32, 64))

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.silu(self.norms[0](self.first(x))), 2)
        x = F.avg_pool2d(F.silu(self.norms[1](self.second(x))), 2)
        result: Tensor = x.square().mean()
        return result


class Mobile(nn.Module):
    """A depthwise convolution's backward copies what it reads from one layout to others."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(3, 64, 3, 1, 1), nn.Conv2d(64, 32, 1)
        self.depthwise = nn.Conv2d(64, 64, 3, 1, 1, groups=64, bias=False)
        self.norms = nn.ModuleList(nn.BatchNorm2d(64) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = F.silu(self.norms[0](self.first(x)))
        x = F.silu(self.norms[1](self.depthwise(x)))
        result: Tensor = self.last(x).square().mean()
        return result


class Conjugated(nn.Module):
    """What is read conjugated, half of all that is saved, has no ops and stays."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64, dtype=torch.cfloat) for _ in range(3))
        self.scales = nn.ParameterList(torch.randn(64, dtype=torch.cfloat) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.complex(x, -x).flatten(0, 2)
        total = torch.zeros(())
        for layer, scale in zip(self.layers, self.scales, strict=True):
            conjugated = layer(x).conj()
            scaled = conjugated * scale
            total = total + (conjugated.imag.sin() * scaled.real).square().mean()
            x = scaled * scaled.abs() / (1 + scaled.abs())
        result: Tensor = total + x.abs().mean()
        return result


def training(this: Run, make_model: Callable[[], nn.Module] = Pooled) -> None:
    net = make_model()
    this.compile(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    x = torch.randn(8, 3, 64, 64)
    for _ in range(12):
        loss = net(x)
        torch.autograd.backward(loss)
        optimizer.step()
        this.record(loss, net)
        optimizer.zero_grad()


def named_in_error(program: Program, **options: object) -> tuple[int, str]:
    """The budget, and the whole text, of the refusal of a budget that is far too small."""
    with pytest.raises(InfeasibleBudgetError) as caught:
        run(program, device_budget=MIB, **options)
    return caught.value.least_budget_bytes, str(caught.value)


@pytest.mark.slow
@pytest.mark.parametrize("kernels", ["aot_eager", "inductor"])
def test_a_net_with_batch_norm_and_pooling(kernels: str) -> None:
    check_named(training, kernels=kernels)


@pytest.mark.slow
@pytest.mark.parametrize("make_model", [Stylized, Mobile])
def test_a_net_with_instance_norm_and_one_with_depthwise_convolutions(
    make_model: Callable[[], nn.Module],
) -> None:
    check_named(functools.partial(training, make_model=make_model), kernels="inductor")


@pytest.mark.parametrize("state", ["stays", pytest.param("moves", marks=pytest.mark.slow)])
def test_a_net_half_of_whose_activations_stay(state: str) -> None:
    program = functools.partial(training, make_model=Conjugated)
    said = check_named(program, kernels="aot_eager", training_state=state)
    assert said.endswith("what the step makes beside its graphs comes on top")


def check_named(program: Program, **options: object) -> str:
    """The budget that the graphs name lets `program` train, with the same numbers; what is said."""
    reference = run(program, device_budget=UNLIMITED, **options)
    named, said = named_in_error(program, **options)
    assert "which they predict to be enough" in said, "before the first step"
    limited = run(program, device_budget=named, **options)
    assert_same(reference, limited)
    return said


class Widening(nn.Module):
    """Three graphs, each of which has twice as much at once as the one before."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(256, 512), nn.Linear(512, 1024)
        self.third = nn.Linear(1024, 2048)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x)).sin()
        torch._dynamo.graph_break()
        x = torch.tanh(self.second(x)).sin()
        torch._dynamo.graph_break()
        return torch.tanh(self.third(x)).sin().square().mean()


def widening(
    this: Run, batches: Sequence[int] = (1024,) * 10, refused: int = 0, eager: int = 256
) -> None:
    """The first `refused` batches are; `eager` is the width of a part that is not compiled."""
    first, net = nn.Linear(256, eager), Widening()
    second = nn.Linear(eager, 256)
    this.compile(net)
    optimizer = torch.optim.AdamW([*first.parameters(), *second.parameters(), *net.parameters()])
    random = torch.Generator().manual_seed(1)
    for number, rows in enumerate(batches):
        x = second(first(torch.randn(rows, 256, generator=random)))
        if number < refused:
            with pytest.raises(InfeasibleBudgetError):
                net(x).backward()
            continue
        loss = net(x)
        torch.autograd.backward(loss)
        optimizer.step()
        this.record(loss, net)
        optimizer.zero_grad()


@pytest.mark.parametrize("state", ["stays", "moves"])
def test_several_graphs_are_all_known_before_a_budget_is_named(state: str) -> None:
    check_named(widening, training_state=state)


@pytest.mark.parametrize("eager", [8, 4096])
def test_a_smaller_batch_trains_after_the_refusal_of_several_graphs(eager: int) -> None:
    """With the last graph all are known, or there are parameters that may be of still another."""
    train = functools.partial(widening, eager=eager)
    reference = run(functools.partial(train, batches=[64] * 8), device_budget=UNLIMITED)
    program = functools.partial(train, batches=[8192] * 2 + [64] * 8, refused=2)
    limited = run(program, device_budget=160 * MIB, training_state="moves")
    assert len(reference.recorded) == len(limited.recorded) == 8


def test_a_large_forward_that_is_dropped_refuses_no_small_step() -> None:
    """Such as one that the program's own exception has ended."""

    def program(this: Run, large: int = 8192) -> None:
        eager, net = nn.Linear(256, 4096), Widening()
        this.compile(net, dynamic=False)
        optimizer = torch.optim.AdamW([*eager.parameters(), *net.parameters()])
        net(torch.randn(large, 256))
        for step in range(8):
            x = torch.randn(64, 256, generator=torch.Generator().manual_seed(step))
            loss = net(x) + eager(x).square().mean()
            torch.autograd.backward(loss)
            optimizer.step()
            this.record(loss, net)
            optimizer.zero_grad()

    small = functools.partial(program, large=64)
    reference = run(small, device_budget=UNLIMITED)
    assert_same(reference, run(program, device_budget=160 * MIB, training_state="moves"))


class Embedded(nn.Module):
    """The first graph saves next to nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.layers = nn.Embedding(64, 256), Widening()

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids)
        torch._dynamo.graph_break()
        result: Tensor = self.layers(x)
        return result


def test_under_a_percentage_no_kind_of_step_is_refused_at_its_first_graph() -> None:
    def program(this: Run) -> None:
        net = Embedded()
        this.compile(net, dynamic=False)
        optimizer = torch.optim.AdamW(net.parameters())
        for step, rows in enumerate([2048] * 8 + [4096] * 8):
            ids = torch.randint(64, (rows,), generator=torch.Generator().manual_seed(step))
            loss = net(ids)
            torch.autograd.backward(loss)
            optimizer.step()
            this.record(loss, net)
            optimizer.zero_grad()

    reference = run(program, device_budget=UNLIMITED)
    limited = run(program, device_budget="90%", training_state="stays")
    assert_same(reference, limited)
    assert limited.statuses[-1].phase == "planned"


def test_a_refusal_under_a_percentage_names_one_that_is_enough() -> None:
    with pytest.raises(InfeasibleBudgetError) as caught:
        run(widening, device_budget="15%", training_state="stays")
    (enough,) = re.findall(
        r"device_budget is 15 % of what the step takes with nothing moved, .* MiB: (\d+) % is enou",
        str(caught.value),
    )
    del caught  # it has the program, whose tensors would count
    limited = run(widening, device_budget=f"{enough}%", training_state="stays")
    assert limited.statuses[-1].phase == "planned"
    assert 15 < int(enough) < 100


class OneEmbedding(nn.Module):
    """Nearly all of the state is needed at once."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(4096, 256)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.table(x).tanh().square().mean()
        return result


@pytest.mark.slow
@pytest.mark.parametrize("update", ["step", "gradient"])
def test_no_more_is_named_than_lets_all_stay(update: str) -> None:
    def program(this: Run) -> None:
        net = OneEmbedding()
        this.compile(net)
        optimizer = torch.optim.AdamW(net.parameters())
        for _ in range(8):
            loss = net(torch.randint(0, 4096, (64, 16)))
            torch.autograd.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            this.record(loss, net)

    reference = run(program, device_budget=UNLIMITED, update=update)
    named, said = named_in_error(program, update=update)
    if update == "gradient":  # it has temporaries besides, while the graph has its memory
        assert "with which nothing has to move" in said
    assert named < 1.2 * reference.final.unlimited_peak_bytes
    assert_same(reference, run(program, device_budget=named, update=update))
