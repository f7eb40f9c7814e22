"""Small instances against the exact optimum, by trying all plans."""

import statistics
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from teraplan.bound import step_bound_ns
from teraplan.check_plan import check_plan
from teraplan.hardware import Hardware
from teraplan.memory_curve import device_curve, least_budget, peak
from teraplan.planners import make_plan
from teraplan.planners.base import Problem
from teraplan.step_trace import StepTrace
from tests.planning.optimum import optimum_ns
from tests.planning.synthetic import budgets
from tests.planning.traces import machines, traces


def gaps_of(count: int, start: int = 20261121) -> list[float]:
    """By how much our step is longer than the shortest, for so many instances under pressure."""
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
        trace=traces(max_tensors=3, persistent=False),
        hardware=machines(),
        part=st.floats(0, 0.9),
        one_tier=st.booleans(),
    )
    def collect(trace: StepTrace, hardware: Hardware, part: float, one_tier: bool) -> None:
        if len(gaps) >= count:
            return
        machine = replace(hardware, host_link=None) if one_tier else hardware
        least, most = least_budget(trace).nbytes, peak(device_curve(trace))
        limit = least + int((most - least) * part)
        if limit >= most:
            return
        best = optimum_ns(trace, machine, limit)
        if best is None:
            return
        plan = make_plan(trace, machine, budgets(limit))
        assert check_plan(plan) == ()
        problem = Problem.of(trace, machine, budgets(limit))
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
def test_near_the_optimum_on_many_small_instances(part: int) -> None:
    gaps = gaps_of(55, start=part)
    assert len(gaps) == 55
    assert max(gaps) <= 0.03
    assert statistics.median(gaps) <= 0.005
