"""Every plan of every policy holds, or no plan exists; small cases against brute force."""

import itertools
import pickle
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from teraplan.bounds.bound import step_bound_ns
from teraplan.checker.check_plan import check_plan
from teraplan.checker.violations import ViolationKind
from teraplan.errors import ConfigError, InfeasibleBudgetError
from teraplan.planners import POLICIES, make_plan
from teraplan.planners.base import Problem
from teraplan.planners.baselines.simple import on_demand
from teraplan.planners.placing.victims import first_saved
from teraplan.planners.search.polish import polish
from teraplan.planners.search.small_step import SmallStep, StepTimes
from teraplan.simulation.memory_curve import device_curve, least_budget, peak
from teraplan.values.hardware import Hardware, Tier
from teraplan.values.plan import Migration, Plan
from teraplan.values.step_trace import StepTrace
from tests.planning.synthetic import budgets, gpt_trace, machine, plan_of
from tests.planning.test_simulate import one_byte_per_ns, step
from tests.planning.traces import machines, traces

quick = settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def between(trace: StepTrace, part: float) -> int:
    least, most = least_budget(trace).nbytes, peak(device_curve(trace))
    return least + int((most - least) * part)


def moved_bytes(plan: Plan) -> int:
    return sum(plan.trace.tensors[m.tensor_id].nbytes for m in plan.migrations)


@pytest.mark.slow
@quick
@given(trace=traces(), hardware=machines())
def test_least_budget_is_exact(trace: StepTrace, hardware: Hardware) -> None:
    least = least_budget(trace).nbytes
    assert check_plan(make_plan(trace, hardware, budgets(least))) == ()
    with pytest.raises(InfeasibleBudgetError, match="too small") as caught:
        make_plan(trace, hardware, budgets(least - 1))
    assert caught.value.least_budget_bytes == least


@pytest.mark.slow
@quick
@given(trace=traces(max_tensors=4, persistent=False), part=st.floats(0, 1))
def test_moves_no_more_than_twice_the_least(trace: StepTrace, part: float) -> None:
    """Against all subsets of idle periods: feasible alike, and not wasteful."""
    limit = between(trace, part)
    periods = [p for p in trace.periods() if trace.tensors[p[0]].nbytes]
    if len(periods) > 9:
        periods = periods[:0]
    plan = make_plan(trace, machine(), budgets(limit))
    least: int | None = None
    for size in range(len(periods) + 1):
        for chosen in itertools.combinations(periods, size):
            migrations = [
                Migration(tensor_id=i, leave=a, gone=a, back=b, needed=b, tier=Tier.STORAGE)
                for i, a, b in chosen
            ]
            if peak(device_curve(trace, migrations)) <= limit:
                total = sum(trace.tensors[i].nbytes for i, _, _ in chosen)
                least = total if least is None else min(least, total)
    if least is not None:
        assert moved_bytes(plan) >= least
        assert (moved_bytes(plan) == 0) == (least == 0)


@pytest.mark.slow
@quick
@given(trace=traces(), hardware=machines(), part=st.floats(0, 1), host=st.integers(0, 200))
def test_bound_holds_where_host_memory_is_short(
    trace: StepTrace, hardware: Hardware, part: float, host: int
) -> None:
    limit = budgets(between(trace, part), host_bytes=host * 1000)
    for policy in ("teraplan", "lru", "zero-infinity"):
        said = make_plan(trace, hardware, limit, policy).prediction
        assert 0 < said.bound_ns <= said.step_ns or said.step_ns == 0


