"""What planned steps teach: how much memory the process really takes, how long steps really are.

A plan knows the tensors. The process holds more: free memory between tensors, temporaries that the
measured step had elsewhere. What it took beyond the budget is held back in the next plan, and half
of what turns out to be held back for nothing is given back. And where planned steps take longer or
shorter than predicted, the next plan takes what they say of computation and links (`calibration`).
If it is slower than the one before, that one comes back and stays.
"""

import logging
from dataclasses import dataclass, replace

from teraplan.errors import InfeasibleBudgetError
from teraplan.runtime.device import MEASURED_WITHIN_BYTES
from teraplan.runtime.session.calibration import MeasuredPlan, typical_ns
from teraplan.runtime.session.case import Case
from teraplan.runtime.session.plan_maker import PlanMaker
from teraplan.units import MIB, format_nbytes, format_ns
from teraplan.values.plan import Plan

log = logging.getLogger(__name__)

HEADROOM_FRACTION = 0.03
"""Of the budget, the least that is held back at once, and the most that may be free for a while."""
_MAX_CORRECTIONS = 4
_CORRECTION_FACTOR = 1.25
"""Of what the process took beyond its budget, so much is held back. It is faster to move more than
to unmap and map again: without the correction a step at 50 % had 160 MiB more of fresh pages."""
_WITHIN_FRACTION = 0.02
"""Of the budget, or a few pages of the heap: no reason to plan anew, and to move more."""
_FEW_PAGES_BYTES = MIB // 2
"""Less is not worth a word."""
_UNUSED_FRACTION, _UNUSED_BYTES = 0.03, 4 * MIB
"""Of the budget: what is held back and then not used is given back from here on."""
_MOST_GIVEN_BACK = 3
"""Times, each a new plan; each time half of what was not used, since it may be needed after all."""
_COMPARED_AFTER = (3, 6, 12, 24)
"""Steps under one plan after which predicted and actual times and peaks are compared."""
_COMPARED_EVERY = 48
"""Steps, later: a disk may become slow, or another program may end."""
_CHANGED = 1.25
"""Times what steps under the same plan took before, or that part of it."""
_SLOWER, _SURE_AFTER = 1.03, 6
"""Times the fastest plan so far: a plan that takes longer is not followed any more. By then it has
been followed for so many steps: what the machine does beside them may make three of them slow."""
_MAX_CALIBRATIONS = 4
"""On a machine whose speed varies, predictions would follow for ever. Afterwards they follow where
steps are faster than predicted: what made them slower before has passed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lesson:
    """What follows from a planned step."""

    plan: Plan | None = None
    """To be followed from now on."""
    only_predicts: bool = False
    """It is the plan in force, with what is expected of it now."""
    held_back_bytes: int = 0
    """By so much less will be in use under `plan`; the peak so far says nothing of it."""
    fallback: str = ""
    """Why the plan could not be kept, or made."""
    withdrawn: str = ""
    """A fallback of before that no longer holds."""


_NOTHING = Lesson()


def learn(case: Case, plans: PlanMaker, *, peak_bytes: int, budget_bytes: int) -> Lesson:
    """What follows from the last planned step of `case`.

    Args:
        case: has the run, and takes in what it says.
        plans: makes the next plan.
        peak_bytes: the most memory that tensors took of late.
        budget_bytes: what they may take.
    """
    within = min(MEASURED_WITHIN_BYTES, int(budget_bytes * _WITHIN_FRACTION))
    may_correct = case.corrections < _MAX_CORRECTIONS
    if case.told is not None:  # and there is nothing left to correct, but it is worse than told
        may_correct = peak_bytes > case.told[0] * _CHANGED + within
    is_over = peak_bytes > budget_bytes + within and may_correct
    is_replayed = plans.replayed is not None
    if is_over:
        hold_back = _tell if is_replayed else _hold_back
        return hold_back(case, plans, peak_bytes, budget_bytes)
    withdrawn = _withdrawn(case, peak_bytes, most_bytes=budget_bytes + within)
    is_late = case.num_runs % _COMPARED_EVERY == 0
    is_compared = case.num_runs in _COMPARED_AFTER or is_late or bool(withdrawn)
    is_expected = 0 <= peak_bytes <= budget_bytes + within or case.told is not None
    if is_expected and (is_compared or case.num_runs == 1):
        _expect(case, peak_bytes)
    if not is_compared:
        return _NOTHING
    if is_replayed:
        return Lesson(withdrawn=withdrawn)
    lesson = _compare(case, plans, budget_bytes - peak_bytes, budget_bytes, is_late=is_late)
    return replace(lesson, withdrawn=withdrawn)


def _compare(
    case: Case, plans: PlanMaker, unused_bytes: int, budget_bytes: int, *, is_late: bool
) -> Lesson:
    """What times say, and memory that was not used."""
    assert case.schedule is not None
    plan = case.schedule.plan
    if is_late and _has_changed(case, plan):
        case.forget_speed()
    if _is_slower(case, plan) and case.num_runs < _SURE_AFTER:
        return _NOTHING
    better = _best_so_far(case, plan)
    less = _hold_back_less(case, unused_bytes, budget_bytes)
    found = case.calibrate(may_slow_down=case.calibrations < _MAX_CALIBRATIONS)
    if better is None and (less or (found and not case.settled)):
        return _with_actual_values(case, plans)
    if better is not None or found:
        again = plans.predict_again(case, better or plan)
        return Lesson(plan=again, only_predicts=better is None)
    return _NOTHING


def _withdrawn(case: Case, peak_bytes: int, *, most_bytes: int) -> str:
    """What was told of a peak that has not come for a while; "" if nothing was, or it still does.

    The program has dropped what it held, or was busy with something else then.
    """
    if case.told is None or case.num_runs < _COMPARED_AFTER[0]:
        return ""
    if not 0 <= peak_bytes <= most_bytes:
        return ""
    (_, said), case.told = case.told, None
    return said


def _tell(case: Case, plans: PlanMaker, peak_bytes: int, budget_bytes: int) -> Lesson:
    """Of a replayed plan, which stays as it is."""
    said = (
        f"peak memory is {format_nbytes(peak_bytes)}, over the budget of "
        f"{format_nbytes(budget_bytes)} that the replayed plan was made for"
    )
    case.told = peak_bytes, said
    return Lesson(fallback=said)


def _has_changed(case: Case, plan: Plan) -> bool:
    """True if `plan`, in force, is the fastest so far and takes another time than it did."""
    best, took_ns = case.best, typical_ns(case.runs)
    if best is None or _done_in(plan) != _done_in(best.plan):
        return False
    return not 1 / _CHANGED <= took_ns / best.took_ns <= _CHANGED


def _best_so_far(case: Case, plan: Plan) -> Plan | None:
    """The one to go back to if `plan`, in force, is slower than an older one; for good, then."""
    took_ns, best = typical_ns(case.runs), case.best
    if best is None or took_ns < best.took_ns:
        case.best = MeasuredPlan(plan=plan, took_ns=took_ns)
    elif _is_slower(case, plan):
        case.settled = True
        log.info("back to the plan with which a step took %s", format_ns(best.took_ns))
        return best.plan
    return None


def _is_slower(case: Case, plan: Plan) -> bool:
    """True if `plan`, in force, takes longer than another one did, and none is settled on yet."""
    best = case.best
    if best is None or case.settled or _done_in(plan) == _done_in(best.plan):
        return False
    return typical_ns(case.runs) > best.took_ns * _SLOWER


def _done_in(plan: Plan) -> tuple[object, ...]:
    """All that is decided, without reasons."""
    moved = (replace(migration, reason="") for migration in plan.migrations)
    return (*moved, *(choice.tensor_id for choice in plan.recomputed))


def _hold_back(case: Case, plans: PlanMaker, peak_bytes: int, budget_bytes: int) -> Lesson:
    """A plan that keeps back what the process took beyond the budget, or as much as there is."""
    case.corrections += 1
    case.best = None  # the plans so far have taken too much
    log.info("peak was %s, budget %s", format_nbytes(peak_bytes), format_nbytes(budget_bytes))
    least = int(budget_bytes * HEADROOM_FRACTION)
    beyond = max(int((peak_bytes - budget_bytes) * _CORRECTION_FACTOR), least)
    before = case.reserve_bytes
    case.reserve_bytes += beyond
    assert case.schedule is not None
    old, state_moves = case.schedule.plan, case.schedule.moves_state
    try:
        return Lesson(plan=plans.make(case, like=old), held_back_bytes=beyond)
    except InfeasibleBudgetError as error:
        assert case.budgets is not None
        missing = error.least_budget_bytes - case.budgets.device_bytes
    case.keeps_free = True
    case.reserve_bytes = before + max(0, beyond - missing) if missing > 0 else before
    plan = None
    if case.reserve_bytes > before:
        try:
            plan = plans.make(case, like=old)
        except InfeasibleBudgetError:  # sums allow it, but whole tensors do not fit together
            case.reserve_bytes = before
    held_back = case.reserve_bytes - before
    said = (
        f"peak memory is {format_nbytes(peak_bytes)}, over the budget of "
        f"{format_nbytes(budget_bytes)}: of the {format_nbytes(beyond)} to be held back for "
        f"{_what_for(plans.grown_bytes(case), beyond, state_moves=state_moves)}, "
        f"only {format_nbytes(held_back)} can be; a device_budget of "
        f"{format_nbytes(budget_bytes + beyond - held_back)} has room for all of it"
    )
    case.told = peak_bytes, said
    return Lesson(plan=plan, held_back_bytes=held_back, fallback=said)


def _what_for(grown_bytes: int, beyond_bytes: int, *, state_moves: bool) -> str:
    """What takes memory that no plan knows of."""
    free = "free memory between tensors"
    if state_moves:
        free += ", and for parameters and gradients that the program reads where they are away"
    if grown_bytes <= beyond_bytes // 4:
        return free
    return (
        f"data that the program holds ({format_nbytes(grown_bytes)} more than when memory was "
        f"measured) and {free}"
    )


def _hold_back_less(case: Case, unused_bytes: int, budget_bytes: int) -> bool:
    """Give back half of what turned out to be held back for nothing; True if that is much.

    What was beyond the budget may have been of the first steps under a plan alone, or of one in
    which the program did something else, such as to load a checkpoint.
    """
    enough = max(_UNUSED_BYTES, int(budget_bytes * _UNUSED_FRACTION))
    if case.times_given_back >= _MOST_GIVEN_BACK or unused_bytes <= enough:
        return False
    given = min(case.reserve_bytes, unused_bytes // 2)
    case.times_given_back += given > 0
    case.reserve_bytes -= given
    return given > 0


def _expect(case: Case, peak_bytes: int) -> None:
    """Take in what the process takes beyond its tensors, and no plan is to hold back.

    Where there is room, free memory stays between tensors; and where there is none for more to be
    held back, that was told.
    """
    beyond = peak_bytes - case.expected_bytes
    if abs(beyond) > max(_FEW_PAGES_BYTES, int(peak_bytes * _WITHIN_FRACTION)):
        case.surplus_bytes = max(0, case.surplus_bytes + beyond)


def _with_actual_values(case: Case, plans: PlanMaker) -> Lesson:
    try:
        plan = plans.make(case)
    except InfeasibleBudgetError as error:  # a policy of someone else's: the old plan works
        return Lesson(fallback=f"there is no plan with what planned steps took: {error}")
    log.info(
        "planned steps: computation takes %.3f of the measured time, links have %.3f of theirs",
        *(case.calibration.slowdown, case.calibration.link_speed),
    )
    return Lesson(plan=plan)
