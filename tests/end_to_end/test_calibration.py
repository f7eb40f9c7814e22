"""What planned steps take becomes what the next plan expects."""

import dataclasses
from collections.abc import Callable

from teraplan.run_record import RunRecord
from teraplan.runtime.session import Session
from tests.end_to_end.training import MLP, Run, run, sessions, training


def _after_training(check: Callable[[Session], None]) -> None:
    def program(this: Run) -> None:
        training(MLP, MLP().batch, steps=8)(this)
        check(next(iter(sessions())))

    run(program, device_budget="90%")


def _make_out(session: Session, slower: float) -> int:
    """Let all runs have taken so much longer than predicted, without waits; returns their time."""
    (case,) = session.cases.values()
    assert case.schedule is not None
    took_ns = int(case.schedule.plan.prediction.step_ns * slower)
    case.runs = [_with_duration(record, took_ns) for record in case.runs]
    case.calibrated, case.slowdown = False, 1.0
    return took_ns


def _with_duration(record: RunRecord, duration_ns: int) -> RunRecord:
    return dataclasses.replace(record, duration_ns=duration_ns, stalls=())


def test_predictions_follow_what_planned_steps_take() -> None:
    def check(session: Session) -> None:
        (case,) = session.cases.values()
        took_ns = _make_out(session, 10.0)
        session._calibrate(case)
        assert case.schedule is not None
        predicted_ns = case.schedule.plan.prediction.step_ns
        assert 0.9 * took_ns < predicted_ns < 1.1 * took_ns
        session._calibrate(case)
        assert case.schedule.plan.prediction.step_ns == predicted_ns, "once is enough"

    _after_training(check)


def test_a_right_prediction_stays() -> None:
    def check(session: Session) -> None:
        (case,) = session.cases.values()
        _make_out(session, 1.02)
        before = case.schedule
        session._calibrate(case)
        assert case.schedule is before
        assert case.slowdown == 1.0

    _after_training(check)
