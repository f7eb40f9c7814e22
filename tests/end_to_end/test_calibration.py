"""What planned steps take becomes what the next plan expects."""

import dataclasses
import time
from collections.abc import Callable

import pytest
import torch

from teraplan.runtime.cpu.device import CpuDevice
from teraplan.runtime.session import session as session_module
from teraplan.runtime.session.calibration import Calibration, MeasuredPlan
from teraplan.runtime.session.feedback import Lesson, learn
from teraplan.runtime.session.session import Session
from teraplan.runtime.storage import Storage
from teraplan.values.run_record import TRAINING_STATE, RunRecord, StallRecord
from tests.end_to_end.training import MLP, Run, assert_same, run, sessions, training, unlimited
from tests.fakes.slow_link import link_of, plan_with_storage
from tests.fakes.throttled_stores import opening_limited, throttle

IDLE_NS = 500_000_000
SLOW_BYTES_PER_S = 10_000_000
NO_WAITS = link_of(100_000_000_000, latency_ns=0)


def _after_training(check: Callable[[Session], None]) -> None:
    """With a session whose plan predicts no waits: tests make out how long its steps took."""

    def program(this: Run) -> None:
        training(MLP, MLP().batch, steps=8)(this)
        check(next(iter(sessions())))

    with pytest.MonkeyPatch.context() as patch:
        plan_with_storage(patch, NO_WAITS)
        run(program, device_budget="90%")


def _make_out(session: Session, slower: float, *, runs: int = 6) -> int:
    """Let all runs have taken so much longer than predicted, without waits; returns their time."""
    (case,) = session.cases.values()
    assert case.schedule is not None
    took_ns = int(case.schedule.plan.prediction.step_ns * slower)
    case.runs, case.num_runs = [_with_duration(case.runs[-1], took_ns)] * runs, runs
    return took_ns


def _nothing_learned(session: Session) -> None:
    (case,) = session.cases.values()
    case.calibrations, case.calibration, case.best = 0, Calibration(), None


def _lesson(session: Session, *, beyond_bytes: int = 0) -> Lesson:
    (case,) = session.cases.values()
    budget = session.device_budget_bytes()
    return learn(case, session.plans, peak_bytes=budget + beyond_bytes, budget_bytes=budget)


def _with_duration(record: RunRecord, duration_ns: int) -> RunRecord:
    return dataclasses.replace(record, duration_ns=duration_ns, stalls=())


def test_predictions_follow_what_planned_steps_take() -> None:
    def check(session: Session) -> None:
        (case,) = session.cases.values()
        _nothing_learned(session)
        took_ns = _make_out(session, 10.0)
        plan = _lesson(session).plan
        assert plan is not None
        assert 0.9 * took_ns < plan.prediction.step_ns < 1.1 * took_ns
        session._follow(case, plan)
        _make_out(session, 1.0)
        assert _lesson(session).plan is None, "now it is as predicted"
        _make_out(session, 1.5, runs=11)
        assert _lesson(session).plan is None, "not at every step"
        for _ in range(3):
            took_ns = _make_out(session, 1.5, runs=12)
            plan = _lesson(session).plan
            assert plan is not None
            assert 0.9 * took_ns < plan.prediction.step_ns < 1.1 * took_ns
            session._follow(case, plan)
            assert session.status().stall_ns == 0, "of the step before"
        _make_out(session, 1.5)
        assert _lesson(session).plan is None, "not for ever"
        took_ns = _make_out(session, 0.5)
        plan = _lesson(session).plan
        assert plan is not None, "what was slow is over"
        assert 0.9 * took_ns < plan.prediction.step_ns < 1.1 * took_ns

    _after_training(check)


