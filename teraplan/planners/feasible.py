"""Refusals of device budgets, and one that works.

Sums of bytes say for which budgets there is no plan:

    least                   what is touched at once
    peak - room             what the other tiers have no room for
                            |
    0 ----- no plan --------+--- perhaps: do whole tensors fit together? ---- peak: nothing moves

In between only placing tells. So the budget that an error names is one for which the policy, or the
first attempts of the default one, have found room. It works; whether less would do, too, is known
where it is what the sums ask for.
"""

from collections.abc import Callable

from teraplan.errors import InfeasibleBudgetError
from teraplan.planners.base import Planner, Problem
from teraplan.planners.baselines.simple import plan_or_none
from teraplan.planners.placing.tiers import assign
from teraplan.planners.placing.victims import choose
from teraplan.planners.search.first_attempts import all_spreads, first_orders, first_spreads
from teraplan.simulation.memory_curve import peak
from teraplan.units import format_nbytes

_FIRST_STEP = 10
"""What is between is tried from its lowest part on, first a step of it halved so many times."""
_MOST_TRIES, _LEAST_TRIES, _WORK = 40, 4, 100_000
"""Halvings of the last step: at most, at least, and idle periods times halvings."""

Works = Callable[[Problem], bool]
"""Whether a policy has a plan for a problem."""


def finds_room(problem: Problem) -> bool:
    """Whether the default policy has a plan by its first attempts."""
    periods, pressure = problem.lifetimes, problem.pressure()
    for order in first_orders(problem):
        rows = choose(periods, pressure, order(periods, pressure))
        for spread in first_spreads(problem, all_spreads(problem)):
            if rows is not None and assign(problem, rows, spread) is not None:
                return True
    return False


def works_by(planner: Planner, problem: Problem) -> bool:
    """Whether this planner has a plan."""
    return plan_or_none(planner, problem) is not None


def working_budget(problem: Problem, works: Works, lowest: int) -> int:
    """A device budget that works: `lowest` if that does, else near to the least above it."""
    highest = peak(problem.device)
    if lowest >= highest or works(problem.within(lowest)):
        return lowest
    step = max((highest - lowest) >> _FIRST_STEP, 1)
    while lowest + step < highest and not works(problem.within(lowest + step)):
        lowest, step = lowest + step, 2 * step
    highest = min(lowest + step, highest)
    for _ in range(max(_LEAST_TRIES, min(_MOST_TRIES, _WORK // (len(problem.lifetimes) + 1)))):
        middle = (lowest + highest) // 2
        if middle == lowest:
            break
        if works(problem.within(middle)):
            highest = middle
        else:
            lowest = middle
    return highest


def require_feasible(
    problem: Problem, works: Works | None = None, *, margin_bytes: int = 0
) -> None:
    """Does nothing if the budgets can hold the step as far as sums of bytes tell.

    Args:
        problem: the step and the budgets.
        works: by which the budget is found that an error names; None: by the default policy.
        margin_bytes: added to that budget, since the step will be measured anew under it.

    Raises:
        InfeasibleBudgetError: says which site needs how much, and a budget that works.
    """
    least, limit, enough = problem.least, problem.limit_bytes, problem.enough_bytes()
    if limit >= enough:
        return
    found = working_budget(problem, works or finds_room, enough)
    named = found + margin_bytes
    spare = f", {format_nbytes(margin_bytes)} of it to spare" if margin_bytes else ""
    sized = f"{format_nbytes(named)} ({named} bytes{spare})"
    if found > enough:
        sized += f": with room for {problem.rooms()} there is a plan, and perhaps for a little less"
    if limit < least.nbytes:
        sized = sized if found > enough else f"at least {sized}"
        if found == enough > least.nbytes:
            sized += f", with room for {problem.rooms()}"
        raise InfeasibleBudgetError(
            f"the device budget of {format_nbytes(limit)} is "
            f"{format_nbytes(least.nbytes - limit)} too small even if everything that can move "
            f"does: {least.describe(problem.trace)}. Set the device budget to {sized}, "
            "or use a smaller batch",
            least_budget_bytes=named,
        )
    need, site = peak(problem.device) - limit, int(problem.device.argmax())
    more = f"Give host memory or storage {format_nbytes(need - problem.room_bytes())} more"
    if not problem.tier_bytes:
        more = "Name a machine with host memory or storage"
    raise InfeasibleBudgetError(
        f"{format_nbytes(need)} must be elsewhere at site {site} to keep the device budget of "
        f"{format_nbytes(limit)}, but there is room for {problem.rooms()}. "
        f"{more}, or raise the device budget to {sized}",
        least_budget_bytes=named,
    )


def with_working_budget(
    error: InfeasibleBudgetError, problem: Problem, works: Works | None
) -> InfeasibleBudgetError:
    """The error of a planner, with a device budget that works if it names none.

    Where `works` is None that is the one with which nothing has to move.
    """
    if error.least_budget_bytes:
        return error
    named, there_is = peak(problem.device), "nothing has to move"
    if works is not None:
        named = working_budget(problem, works, problem.limit_bytes + 1)
        there_is = "there is a plan, and perhaps for a little less"
    return InfeasibleBudgetError(
        f"{error}. Raise the host, storage or device budget: with {format_nbytes(named)} "
        f"({named} bytes) of the device {there_is}",
        least_budget_bytes=named,
    )
