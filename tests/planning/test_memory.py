"""Curves, lifetimes and room against plain loops over intervals."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from teraplan.errors import InfeasibleBudgetError
from teraplan.planners import make_plan
from teraplan.planners.placing.room import Room
from teraplan.simulation.lifetimes import Lifetimes
from teraplan.simulation.memory_curve import (
    device_curve,
    fixed_curve,
    least_budget,
    managed_curve,
    pressure_curve,
    sum_ranges,
    touched_curve,
)
from teraplan.values.step_trace import StepTrace
from tests.planning.synthetic import budgets, gpt_trace, machine
from tests.planning.traces import traces

quick = settings(max_examples=80, deadline=None)


@quick
@given(trace=traces())
def test_curves_against_plain_loops(trace: StepTrace) -> None:
    for k, site in enumerate(trace.sites):
        alive = [
            t
            for t in trace.tensors
            if t.persistent or t.windows[0][0] <= k < max(end for _, end in t.windows)
        ]
        touched = [t for t in trace.tensors if any(a <= k < b for a, b in t.windows)]
        assert managed_curve(trace)[k] == sum(t.nbytes for t in alive)
        assert touched_curve(trace)[k] == sum(t.nbytes for t in touched)
        assert fixed_curve(trace)[k] == trace.state_bytes + site.workspace_bytes
    assert (pressure_curve(trace, 0) == device_curve(trace)).all()
    assert least_budget(trace).nbytes == max(fixed_curve(trace) + touched_curve(trace))


@quick
@given(trace=traces())
def test_idle_and_touched_make_up_what_is_alive(trace: StepTrace) -> None:
    lifetimes = Lifetimes.of(trace)
    assert (lifetimes.idle_curve() + touched_curve(trace) == managed_curve(trace)).all()
    assert (lifetimes.start < lifetimes.end).all()
    assert (np.diff(lifetimes.start) >= 0).all()
    for k in range(len(trace.sites)):
        rows = lifetimes.idle_at(k)
        assert lifetimes.idle_curve()[k] == lifetimes.nbytes[rows].sum()


@quick
@given(
    free=st.lists(st.integers(0, 9), min_size=1, max_size=12),
    start=st.integers(0, 11),
    length=st.integers(1, 12),
    nbytes=st.integers(0, 9),
)
def test_room_against_plain_loops(free: list[int], start: int, length: int, nbytes: int) -> None:
    size = len(free)
    start %= size
    end = start + min(length, size)
    room = Room(np.array(free, dtype=np.int64))
    at = [free[k % size] for k in range(start, end)]
    assert room.least(start, end) == min(at)
    fits = [k for k in range(start, end + 1) if all(b >= nbytes for b in at[: k - start])]
    assert room.latest_end(start, end, nbytes) == max(fits)
    fits = [k for k in range(start, end + 1) if all(b >= nbytes for b in at[k - start :])]
    assert room.earliest_start(end, start, nbytes) == min(fits)
    room.add(start, end, 5)
    assert room.free.tolist() == [
        b + 5 * any((start + i) % size == k for i in range(end - start)) for k, b in enumerate(free)
    ]


def test_ranges_wrap() -> None:
    assert sum_ranges(4, [(3, 5, 10), (0, 4, 1), (2, 2, 7)]).tolist() == [11, 1, 1, 11]


def test_an_empty_step_needs_its_state() -> None:
    trace = replace(gpt_trace(1), sites=(), tensors=(), state_bytes=2048)
    assert make_plan(trace, machine(), budgets(2048)).migrations == ()
    with pytest.raises(InfeasibleBudgetError, match=r"1.00 KiB too small .* 2.00 KiB state"):
        make_plan(trace, machine(), budgets(1024))


def test_the_least_budget_names_the_largest_tensors() -> None:
    trace = gpt_trace(1)
    text = least_budget(trace).describe(trace)
    assert "state and workspace, " in text
    assert "g0.c0/" in text
