"""Steps whose planning is bounded: of too many idle periods, or with updates on the host."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from teraplan.checker.check_plan import check_plan
from teraplan.library.machines import machine_named
from teraplan.planners import make_plan
from teraplan.planners.base import Problem
from teraplan.planners.placing import postpone
from teraplan.planners.placing.postpone import postpone_copies_out
from teraplan.planners.search import coarse, finishing, first_attempts, small_step, stall_driven
from teraplan.planners.search.coarse import coarsen, hardly_coarser, slots_for
from teraplan.planners.search.small_step import SmallStep, StepTimes
from teraplan.simulation.memory_curve import device_curve, managed_curve, peak
from teraplan.simulation.simulator import Simulator
from teraplan.values.hardware import Hardware, HostCores
from teraplan.values.step_trace import StepTrace
from tests.planning.synthetic import FINGERPRINT, budgets, gpt_trace, machine
from tests.planning.test_plans import between
from tests.planning.test_simulate import move, one_byte_per_ns, step
from tests.planning.traces import machines, traces
from tests.planning.updating import layers_step

few = settings(max_examples=25, deadline=None)


def short_lives(calls: int) -> StepTrace:
    """In each call seven tensors are saved, and needed in reverse: none is idle for longer."""
    spans = [
        (200, ((20 * call + i, 20 * call + i), (20 * call + 19 - i, 20 * call + 20 - i)), False)
        for call in range(calls)
        for i in range(7)
    ]
    trace = step(20 * calls, *spans)
    return replace(trace, fingerprint=FINGERPRINT)


def test_a_coarse_copy_of_short_idle_periods_is_hardly_smaller() -> None:
    trace = short_lives(30)
    tight = Problem.of(trace, machine(6.0), budgets(between(trace, 0.1)))
    assert hardly_coarser(tight, 100)
    layers = gpt_trace(24)
    loose = Problem.of(layers, machine(6.0), budgets(between(layers, 0.5)))
    assert not hardly_coarser(loose, 100)
    assert slots_for(layers) == 300


def test_many_calls_have_many_slots() -> None:
    assert slots_for(gpt_trace(1, micro_batches=20)) == 24 * 20
    assert slots_for(gpt_trace(1, micro_batches=200)) == 2400


@pytest.mark.parametrize("trace", [short_lives(15), gpt_trace(12)])
def test_three_attempts_give_a_plan(trace: StepTrace, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the limits of steps of 20,000 idle periods at 50."""
    limit = budgets(between(trace, 0.3))
    before = make_plan(trace, machine(6.0, host=12.0), limit)
    monkeypatch.setattr(stall_driven, "_MANY", 50)
    for module in (stall_driven, finishing, first_attempts):
        monkeypatch.setattr(module, "PLENTY", 50)
        monkeypatch.setattr(module, "NEAR", 50)
    plan = make_plan(trace, machine(6.0, host=12.0), limit)
    assert check_plan(plan) == ()
    assert plan.prediction.bound_ns <= plan.prediction.step_ns
    assert plan.prediction.step_ns < 2 * before.prediction.step_ns


def test_copies_out_of_many_migrations_are_postponed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both directions at once go at half speed: the first try is half of the way."""
    trace = step(10, (200, ((0, 0), (4, 5)), False), (100, ((0, 1), (8, 9)), False))
    problem = Problem.of(trace, one_byte_per_ns(both=0.5), budgets(1 << 40))
    plan = (move(0, leave=0, gone=2, back=2, needed=4), move(1, leave=1, gone=6, back=7, needed=8))
    simulator, tried = problem.simulator(), []
    timing, run = simulator.run(plan), Simulator.run

    def counted(self: Simulator, migrations: tuple[object, ...]) -> object:
        tried.append(migrations)
        return run(self, migrations)  # type: ignore[arg-type]

    monkeypatch.setattr(Simulator, "run", counted)
    monkeypatch.setattr(postpone, "_WORK", 1)
    postpone_copies_out(problem, simulator, plan, timing, 0)
    assert len(tried) == 1


@few
@given(trace=traces(), hardware=machines(), part=st.floats(0, 1), slots=st.integers(1, 12))
def test_a_coarse_step_is_feasible(
    trace: StepTrace, hardware: Hardware, part: float, slots: int
) -> None:
    problem = Problem.of(trace, hardware, budgets(between(trace, part)))
    coarse = coarsen(problem, slots).problem
    assert (coarse.device - problem.limit_bytes <= coarse.idle).all()


@few
@given(trace=traces(), hardware=machines(), part=st.floats(0, 1))
def test_what_fits_is_what_keeps_the_budget(
    trace: StepTrace, hardware: Hardware, part: float
) -> None:
    limit = budgets(between(trace, part))
    problem = Problem.of(trace, hardware, limit)
    plan = make_plan(trace, hardware, budgets(between(trace, part / 2)), "lru").migrations
    others = problem.device - managed_curve(trace)
    fits = bool((others + managed_curve(trace, plan) <= problem.limit_bytes).all())
    assert SmallStep(problem, StepTimes(problem.simulator())).fits(plan) == fits


def test_beside_updates_on_the_host_two_lower_budgets_are_tried(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    trace = layers_step((2000, 4000, 1000), micro_batches=2)
    hardware = machine_named("h100-nvl:ssd=2:cores=published").hardware
    solved: list[Problem] = []
    solve = stall_driven._solve

    def counted(problem: Problem, simulator: Simulator, times: StepTimes) -> object:
        solved.append(problem)
        return solve(problem, simulator, times)

    monkeypatch.setattr(stall_driven, "_solve", counted)
    monkeypatch.setattr(small_step, "_SIMULATIONS", 20)
    plan = make_plan(trace, hardware, budgets(peak(device_curve(trace)) // 2))
    assert plan.host_updates
    beside = [problem for problem in solved if problem.host_work]
    steps = {id(problem.trace) for problem in beside}
    assert len(beside) == 3 * len(steps)


@pytest.mark.slow
def test_plans_of_coarse_steps_hold_beside_updates_on_the_host(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The host's state has no bytes on the device, and is in no group of tensors that move."""
    trace = layers_step((20_000,) * 40, wide=4000)
    cores = HostCores(update_bytes_per_s=4 * 10**9, memory_bytes_per_s=16 * 10**9)
    hardware = replace(machine(1.0, 4.0), host_cores=cores)
    for name, value in (("_SLOTS", 30), ("_SLOTS_OF_CALL", 5), ("_LARGEST_PART", 10)):
        monkeypatch.setattr(coarse, name, value)
    monkeypatch.setattr(stall_driven, "_MANY", 100)
    monkeypatch.setattr(stall_driven, "_WORK", 3000)
    plan = make_plan(trace, hardware, budgets(between(trace, 0.3)))
    assert 0 < len(plan.host_updates) < len(trace.updates)
    assert check_plan(plan) == ()
