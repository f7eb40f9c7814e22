"""The relaxed bound is below every plan; of whole tensors, it is the exact optimum or near it."""

import statistics
import sys
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from teraplan.bounds.bound import step_bound_ns
from teraplan.bounds.relaxation import relaxed_bound_ns
from teraplan.errors import ConfigError
from teraplan.planners import make_plan
from teraplan.planners.base import Problem
from teraplan.simulation.memory_curve import device_curve, least_budget, peak
from teraplan.values.hardware import Hardware
from teraplan.values.step_trace import StepTrace
from tests.planning.optimum import optimum_ns
from tests.planning.synthetic import budgets, gpt_trace, machine
from tests.planning.traces import machines, traces


def relaxed(problem: Problem, *, checkpoints: int = 24, whole: bool = False) -> int:
    return relaxed_bound_ns(
        problem.lifetimes,
        problem.hardware,
        problem.pressure(),
        problem.tier_bytes,
        checkpoints=checkpoints,
        whole=whole,
    )


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(trace=traces(), hardware=machines(), part=st.floats(0, 1), host=st.integers(0, 300))
def test_no_plan_is_faster(trace: StepTrace, hardware: Hardware, part: float, host: int) -> None:
    least, most = least_budget(trace).nbytes, peak(device_curve(trace))
    limit = budgets(least + int((most - least) * part), host_bytes=host * 1000)
    bound_ns = relaxed(Problem.of(trace, hardware, limit), checkpoints=12)
    for policy in ("belady", "zero-infinity"):
        assert bound_ns <= make_plan(trace, hardware, limit, policy).prediction.step_ns


@pytest.mark.slow
def test_whole_tensors_give_nearly_the_optimum() -> None:
    """A mixed-integer program against all plans: two oracles that share only the trace."""
    above: list[float] = []

    @seed(20261121)
    @settings(
        max_examples=400,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
    )
    @given(
        trace=traces(max_tensors=3, persistent=False),
        hardware=machines(),
        part=st.floats(0, 0.9),
        one_tier=st.booleans(),
    )
    def compare(trace: StepTrace, hardware: Hardware, part: float, one_tier: bool) -> None:
        machine = replace(hardware, host_link=None) if one_tier else hardware
        least, most = least_budget(trace).nbytes, peak(device_curve(trace))
        limit = least + int((most - least) * part)
        if len(above) >= 20 or limit >= most:
            return
        best = optimum_ns(trace, machine, budgets(limit), most_plans=2000)
        if best:
            bound_ns = relaxed(Problem.of(trace, machine, budgets(limit)), whole=True)
            assert bound_ns <= best
            above.append(best / bound_ns - 1)

    compare()
    assert len(above) == 20
    assert statistics.median(above) <= 0.005


def test_nearer_than_the_quick_bound() -> None:
    trace = gpt_trace(3)
    least, most = least_budget(trace).nbytes, peak(device_curve(trace))
    limit = budgets(least + (most - least) // 2)
    problem = Problem.of(trace, machine(6.0), limit)
    quick = step_bound_ns(
        problem.lifetimes, problem.hardware, problem.pressure(), problem.tier_bytes
    )
    bounds = [relaxed(problem, checkpoints=count) for count in (12, 48)]
    assert quick < bounds[-1] <= make_plan(trace, problem.hardware, limit).prediction.step_ns
    assert bounds == sorted(bounds)


def test_needs_scipy(monkeypatch: pytest.MonkeyPatch) -> None:
    trace = gpt_trace(1)
    monkeypatch.setitem(sys.modules, "scipy.optimize", None)
    problem = Problem.of(trace, machine(), budgets(least_budget(trace).nbytes))
    with pytest.raises(ConfigError, match=r"pip install 'teraplan\[bound\]'"):
        relaxed(problem)
