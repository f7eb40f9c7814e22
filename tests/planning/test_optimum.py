"""Small instances against the exact optimum, by trying all plans."""

import itertools
import statistics
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from teraplan.bound import step_bound_ns
from teraplan.check_plan import check_plan
from teraplan.hardware import Hardware
from teraplan.memory_curve import device_curve, fixed_curve, least_budget, managed_curve, peak
from teraplan.plan import Migration
from teraplan.planners import make_plan
from teraplan.planners.base import Problem
from teraplan.simulate import Simulator
from teraplan.step_trace import StepTrace
from tests.planning.synthetic import budgets
from tests.planning.traces import machines, traces

MOST_PLANS = 20_000


def optimum_ns(trace: StepTrace, hardware: Hardware, limit: int) -> int | None:
    """The shortest step of all plans, None if there are too many of them to be tried."""
    options: list[list[Migration | None]] = []
    for tensor_id, start, end in trace.periods():
        if not trace.tensors[tensor_id].nbytes:
            continue
        tiers = Simulator(trace, hardware).links
        moves = [
            Migration(tensor_id=tensor_id, leave=start, gone=a, back=b, needed=end, tier=tier)
            for tier in tiers
            for a in range(start, end)
            for b in range(a + 1, end + 1)
        ]
        options.append([None, *moves])
    if np.prod([len(o) for o in options], dtype=float) > MOST_PLANS:
        return None
    simulator, fixed = Simulator(trace, hardware), fixed_curve(trace)
    best: int | None = None
    for chosen in itertools.product(*options):
        plan = tuple(m for m in chosen if m is not None)
        if (fixed + managed_curve(trace, plan) <= limit).all():
            step_ns = simulator.run(plan).step_ns
            best = step_ns if best is None else min(best, step_ns)
    return best


def gaps_of(count: int) -> list[float]:
    """By how much our step is longer than the shortest, for so many instances under pressure."""
    gaps: list[float] = []

    @seed(20261121)
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
def test_near_the_optimum_on_many_small_instances() -> None:
    gaps = gaps_of(220)
    assert len(gaps) == 220
    assert max(gaps) <= 0.03
    assert statistics.median(gaps) <= 0.005