def test_predictions_follow_what_planned_steps_wait_for_what_no_plan_knows() -> None:
    """Computation is as predicted, and half of each step is waiting."""

    def check(session: Session) -> None:
        (case,) = session.cases.values()
        _nothing_learned(session)
        took_ns = _make_out(session, 2.0)
        wait = StallRecord(site=0, tensor=TRAINING_STATE, start_ns=0, duration_ns=took_ns // 2)
        case.runs = [dataclasses.replace(record, stalls=(wait,)) for record in case.runs]
        computed_ns = sum(min(case.durations_ns, key=sum))
        assert _lesson(session).plan is not None
        assert case.calibration.unplanned_wait_ns == took_ns // 2
        assert case.calibration.slowdown == pytest.approx((took_ns - took_ns // 2) / computed_ns)

    _after_training(check)


def test_a_plan_that_turns_out_slower_is_given_up_for_the_one_before() -> None:
    """And that is the end of it: what is still learned changes predictions alone."""

    def check(session: Session) -> None:
        (case,) = session.cases.values()
        assert case.schedule is not None
        first = case.schedule.plan
        assert first.migrations
        _nothing_learned(session)
        first_ns = _make_out(session, 1.0)
        assert _lesson(session).plan is None
        assert case.best is not None
        slower = dataclasses.replace(first, migrations=first.migrations[1:])
        session._follow(case, slower)
        slow = _with_duration(case.runs[-1], int(1.1 * first_ns))
        case.runs, case.num_runs = [slow] * 3, 3
        assert _lesson(session).plan is None, "three steps are not enough to tell"
        case.runs, case.num_runs = [slow] * 6, 6
        back = _lesson(session).plan
        assert back is not None
        assert back.migrations == first.migrations
        session._follow(case, back)
        for factor in (1.2, 0.8, 0.5):
            took_ns = _make_out(session, factor)
            again = _lesson(session).plan
            assert again is not None
            assert again.migrations == first.migrations
            assert 0.95 * took_ns < again.prediction.step_ns < 1.05 * took_ns
            session._follow(case, again)

    _after_training(check)


def test_a_replayed_plan_that_takes_too_much_is_told_of_once_and_kept() -> None:
    def check(session: Session) -> None:
        (case,) = session.cases.values()
        assert case.schedule is not None
        session.plans.replayed, case.corrections = case.schedule.plan, 0
        assert not _lesson(session).fallback
        told = _lesson(session, beyond_bytes=64 << 20)
        assert "that the replayed plan was made for" in told.fallback
        assert told.plan is None
        assert not _lesson(session, beyond_bytes=64 << 20).fallback, "not at every step"

    _after_training(check)


def test_where_looking_takes_time_one_step_in_eight_is_looked_at(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On a GPU: its next step would begin only when the host has learned all about the last one."""

    def check(session: Session) -> None:
        (case,) = session.cases.values()
        recorder = session.engine.recorder
        assert recorder is not None
        monkeypatch.setattr(session_module, "learn", lambda *_, **__: Lesson())
        for waits, looked_at in ((False, 32), (True, 4)):
            monkeypatch.setattr(CpuDevice, "waits_to_tell", waits)
            _make_out(session, 1.0, runs=25)
            for _ in range(32):
                session._finish_planned_step(case, recorder, ())
            assert case.num_runs == 25 + looked_at
        case.num_runs = 20
        session._finish_planned_step(case, recorder, ())
        assert case.num_runs == 21, "the first ones all are"

    _after_training(check)


def test_another_prediction_of_the_plan_in_force_is_no_new_start() -> None:
    """Its runs go on counting, so that it is looked at ever more rarely."""

    def check(session: Session) -> None:
        (case,) = session.cases.values()
        _nothing_learned(session)
        case.settled, before = True, case.num_plans
        _make_out(session, 0.5, runs=5)
        case.runs_of, old, recorder = case.schedule, case.schedule, session.engine.recorder
        assert old is not None
        assert recorder is not None
        session._finish_planned_step(case, recorder, ())
        assert case.schedule is not None
        assert case.schedule is not old
        assert case.schedule.plan.migrations == old.plan.migrations
        assert case.schedule.plan.prediction.step_ns < old.plan.prediction.step_ns
        session._finish_planned_step(case, recorder, ())
        assert (case.num_runs, case.num_plans) == (7, before)

    _after_training(check)


@pytest.mark.parametrize("factor", [0.5, 2.0])
def test_a_machine_that_changes_is_learned_anew(factor: float) -> None:
    """Long after everything was settled, where the same plan takes another time than it did."""

    def check(session: Session) -> None:
        (case,) = session.cases.values()
        assert case.schedule is not None
        case.calibration = Calibration()
        took_ns = _make_out(session, 1.0)
        case.best = MeasuredPlan(plan=case.schedule.plan, took_ns=took_ns)
        case.calibrations, case.settled = 4, True
        for slightly, runs in ((factor, 47), (factor**0.3, 48)):
            _make_out(session, slightly, runs=runs)
            _lesson(session)
            assert case.settled
        took_ns = _make_out(session, factor, runs=48)
        plan = _lesson(session).plan
        assert plan is not None
        assert 0.9 * took_ns < plan.prediction.step_ns < 1.1 * took_ns
        assert case.best.took_ns == took_ns
        assert not case.settled
        assert case.calibrations == 1

    _after_training(check)


def test_what_steps_have_shown_of_storage_ends_with_a_fault_of_it() -> None:
    def check(session: Session) -> None:
        (case,) = session.cases.values()
        case.calibration = Calibration(slowdown=1.2, link_speed=0.5, unplanned_wait_ns=7)
        case.settled = True
        _make_out(session, 1.0)
        _lesson(session)
        session._plan_around(case, ["a fault"])
        assert case.calibration == Calibration(slowdown=1.2, unplanned_wait_ns=7)
        assert case.schedule is None
        assert case.best is None
        assert not case.settled

    _after_training(check)


@pytest.mark.slow
def test_links_that_are_slower_than_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    plan_with_storage(monkeypatch, link_of(20 * SLOW_BYTES_PER_S))
    monkeypatch.setattr(Storage, "open", opening_limited(SLOW_BYTES_PER_S))

    steps = training(MLP, MLP().batch, steps=24)

    def program(this: Run) -> None:
        steps(this)
        (case,) = next(iter(sessions())).cases.values()
        assert case.calibration.link_speed < 0.5
        assert case.schedule is not None
        hardware = case.schedule.plan.hardware
        assert hardware.storage_link is not None
        assert hardware.storage_link.out_bytes_per_s < 10 * SLOW_BYTES_PER_S

    assert_same(unlimited(steps), run(program, device_budget="80%"))


@pytest.mark.slow
def test_a_disk_that_becomes_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """At first it is as fast as is believed, whatever else the machine does."""
    plan_with_storage(monkeypatch, link_of(8 * SLOW_BYTES_PER_S))
    monkeypatch.setattr(Storage, "open", opening_limited(8 * SLOW_BYTES_PER_S))

    def program(this: Run, *, slow_from: int = 1000) -> None:
        net = MLP(rows=1024)
        this.compile(net)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for step in range(120):
            if step == slow_from:
                (session,) = sessions()
                (case,) = session.cases.values()
                assert case.calibration.link_speed > 0.6
                throttle(session.device.storage, [1.5 * SLOW_BYTES_PER_S])
            loss = net(*net.batch(step % 4))
            torch.autograd.backward(loss)
            optimizer.step()
            this.record(loss, net)
            optimizer.zero_grad()

    def slowed(this: Run) -> None:
        program(this, slow_from=60)
        (case,) = next(iter(sessions())).cases.values()
        assert case.calibration.link_speed < 0.4

    assert_same(unlimited(program), run(slowed, device_budget="80%"))


@pytest.mark.slow
def test_what_users_do_between_steps_is_no_part_of_a_step() -> None:
    def program(this: Run) -> None:
        net = MLP()
        this.compile(net)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for step in range(6):
            torch.autograd.backward(net(*net.batch(step)))
            optimizer.step()
            optimizer.zero_grad()
            time.sleep(IDLE_NS / 1e9)
        (case,) = next(iter(sessions())).cases.values()
        assert case.runs
        assert all(record.duration_ns < IDLE_NS for record in case.runs)
        assert case.schedule is not None
        assert case.schedule.plan.prediction.step_ns < IDLE_NS

    run(program, device_budget="90%")


def test_a_right_prediction_stays() -> None:
    def check(session: Session) -> None:
        (case,) = session.cases.values()
        _nothing_learned(session)
        _make_out(session, 1.02)
        assert _lesson(session).plan is None
        assert case.calibrations == 0
        assert case.calibration.slowdown == 1.0

    _after_training(check)


def test_the_first_step_under_a_plan_is_no_measure() -> None:
    def check(session: Session) -> None:
        (case,) = session.cases.values()
        _nothing_learned(session)
        took_ns = _make_out(session, 1.02)
        case.runs[0] = _with_duration(case.runs[0], 10 * took_ns)
        case.runs[1] = _with_duration(case.runs[1], 10 * took_ns)
        assert _lesson(session).plan is None

    _after_training(check)


def test_some_slow_steps_are_no_measure() -> None:
    def check(session: Session) -> None:
        (case,) = session.cases.values()
        _nothing_learned(session)
        took_ns = _make_out(session, 1.02)
        case.runs[-3:] = [_with_duration(run, 10 * took_ns) for run in case.runs[-3:]]
        assert _lesson(session).plan is None
        case.runs[-4:] = [_with_duration(run, 10 * took_ns) for run in case.runs[-4:]]
        assert _lesson(session).plan is not None, "most are slow"

    _after_training(check)


def test_what_is_taken_beyond_the_budget_is_held_back() -> None:
    def check(session: Session) -> None:
        (case,) = session.cases.values()
        case.corrections = case.reserve_bytes = 0
        _lesson(session)
        assert _lesson(session, beyond_bytes=1000) == Lesson(), "a page, more or less"
        assert case.corrections == 0
        assert case.budgets is not None
        beyond_bytes = case.budgets.device_bytes // 40
        held_back_bytes = _lesson(session, beyond_bytes=beyond_bytes).held_back_bytes
        assert held_back_bytes == case.reserve_bytes >= 1.25 * beyond_bytes - 1
        assert case.corrections == 1

    _after_training(check)


def test_where_not_all_of_it_can_be_held_back_as_much_is_as_there_is() -> None:
    def check(session: Session) -> None:
        (case,) = session.cases.values()
        case.corrections = case.reserve_bytes = 0
        lesson = _lesson(session, beyond_bytes=1 << 40)
        assert "can be; a device_budget of 1.25 TiB has room for all of it" in lesson.fallback
        assert lesson.plan is not None
        assert lesson.plan.prediction.device_peak_bytes <= lesson.plan.budgets.device_bytes
        assert case.reserve_bytes == lesson.held_back_bytes > 0
        case.corrections = 0
        assert _lesson(session, beyond_bytes=1 << 40).plan is None, "there is no more"

    _after_training(check)


def test_what_no_plan_is_to_hold_back_is_expected() -> None:
    """Of a plan that is replayed, within its budget; and where there is nothing more to be had."""

    def check(session: Session) -> None:
        (case,) = session.cases.values()
        _nothing_learned(session)
        _make_out(session, 1.0)
        case.surplus_bytes, case.told = 0, None
        assert case.schedule is not None
        planned_bytes = case.expected_bytes
        peak_bytes = planned_bytes + (16 << 20)
        session.plans.replayed = case.schedule.plan
        lesson = learn(case, session.plans, peak_bytes=peak_bytes, budget_bytes=1 << 40)
        session.plans.replayed = None
        assert lesson == Lesson()
        assert case.expected_bytes == peak_bytes
        case.surplus_bytes = case.corrections = case.reserve_bytes = 0
        _lesson(session, beyond_bytes=1 << 40)
        assert case.expected_bytes == planned_bytes, "as much of it as can be is held back first"
        _lesson(session, beyond_bytes=1 << 40)
        assert case.budgets is not None
        assert case.expected_bytes == case.budgets.device_bytes + (1 << 40)

    _after_training(check)


def test_half_of_what_is_held_back_for_nothing_is_given_back_three_times() -> None:
    def check(session: Session) -> None:
        (case,) = session.cases.values()
        assert case.budgets is not None
        _nothing_learned(session)
        unused_bytes = 8 << 20
        case.times_given_back, case.reserve_bytes = 0, 2 * unused_bytes
        state_bytes = case.memory.state_bytes if case.memory is not None else 0
        case.budgets = dataclasses.replace(case.budgets, device_bytes=64 << 20)
        _make_out(session, 1.0)

        def lesson() -> Lesson:
            limit_bytes = 64 << 20
            peak_bytes = limit_bytes - unused_bytes
            return learn(case, session.plans, peak_bytes=peak_bytes, budget_bytes=limit_bytes)

        for times in (1, 2, 3):
            plan = lesson().plan
            assert plan is not None
            assert case.reserve_bytes == 2 * unused_bytes - times * (unused_bytes // 2)
            assert plan.trace.state_bytes == state_bytes + case.reserve_bytes
        assert lesson().plan is None, "it may be needed after all"

    _after_training(check)
