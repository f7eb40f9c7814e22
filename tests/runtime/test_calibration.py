"""What planned steps take becomes what the next plan expects."""

import dataclasses

from teraplan.run_record import RunRecord
from teraplan.runtime.session import _CALIBRATED_AFTER
from tests.end_to_end.training import MLP, Run, run, sessions, training


def test_predictions_follow_what_planned_steps_take() -> None:
    """Times of an empty-handed step are made out to be a tenth of what they were."""
    model_of_steps = training(MLP, MLP().batch, steps=6 + _CALIBRATED_AFTER)

    def program(this: Run) -> None:
        model_of_steps(this)
        (case,) = next(iter(sessions())).cases.values()
        schedule, runs = case.schedule, case.runs
        assert schedule is not None
        case.calibrated, case.slowdown = False, 1.0
        case.durations_ns = [tuple(d // 10 for d in steps) for steps in case.durations_ns]
        session = next(iter(sessions()))
        case.schedule = type(schedule)(session.plans.make(case))
        before = case.schedule.plan.prediction.step_ns
        del runs[:-_CALIBRATED_AFTER]
        session._calibrate(case)
        after = case.schedule.plan.prediction.step_ns
        actual = sorted(run.duration_ns for run in runs)
        assert before < actual[0] / 2
        assert actual[0] * 0.9 <= after <= actual[-1] * 1.1
        assert case.calibrated
        session._calibrate(case)
        assert case.schedule.plan.prediction.step_ns == after, "once is enough"

    run(program, device_budget="90%")


def test_a_right_prediction_stays() -> None:
    def program(this: Run) -> None:
        training(MLP, MLP().batch, steps=6)(this)
        (case,) = next(iter(sessions())).cases.values()
        assert case.schedule is not None
        took = case.schedule.plan.prediction.step_ns
        case.runs = [_with_duration(r, took) for r in case.runs[-1:]]
        assert not case.calibrate()

    run(program, device_budget="90%")


def _with_duration(record: RunRecord, duration_ns: int) -> RunRecord:
    return dataclasses.replace(record, duration_ns=duration_ns, stalls=())
