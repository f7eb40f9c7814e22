"""What a search of a small step can change about a plan: which tensors go, and when."""

from dataclasses import replace

import pytest

from teraplan.planners import make_plan
from teraplan.planners.base import Problem
from teraplan.planners.placing.victims import choose, closest_fit
from teraplan.planners.search import covers, finishing
from teraplan.planners.search.covers import plan_small_step
from teraplan.planners.search.finishing import best_of_step_itself
from teraplan.planners.search.polish import polish
from teraplan.planners.search.small_step import SmallStep, StepTimes
from teraplan.values.hardware import Hardware
from teraplan.values.plan import Migration
from teraplan.values.step_trace import StepTrace
from tests.planning.synthetic import budgets, gpt_trace, machine
from tests.planning.test_plans import between
from tests.planning.test_policies import never
from tests.planning.test_simulate import move, one_byte_per_ns, step

HUGE, BORN = (5000, ((0, 0), (9, 10)), False), (50, ((4, 6),), False)
SMALL = [(30, ((i, i), (i + 6, i + 7)), False) for i in (1, 2)]
TOO_SMALL = (5, ((1, 1), (8, 9)), False)


def polished(trace: StepTrace, limit: int, hardware: Hardware, *found: Migration) -> list[int]:
    """The tensors that move, in the best plan near one; its time in ns is the last number."""
    problem = Problem.of(trace, hardware, budgets(limit))
    times = StepTimes(problem.simulator())
    plan = polish(SmallStep(problem, times), found, 0, split=False)
    return [*sorted(m.tensor_id for m in plan), times.step_ns(plan)]


def test_several_small_tensors_go_in_the_place_of_a_huge_one() -> None:
    """A copy of the huge one takes five times as long as the step."""
    trace = step(10, HUGE, *SMALL, BORN)
    limit = 1000 + 5000 + 60  # of 110 bytes beside, 50 have to go
    assert polished(trace, limit, one_byte_per_ns(), move(0, 0, 4, 6, 9)) == [1, 2, 1000]


def test_the_closest_fit_leaves_nothing_missing_and_wastes_the_least() -> None:
    trace = step(10, HUGE, *SMALL, TOO_SMALL, (40, ((0, 0), (8, 9)), False), BORN)
    all_bytes = sum(tensor.nbytes for tensor in trace.tensors)

    def chosen(missing_bytes: int) -> list[int]:
        limit = budgets(1000 + all_bytes - missing_bytes)
        problem = Problem.of(trace, one_byte_per_ns(), limit)
        periods, pressure = problem.lifetimes, problem.pressure()
        assert pressure.max() == missing_bytes
        rows = choose(periods, pressure, closest_fit(periods, pressure))
        assert rows is not None
        return [trace.tensors[i].nbytes for i in periods.tensor_ids[rows]]

    assert chosen(25) == [30]
    assert chosen(31) == [40]
    assert chosen(41) == [5000], "more than any other has"
    assert sorted(chosen(5010)) == [40, 5000], "where none is, the largest first"


def test_a_copy_out_waits_until_the_link_is_free() -> None:
    """Else it slows down the copy in of the first, which is just in time if it has the link."""
    first, second = (300, ((0, 0), (7, 8)), False), (300, ((4, 4), (14, 15)), False)
    trace = step(15, first, second, (600, ((3, 4),), False), (600, ((10, 11),), False))
    link = one_byte_per_ns(both=0.1)
    plan = move(0, 0, 3, 4, 7), move(1, 4, 10, 11, 14)
    problem = Problem.of(trace, link, budgets(1600))
    assert problem.simulator().step_ns(plan) > 1500
    assert polished(trace, 1600, replace(link, host_link=None), *plan) == [0, 1, 1500]


@pytest.mark.parametrize("most", [2, 3])
def test_plans_near_those_of_other_policies_count_where_idle_periods_are_few(
    most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    trace = step(10, HUGE, *SMALL, BORN)
    problem = Problem.of(trace, one_byte_per_ns(), budgets(1000 + 5000 + 60))
    assert len(problem.lifetimes) == 3
    slow = (move(0, 0, 4, 6, 9),)
    fast = move(1, 1, 4, 6, 7), move(2, 2, 4, 6, 8)
    monkeypatch.setattr(covers, "_MOST_PERIODS", 0)
    monkeypatch.setattr(covers, "_MOST_FOR_THEM", most)
    monkeypatch.setattr(covers, "_OTHER_STARTS", (never, lambda _: fast))
    monkeypatch.setattr(covers, "polish", lambda _step, start, _enough, split: start)
    times = StepTimes(problem.simulator())
    assert plan_small_step(problem, times, slow, 0) == (fast if most == 3 else slow)


@pytest.mark.parametrize("most", ["_WORK_OF_PUBLISHED", "_WORK_OF_G10"])
@pytest.mark.parametrize("compares", [True, False])
def test_a_plan_of_a_long_step_is_compared_with_those_of_published_policies(
    most: str, compares: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    trace = gpt_trace(12)
    hardware, limit = machine(1.0), budgets(between(trace, 0.3))
    problem = Problem.of(trace, hardware, limit)
    fast, slow = (make_plan(trace, hardware, limit, by) for by in ("teraplan", "lru"))
    assert fast.prediction.step_ns < slow.prediction.step_ns
    for name, value in (("SIMPLE", {}), ("_WORK_OF_PUBLISHED", 0), ("_WORK_OF_G10", 0)):
        monkeypatch.setattr(finishing, name, value)
    for name in ("PUBLISHED", "BY_AREA"):
        monkeypatch.setattr(finishing, name, {"": lambda _: fast.migrations})
    num_periods = len(problem.lifetimes)
    work = num_periods * (num_periods + len(trace.sites))
    monkeypatch.setattr(finishing, most, work if compares else work - 1)
    found = best_of_step_itself(problem, iter([slow.migrations]))
    step_ns = problem.simulator().step_ns(found)
    assert (step_ns <= fast.prediction.step_ns) == compares
