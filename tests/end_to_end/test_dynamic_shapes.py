"""Sizes that change from step to step: a plan for each, made once, and the same bits."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from teraplan import backend
from teraplan.runtime.process import census
from tests.end_to_end.evicting import everything_leaves
from tests.end_to_end.training import (
    MLP,
    UNLIMITED,
    Run,
    accumulating,
    assert_same,
    bits,
    run,
    tight,
    unlimited,
)


class _Flattening(nn.Module):
    """Saves tensors whose sizes are products of symbols and numbers, needed in another order."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(5))

    def forward(self, x: Tensor) -> Tensor:
        batch, time, width = x.shape
        for index, layer in enumerate(self.layers):
            flat = torch.tanh(layer(x.reshape(batch * time, width)))
            x = flat.view(batch, time, width) if index % 2 else flat.view(time, batch, width)
            x = x.reshape(batch, time, width)
        return x.reshape(-1).square().mean()


def _batch(rows: int, time: int, seed: int) -> Tensor:
    return torch.randn(rows, time, 32, generator=torch.Generator().manual_seed(seed))


@pytest.mark.slow
@pytest.mark.parametrize(
    "sizes",
    [
        [(32, 32), (48, 40)],
        pytest.param([(32, 32), (48, 40), (24, 64)], marks=pytest.mark.slow),
    ],
)
def test_products_of_symbols(sizes: list[tuple[int, int]]) -> None:
    """Every saved tensor leaves and comes back with the size of its own call."""
    torch.manual_seed(0)
    model = _Flattening()
    options: Any = {"device_budget": UNLIMITED, "kernels": "aot_eager"}
    step = torch.compile(model, backend="teraplan", options=options, dynamic=True)
    with everything_leaves() as left:
        for seed, (rows, time) in enumerate(sizes * 2):
            x = _batch(rows, time, seed)
            got = torch.autograd.grad(step(x), list(model.parameters()))
            assert bits(got) == bits(torch.autograd.grad(model(x), list(model.parameters())))
    assert len(left) >= 4 * 2 * len(sizes)