@pytest.mark.slow
@quick
@given(trace=traces(), hardware=machines(), rung=st.integers(0, 6))
def test_an_eighth_more_memory_is_never_slower(
    trace: StepTrace, hardware: Hardware, rung: int
) -> None:
    least, most = least_budget(trace).nbytes, peak(device_curve(trace))
    small, large = (least + (most - least) * i // 8 for i in (rung, rung + 1))
    slow = make_plan(trace, hardware, budgets(small)).prediction.step_ns
    assert make_plan(trace, hardware, budgets(large)).prediction.step_ns <= slow


@pytest.mark.slow
@quick
@given(trace=traces(), hardware=machines(), part=st.floats(0, 1))
def test_same_input_same_plan(trace: StepTrace, hardware: Hardware, part: float) -> None:
    limit = budgets(between(trace, part))
    first, second = (make_plan(trace, hardware, limit) for _ in range(2))
    assert pickle.dumps(first.migrations) == pickle.dumps(second.migrations)
    assert first == second


@pytest.mark.slow
@quick
@given(trace=traces(), hardware=machines(), part=st.floats(0, 1))
def test_every_plan_holds_and_ours_is_never_slower(
    trace: StepTrace, hardware: Hardware, part: float
) -> None:
    limit = budgets(between(trace, part))
    problem = Problem.of(trace, hardware, limit)
    ours = make_plan(trace, hardware, limit).prediction.step_ns
    assert step_bound_ns(problem.lifetimes, hardware, problem.pressure()) <= ours
    for policy in POLICIES:
        plan = make_plan(trace, hardware, limit, policy)
        assert check_plan(plan) == ()
        assert plan.prediction.device_peak_bytes <= limit.device_bytes
        assert ours <= plan.prediction.step_ns


def test_what_leaves_late_in_its_period_is_not_moved_twice_in_it() -> None:
    """At site 4 both of two tensors are away; one that were away twice would do for the other."""
    first, second = (90, ((0, 0), (7, 8)), False), (90, ((3, 3), (5, 6)), False)
    trace, hardware, limit = step(8, first, second, (90, ((4, 5),), False)), one_byte_per_ns(), 1090
    problem = Problem.of(trace, hardware, budgets(limit))
    late = on_demand(problem, first_saved)
    assert [(m.tensor_id, m.leave) for m in late] == [(0, 3), (1, 3)]
    times = StepTimes(problem.simulator())
    found = polish(SmallStep(problem, times), late, 0, split=False)
    assert check_plan(plan_of(trace, hardware, budgets(limit), found)) == ()


def test_nothing_moves_if_all_fits() -> None:
    trace = gpt_trace(2)
    plan = make_plan(trace, machine(), budgets(peak(device_curve(trace))))
    assert plan.migrations == ()
    assert plan.prediction.step_ns == trace.duration_ns


@pytest.mark.parametrize("speed", [2.0, 6.0, 24.0])
@pytest.mark.parametrize("part", [0.1, 0.25, 0.5, 0.75])
def test_near_the_bound_and_ahead_of_the_baseline(part: float, speed: float) -> None:
    trace = gpt_trace(12)
    hardware, limit = machine(speed), budgets(between(trace, part))
    problem = Problem.of(trace, hardware, limit)
    bound = step_bound_ns(problem.lifetimes, hardware, problem.pressure())
    ours = make_plan(trace, hardware, limit).prediction.step_ns
    assert ours <= 1.03 * bound
    assert ours <= make_plan(trace, hardware, limit, "teraio").prediction.step_ns


def links_ns(plan: Plan) -> int:
    link, tensors = plan.hardware.storage_link, plan.trace.tensors
    assert link is not None
    busy_ns = 0
    for m in plan.migrations:
        nbytes = tensors[m.tensor_id].nbytes
        busy_ns += link.latency_ns + nbytes * 10**9 // link.back_bytes_per_s
        if not m.clean:
            busy_ns += link.latency_ns + nbytes * 10**9 // link.out_bytes_per_s
    return busy_ns


@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("part", [0.25, 0.5, 0.75, 0.9])
@pytest.mark.parametrize("latency_ns", [20_000, 500_000])
def test_of_equally_fast_plans_ours_needs_links_least(
    latency_ns: int, part: float, micro_batches: int
) -> None:
    trace, hardware = gpt_trace(7, micro_batches=micro_batches), machine(48.0)
    assert hardware.storage_link is not None
    link = replace(hardware.storage_link, latency_ns=latency_ns)
    hardware, limit = replace(hardware, storage_link=link), budgets(between(trace, part))
    ours = make_plan(trace, hardware, limit)
    assert ours.migrations
    for policy in POLICIES:
        other = make_plan(trace, hardware, limit, policy)
        if other.prediction.step_ns == ours.prediction.step_ns:
            assert links_ns(ours) <= links_ns(other), policy


@pytest.mark.slow
def test_more_bandwidth_is_not_slower() -> None:
    trace = gpt_trace(6, micro_batches=2)
    for part in (0.05, 0.3, 0.6):
        limit = budgets(between(trace, part))
        times = [
            make_plan(trace, machine(speed), limit).prediction.step_ns
            for speed in (1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 24.0)
        ]
        assert times == sorted(times, reverse=True)


def test_says_which_site_needs_how_much() -> None:
    trace = gpt_trace(2)
    least = least_budget(trace)
    with pytest.raises(
        InfeasibleBudgetError, match=rf"site {least.site} \(g0, backward\)"
    ) as error:
        make_plan(trace, machine(), budgets(least.nbytes - 1024))
    assert "1.00 KiB too small" in str(error.value)
    assert f"({least.nbytes} bytes)" in str(error.value)


def test_says_how_much_room_the_other_tiers_lack() -> None:
    trace = gpt_trace(2)
    limit = budgets(between(trace, 0.2), storage_bytes=1 << 20)
    with pytest.raises(InfeasibleBudgetError, match=r"room for 1.00 MiB in storage. Give host"):
        make_plan(trace, machine(), limit)


def test_uses_both_tiers_where_neither_is_enough() -> None:
    trace = gpt_trace(4)
    limit = between(trace, 0.3)
    need = peak(device_curve(trace)) - limit
    both = budgets(limit, host_bytes=need // 2, storage_bytes=need)
    plan = make_plan(trace, machine(host=25.0), both)
    assert {m.tier for m in plan.migrations} == {Tier.HOST, Tier.STORAGE}
    assert plan.prediction.host_peak_bytes <= need // 2


@pytest.mark.slow
@pytest.mark.parametrize("part_for_staging", [0.5, 1.5])
def test_staging_is_taken_off_the_host_budget(part_for_staging: float) -> None:
    trace = gpt_trace(4)
    limit = between(trace, 0.3)
    host_bytes = (peak(device_curve(trace)) - limit) // 2
    staging = int(host_bytes * part_for_staging)
    hardware = replace(machine(host=25.0), staging_bytes=staging)
    plan = make_plan(trace, hardware, budgets(limit, host_bytes=host_bytes))
    assert check_plan(plan) == ()
    assert plan.prediction.host_peak_bytes <= max(0, host_bytes - staging)
    before = make_plan(trace, machine(host=25.0), budgets(limit, host_bytes=host_bytes))
    assert before.prediction.host_peak_bytes > max(0, host_bytes - staging)
    assert {v.kind for v in check_plan(replace(before, hardware=hardware))} == {
        ViolationKind.HOST_BUDGET
    }


def test_unknown_policy_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match='did you mean "teraplan"'):
        make_plan(gpt_trace(1), machine(), budgets(1 << 40), "terraplan")


def test_every_migration_has_a_reason() -> None:
    trace = gpt_trace(2)
    plan = make_plan(trace, machine(), budgets(between(trace, 0.3)))
    assert plan.migrations
    assert all(m.reason.startswith("idle ") and "over budget" in m.reason for m in plan.migrations)


def test_tensors_take_turns_where_storage_has_room_for_one() -> None:
    """Their idle periods overlap, and what is over the budget does not."""
    nbytes = 100
    trace = step(
        10,
        (nbytes, ((0, 1), (5, 10)), False),
        (nbytes, ((0, 4), (9, 10)), False),
        (nbytes, ((2, 3),), False),
        (nbytes, ((7, 8),), False),
    )
    plan = make_plan(trace, machine(), budgets(1200, storage_bytes=nbytes))
    assert [m.tensor_id for m in plan.migrations] == [0, 1]
    assert plan.migrations[0].needed <= plan.migrations[1].leave
