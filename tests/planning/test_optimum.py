"""Small instances against the exact optimum, by trying all plans."""

import statistics
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from teraplan.bounds.bound import step_bound_ns
from teraplan.checker.check_plan import check_plan
from teraplan.planners import make_plan
from teraplan.planners.base import Problem
from teraplan.simulation.memory_curve import device_curve, least_budget, peak
from teraplan.values.hardware import Hardware
from teraplan.values.step_trace import StepTrace
from tests.planning.optimum import optimum_ns
from tests.planning.synthetic import budgets
from tests.planning.test_simulate import one_byte_per_ns, step
from tests.planning.traces import grown, machines, traces


def gaps_of(
    count: int,
    start: int = 20261121,
    *,
    large: bool = False,
    lasting: bool = False,
    little_host: bool = False,
) -> list[float]:
    """By how much our step is longer than the shortest, for so many instances under pressure.

    The shortest is of plans that move tensors as a whole.

    Args:
        count: how many instances.
        start: seed of their generation.
        large: all have two tiers and tensors that can be split between them.
        lasting: some have tensors that outlive the step.
        little_host: host memory has room for a part of the tensors, or none.
    """
    gaps: list[float] = []

    @seed(start)
    @settings(
        max_examples=40 * count,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=[
            HealthCheck.too_slow,
            HealthCheck.data_too_large,
            HealthCheck.filter_too_much,
        ],
    )
    @given(
        trace=traces(max_tensors=2 if lasting else 3, persistent=lasting),
        hardware=machines(),
        part=st.floats(0, 0.9),
        one_tier=st.booleans(),
        host=st.integers(0, 100),
    )
    def collect(
        trace: StepTrace, hardware: Hardware, part: float, one_tier: bool, host: int
    ) -> None:
        if len(gaps) >= count:
            return
        machine = replace(hardware, host_link=None) if one_tier and not large else hardware
        if large:
            trace = grown(trace)
            if machine.host_link is None:
                return
        least, most = least_budget(trace).nbytes, peak(device_curve(trace))
        limit = least + int((most - least) * part)
        if limit >= most:
            return
        limits = budgets(limit, host_bytes=host * 1000) if little_host else budgets(limit)
        best = optimum_ns(trace, machine, limits)
        if best is None:
            return
        plan = make_plan(trace, machine, limits)
        assert check_plan(plan) == ()
        problem = Problem.of(trace, machine, limits)
        assert step_bound_ns(problem.lifetimes, machine, problem.pressure()) <= best
        assert plan.prediction.bound_ns <= best
        gaps.append(plan.prediction.step_ns / best - 1 if best else 0.0)

    collect()
    return gaps


@pytest.mark.slow
def test_near_the_optimum_on_small_instances() -> None:
    gaps = gaps_of(12)
    assert len(gaps) == 12
    assert max(gaps) <= 0.03
    assert statistics.median(gaps) <= 0.005


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize("part", range(4))
@pytest.mark.parametrize(
    "shape", [{}, {"lasting": True}, {"little_host": True}], ids=["plain", "lasting", "little host"]
)
def test_near_the_optimum_on_many_small_instances(part: int, shape: dict[str, bool]) -> None:
    gaps = gaps_of(55, start=part, **shape)
    assert len(gaps) == 55
    assert max(gaps) <= 0.03
    assert statistics.median(gaps) <= 0.005


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize("part", range(4))
def test_splits_come_near_or_beat_the_best_plan_of_whole_tensors(part: int) -> None:
    gaps = sorted(gaps_of(55, start=part, large=True))
    assert len(gaps) == 55
    assert gaps[-1] <= 0.03
    assert statistics.median(gaps) <= 0.005
    assert gaps[0] < -0.01


@pytest.mark.parametrize("capacity", [150, 1000])
def test_the_optimum_keeps_the_room_of_storage(capacity: int) -> None:
    """Two of 100 bytes should go: there is room for one, by budget or by capacity."""
    spans = [(100, ((i, i), (4 - i, 5 - i)), False) for i in range(2)]
    trace = step(6, *spans, (100, ((2, 3),), False))
    machine = replace(one_byte_per_ns(), host_link=None, storage_capacity_bytes=capacity)
    limits = replace(budgets(1100), storage_bytes=1150 - capacity)
    assert optimum_ns(trace, machine, limits) is None
    plenty = replace(machine, storage_capacity_bytes=200)
    assert optimum_ns(trace, plenty, budgets(1100)) is not None


def step_ns_of(trace: StepTrace, limit: int) -> int:
    plan = make_plan(trace, one_byte_per_ns(), budgets(limit))
    assert check_plan(plan) == ()
    return plan.prediction.step_ns


def test_a_copy_is_made_early_so_that_a_tensor_can_be_dropped_later() -> None:
    """Bytes are missing at site 8, where the tensor is idle for as long as half a copy takes."""
    often, born = (200, ((0, 1), (6, 8), (9, 10)), False), (100, ((8, 9),), False)
    assert step_ns_of(step(10, often, born), 1200) == 10 * 100 + 200


def test_two_small_tensors_leave_in_the_place_of_a_large_one() -> None:
    """A copy of the large one takes as long as the step."""
    large, born = (1000, ((0, 0), (9, 10)), False), (20, ((4, 5),), False)
    small, other = (10, ((1, 1), (6, 7)), False), (10, ((2, 2), (7, 8)), False)
    assert step_ns_of(step(10, large, small, other, born), 2020) == 10 * 100


def test_one_tensor_hands_over_to_another() -> None:
    """Bytes are missing at sites 5 and 6: the first has to come by then, the second cannot go."""
    first, second = (300, ((0, 0), (9, 10)), False), (300, ((3, 3), (12, 13)), False)
    born = (300, ((5, 7),), False)
    assert step_ns_of(step(13, first, second, born), 1600) == 13 * 100