class _Scaling(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x = nn.functional.interpolate(self.conv(x).relu(), scale_factor=0.7)
        return x.tanh().square().mean()


def test_sizes_that_go_through_numbers_that_are_not_whole() -> None:
    """No graph can compute them: what has such a size stays, and the rest moves."""
    torch.manual_seed(0)
    model = _Scaling()
    options: Any = {"device_budget": UNLIMITED, "kernels": "aot_eager"}
    step = torch.compile(model, backend="teraplan", options=options, dynamic=True)
    with everything_leaves() as left:
        for size in (64, 96):
            x = torch.randn(2, 4, size, size + 8)
            got = torch.autograd.grad(step(x), list(model.parameters()))
            assert bits(got) == bits(torch.autograd.grad(model(x), list(model.parameters())))
    assert left
    (session,) = backend.sessions()
    assert any(
        "TruncToInt" in why for table in session.tables.values() for *_, why in table.uncovered
    )


def test_what_is_too_small_in_one_call_leaves_in_another() -> None:
    """Of one graph, compiled with a small batch."""
    torch.manual_seed(0)
    model = _Flattening()
    options: Any = {"device_budget": UNLIMITED, "kernels": "aot_eager"}
    step = torch.compile(model, backend="teraplan", options=options, dynamic=True)
    numbers = list[int]()
    with everything_leaves() as left:
        for rows, time in ((8, 20), (32, 40), (10, 16)):
            torch.autograd.backward(step(_batch(rows, time, seed=0)))
            numbers.append(len(left))
    (session,) = backend.sessions()
    assert len(session.tables) == 1
    assert numbers[0] == 0
    assert numbers[2] == numbers[1] >= 4


@pytest.mark.slow
@pytest.mark.parametrize("dynamic", [True, False], ids=["symbolic", "recompiled"])
def test_a_plan_for_each_size_used_again(dynamic: bool) -> None:
    program = accumulating(
        MLP, lambda step: [MLP(rows=(1536, 2048)[step % 2]).batch(step)], steps=16, dynamic=dynamic
    )
    reference = unlimited(program)
    limited = tight(program, reference, 0.5)
    assert_same(reference, limited)
    assert limited.final.graphs == (1 if dynamic else limited.final.graphs)
    for status in limited.statuses[-4:]:
        assert status.phase == "planned"
        assert status.diverged_steps == 0
    small, large = limited.statuses[-2:]
    assert small.unlimited_peak_bytes != large.unlimited_peak_bytes


@pytest.mark.parametrize("sizes", [(512, 4096), (4096, 512)], ids=["small first", "large first"])
def test_a_percentage_is_of_the_largest_kind_of_step(sizes: tuple[int, int]) -> None:
    """A small step begins with the memory that a large one has left."""
    program = accumulating(
        MLP, lambda step: [MLP(rows=sizes[step % 2]).batch(step)], steps=24, dynamic=False
    )
    reference = run(program, device_budget=UNLIMITED)
    limited = run(program, device_budget="85%", training_state="stays")
    assert_same(reference, limited)
    one, other = limited.statuses[-2:]
    assert one.phase == other.phase == "planned"
    assert one.device_budget_bytes == other.device_budget_bytes
    assert one.unlimited_peak_bytes != other.unlimited_peak_bytes
    assert not [text for text in other.fallbacks if "over the budget" in text]
    assert limited.moved_bytes


@pytest.mark.slow
def test_micro_batches_of_different_sizes() -> None:
    """The step's first sizes do not tell the others: a plan for smaller ones may not fit."""

    program = accumulating(
        MLP,
        lambda step: [MLP(rows=rows).batch(step) for rows in (1536, 1024 + 128 * (step % 4))],
        steps=10,
        dynamic=True,
    )
    reference = unlimited(program)
    assert_same(reference, tight(program, reference, 0.8))


@pytest.mark.slow
def test_a_micro_batch_that_is_larger_than_planned() -> None:
    """What the plan leaves for it is not enough; the step goes on with what it takes."""

    program = accumulating(
        MLP,
        lambda step: [MLP(rows=rows).batch(step) for rows in (1024, 4096 if step == 7 else 1025)],
        steps=9,
        dynamic=True,
    )
    reference = unlimited(program)
    limited = tight(program, reference, 0.5)
    assert_same(reference, limited)
    assert limited.statuses[-1].phase == "planned"


@pytest.mark.slow
def test_many_sizes() -> None:
    """Sequences of every length: most steps run without a plan, all with the right numbers."""

    def program(this: Run) -> None:
        torch.manual_seed(1)
        model = this.compile(MLP(), dynamic=True)
        optimizer = torch.optim.AdamW(model.parameters())
        for step in range(12):
            loss = model(*MLP(rows=1200 + 64 * step).batch(step))
            torch.autograd.backward(loss)
            optimizer.step()
            this.record(loss, model)
            optimizer.zero_grad()

    reference = unlimited(program)
    assert reference.statuses[-1].phase != "planned"
    assert "none before began with" in reference.statuses[-1].unplanned_because
    assert "12 kinds" in str(reference.statuses[-1])
    largest = 2 * 8 * 2000 * 64 * 4
    assert_same(reference, run(program, device_budget=largest))


def test_a_number_that_changes_every_step_is_no_new_kind_of_step() -> None:
    """Such as the step's number, given to the model for a schedule."""

    class Scheduled(MLP):
        def forward(self, x: Tensor, number: int = 0) -> Tensor:
            return super().forward(x) * (1 + number)

    torch.manual_seed(1)
    model = Scheduled()
    options: Any = {"device_budget": UNLIMITED, "kernels": "aot_eager", "profile_steps": 1}
    step = torch.compile(model, backend="teraplan", options=options, dynamic=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for number in range(2, 8):
        torch.autograd.backward(step(*MLP().batch(number), number))
        optimizer.step()
        optimizer.zero_grad()
    (session,) = backend.sessions()
    assert len(session.cases) <= 2
    assert session.status().phase == "planned"


@pytest.mark.slow
def test_recompilation_in_the_middle_of_training() -> None:
    """Another graph in the place of the first: a kind of step of its own, and back again."""

    class Switching(MLP):
        mode = 0

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * 2 if self.mode else super().forward(x)

    def program(this: Run) -> None:
        torch.manual_seed(1)
        model = this.compile(Switching())
        optimizer = torch.optim.AdamW(model.parameters())
        for step in range(16):
            model.mode = int(5 <= step < 11)  # type: ignore[assignment]
            loss = model(*MLP().batch(step))
            torch.autograd.backward(loss)
            optimizer.step()
            this.record(loss, model)
            optimizer.zero_grad()

    reference = unlimited(program)
    limited = tight(program, reference, 0.5)
    assert_same(reference, limited)
    assert limited.statuses[-1].phase == "planned"
    assert limited.statuses[10].phase == "planned"


def test_nested_tensors_of_equal_lengths_are_of_one_kind() -> None:
    """Each has a number of its own in its sizes, which no other has."""

    def nested(*lengths: int) -> Tensor:
        parts = [torch.ones(length, 4) for length in lengths]
        return torch.nested.nested_tensor(parts, layout=torch.jagged)

    one, two, other = nested(3, 5), nested(3, 5), nested(3, 6)
    assert one.shape != two.shape
    assert backend._shape(one) == backend._shape(two) != backend._shape(other)
    assert backend._shape(one.shape[1]) == backend._shape(two.shape[1])
    assert backend._shape(torch.ones(3, 4)) == (3, 4)


def test_sizes_that_never_repeat_are_not_measured() -> None:
    """To measure memory takes a second, and tells nothing of steps of other sizes."""

    def train(this: Run) -> None:
        net = MLP(depth=3)
        this.compile(net, dynamic=True)
        for rows in (*range(300, 1500, 100), 400, 400):
            torch.autograd.backward(net(torch.randn(rows, net.width)))
            net.zero_grad()
            (session,) = backend.sessions()
            assert session.engine.recorder is not None
            measured.append(session.engine.recorder.measure_memory)

    measured: list[bool] = []
    run(train, device_budget=UNLIMITED)
    assert measured == [False] * 12 + [True, False]


def test_sizes_that_never_repeat_do_not_have_all_tensors_counted_in_each_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """That is a walk over all objects of the process, longer than a small step."""

    def train(this: Run) -> None:
        net = MLP(depth=3)
        this.compile(net, dynamic=True)
        for rows in range(300, 360):
            torch.autograd.backward(net(torch.randn(rows, net.width)))
            net.zero_grad()
            walks.append(0)

    def walking(kind: type[object]) -> list[object]:
        if walks:
            walks[-1] += 1
        return instances(kind)

    walks: list[int] = []
    instances = census._instances
    monkeypatch.setattr(census, "_instances", walking)
    run(train, device_budget=UNLIMITED)
    assert sum(walks[:8]) >= 8, "nothing was counted"
    assert sum(walks[8:]) <= 20
