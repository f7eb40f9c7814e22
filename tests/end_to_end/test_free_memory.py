"""A net whose memory PyTorch's own kernels ask for keeps its budget, free memory included."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from teraplan.runtime.cpu.malloc import Malloc
from teraplan.runtime.process import census, process_memory
from teraplan.units import MIB
from tests.end_to_end.moving import budget_beside_others
from tests.end_to_end.training import MLP, UNLIMITED, Run, assert_same, run, tight


class Convolutions(nn.Module):
    """PyTorch's own kernels ask for all of its memory; few ops lie between its sites."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Conv2d(32 if i else 3, 32, 3, padding=1) for i in range(4))
        self.norms = nn.ModuleList(nn.BatchNorm2d(32) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x = x.to(memory_format=torch.channels_last)
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = F.relu_(norm(layer(x)))
        x = F.interpolate(x, scale_factor=2.0, mode="bilinear")
        return F.pixel_unshuffle(x, 2).abs().mean()


STEPS = 14


def beside_tensors() -> int:
    """Bytes that the process holds and no tensor has."""
    return process_memory.resident_bytes() - census.tensor_nbytes("cpu")


def program(this: Run, after_step: Callable[[], None] = lambda: None) -> None:
    net = Convolutions()
    this.compile(net)
    optimizer = torch.optim.AdamW(net.parameters())
    for step in range(STEPS):
        x = torch.randn(4, 3, 64, 64, generator=torch.Generator().manual_seed(step))
        loss = net(x)
        torch.autograd.backward(loss)
        optimizer.step()
        this.record(loss, net)
        optimizer.zero_grad()
        after_step()


@pytest.mark.slow
@pytest.mark.parametrize("state", [pytest.param("stays", marks=pytest.mark.exhaustive), "auto"])
def test_convolutions_keep_their_budget(state: str) -> None:
    """With the heap's free memory it was 130 to 165 MiB."""
    reference = run(program, device_budget="1000%", kernels="aot_eager")
    budget = 72 * MIB
    Malloc().trim()
    before = beside_tensors()
    free: list[int] = []
    watched = partial(program, after_step=lambda: free.append(beside_tensors() - before))
    limited = run(watched, device_budget=budget, kernels="aot_eager", training_state=state)
    assert_same(reference, limited)
    assert limited.final.phase == "planned"
    assert 0 < limited.final.actual_peak_bytes <= 1.05 * budget + 16 * MIB
    assert len(free) == STEPS
    assert max(free) < 32 * MIB, f"free memory after steps, MiB: {[n / MIB for n in free]}"


@pytest.mark.slow
def test_what_the_process_grows_by_is_not_held_back_for_tensors() -> None:
    """Objects of the user's that are no tensors, and come when the step has been measured."""
    kept: list[bytearray] = []

    def growing() -> None:
        kept.append(bytearray(b"x" * ((24 if len(kept) == 4 else 0) * MIB)))

    reference = run(program, device_budget="1000%", kernels="aot_eager")
    watched = partial(program, after_step=growing)
    limited = run(watched, device_budget=72 * MIB, kernels="aot_eager")
    assert_same(reference, limited)
    assert limited.final.phase == "planned"
    assert 0 <= limited.final.held_back_bytes < 16 * MIB
    assert limited.final.actual_peak_bytes <= 1.05 * 72 * MIB + 8 * MIB


@pytest.mark.slow
def test_what_the_process_grows_by_when_a_graph_is_compiled_is_no_tensors() -> None:
    """Long after the step was planned, and whatever the budget is."""
    kept: list[bytearray] = []

    def train(this: Run) -> None:
        def grow() -> None:
            kept.append(bytearray(b"x" * ((24 if len(kept) == 9 else 0) * MIB)))
            if len(kept) == 10:
                evaluate(torch.ones(8))

        options: Any = this.options
        evaluate = torch.compile(torch.sin, backend="teraplan", options=options)
        program(this, after_step=grow)

    ample = run(train, device_budget="1000%", kernels="aot_eager")
    assert ample.final.phase == "planned"
    assert ample.final.actual_peak_bytes <= 1.05 * ample.final.predicted_peak_bytes + 8 * MIB


@pytest.mark.slow
def test_what_a_step_of_other_sizes_leaves_in_the_heap_is_not_held_back() -> None:
    """The first one of its kind is not measured, and nothing was given back after counting."""

    def train(this: Run) -> None:
        net = Convolutions()
        this.compile(net, dynamic=True)
        optimizer = torch.optim.SGD(net.parameters())
        for step in range(16):
            size = 24 if step in (9, 11, 13) else 32
            loss = net(torch.randn(4, 3, size, size))
            torch.autograd.backward(loss)
            optimizer.step()
            this.record(loss, net)
            optimizer.zero_grad()

    limited = tight(train, run(train, device_budget="1000%"), 0.5)
    assert limited.final.fallbacks == ()
    assert limited.final.held_back_bytes < MIB


class SmallBlocks(nn.Module):
    """Many activations of fewer than 256 KiB, each as large as the one before it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(128), nn.Linear(128, 128), nn.GELU(), nn.Dropout(0.1))
            for _ in range(40)
        )

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x.square().mean()


@pytest.mark.slow
@pytest.mark.parametrize("rows", [200, 496])
def test_small_tensors_keep_their_budget(rows: int) -> None:
    """In the heap each left a hole that the next one of its size did not fit into."""

    def train(this: Run) -> None:
        net = SmallBlocks()
        this.compile(net)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
        for step in range(12):
            loss = net(torch.randn(rows, 128, generator=torch.Generator().manual_seed(step)))
            torch.autograd.backward(loss)
            optimizer.step()
            this.record(loss, net)
            optimizer.zero_grad()

    reference = run(train, device_budget="1000%", kernels="aot_eager")
    limited = tight(train, reference, 0.4, kernels="aot_eager")
    assert limited.final.phase == "planned"
    assert limited.final.fallbacks == ()
    assert limited.final.actual_peak_bytes <= 1.05 * limited.final.predicted_peak_bytes + MIB


@pytest.mark.slow
@pytest.mark.parametrize("training_state", ["stays", "moves"])
def test_data_that_the_program_keeps_after_planning_is_told_as_often_as_it_has_grown(
    training_state: str,
) -> None:
    """No plan can hold back as much; it was "free memory between tensors", and told of once."""

    def program(this: Run) -> None:
        net = MLP(width=128, depth=6, rows=1024)
        this.compile(net)
        optimizer = torch.optim.AdamW(net.parameters())
        kept: list[Tensor] = []
        for step in range(20):
            loss = net(*net.batch(step))
            torch.autograd.backward(loss)
            optimizer.step()
            this.record(loss, net)
            optimizer.zero_grad()
            if step in (8, 9, 14):
                kept.append(torch.ones(16 * MIB, dtype=torch.uint8))

    reference = run(program, device_budget=UNLIMITED)
    budget = budget_beside_others(5 * MIB)
    limited = run(program, device_budget=budget, training_state=training_state)
    assert_same(reference, limited)
    told = [
        [what for what in status.fallbacks if "data that the program holds" in what]
        for status in limited.statuses
    ]
    assert told[8] == []
    assert 1 <= len(told[13]) < len(told[19]) <= 3
    assert limited.statuses[19].phase == "planned"


@pytest.mark.slow
def test_what_a_step_takes_within_an_ample_budget_is_expected() -> None:
    """Free memory between tensors, or what the program makes for a moment, and no plan tells of."""

    def program(this: Run) -> None:
        net = MLP(width=128, depth=6, rows=1024)
        this.compile(net)
        optimizer = torch.optim.AdamW(net.parameters())
        for step in range(20):
            loss = net(*net.batch(step))
            if step >= 6:
                loss = loss + 0 * torch.ones(4 * MIB).sum()
            torch.autograd.backward(loss)
            optimizer.step()
            this.record(loss, net)
            optimizer.zero_grad()

    limited = run(program, device_budget=UNLIMITED)
    before, last = limited.statuses[5], limited.statuses[-1]
    assert last.predicted_peak_bytes > before.predicted_peak_bytes + 12 * MIB
    assert abs(last.actual_peak_bytes - last.predicted_peak_bytes) <= 2 * MIB
    assert last.unlimited_peak_bytes == before.unlimited_peak_bytes, "of the tensors alone"
    assert last.held_back_bytes == 0
    assert last.diverged_steps == 0
