"""What only the best plan of a search is worth: splits between tiers, and copies out that wait.

Also when a plan is good enough: near to the bound of its step.
"""

from collections.abc import Iterable, Iterator

from teraplan.bounds.bound import step_bound_ns
from teraplan.planners.base import Planner, Problem
from teraplan.planners.baselines.simple import SIMPLE, plan_or_none
from teraplan.planners.baselines.teraio import BY_AREA, PUBLISHED
from teraplan.planners.placing.postpone import postpone_copies_out
from teraplan.planners.search.tier_split import split_between_tiers
from teraplan.simulation.simulator import Simulator
from teraplan.values.plan import Migration

Plan = tuple[Migration, ...]

PLENTY = 20_000
"""Idle periods from which on simple policies are tried on the coarse step alone, and from which on
three attempts are all."""
_FASTEST = 3
"""Plans that are compared on the step itself, where they are of a coarse one."""
NEAR = 500
"""Idle periods from which on half a percent over the bound is near enough to stop."""

_WORK_OF_PUBLISHED, _WORK_OF_G10 = 3_000_000, 15_000_000
"""Idle periods times these and sites, up to which all of them, or G10 alone, take a second."""


def finished(
    problem: Problem, simulator: Simulator, migrations: Plan, starts: Iterable[Plan] = ()
) -> tuple[Plan, ...]:
    """With what only the best plan is worth, the fastest first; some as they were before, too.

    Args:
        problem: the step and the machine.
        simulator: of both.
        migrations: the best plan, which is among the results.
        starts: others, of which splits may make a faster one: what a split takes away are waits,
            and a plan that sends too much over one link has the most.
    """
    near_ns = near_bound_ns(problem)
    taken = {migrations: simulator.run(migrations)}
    for start in (migrations, *starts):
        split = split_between_tiers(problem, simulator, start, near_ns)
        if split is not start or start is not migrations:
            taken[split] = simulator.run(split)
    for plan, timing in sorted(taken.items(), key=lambda one: one[1].step_ns)[:_FASTEST]:
        later = postpone_copies_out(problem, simulator, plan, timing, near_ns)
        if later is not plan:
            taken[later] = simulator.run(later)
    plans = sorted(taken, key=lambda plan: taken[plan].step_ns)
    whole = [plan for plan in plans if not _splits(plan)]
    return tuple(dict.fromkeys((*plans[:_FASTEST], *whole[:1], migrations)))


def best_of_step_itself(problem: Problem, plans: Iterator[Plan]) -> Plan:
    """The first plan of a long step; another, or one of another policy, if that is faster here."""
    if len(problem.lifetimes) > PLENTY or problem.deadline is not None:
        return next(plans)
    simulator = problem.simulator()
    others = [plan_or_none(planner, problem) for planner in _others(problem)]
    candidates = [*plans, *(other for other in others if other is not None)]
    timings = {plan: simulator.run(plan) for plan in candidates}
    fastest = sorted(timings, key=lambda plan: timings[plan].step_ns)
    tried = fastest[:1] + [plan for plan in fastest[1:] if _splits(plan) != _splits(fastest[0])][:1]
    near_ns = near_bound_ns(problem)
    later = [postpone_copies_out(problem, simulator, p, timings[p], near_ns) for p in tried]
    return min(later, key=lambda plan: simulator.run(plan).step_ns)


def _others(problem: Problem) -> Iterator[Planner]:
    """Policies to compare with that are quick enough."""
    yield from SIMPLE.values()
    num_periods = len(problem.lifetimes)
    work = num_periods * (num_periods + problem.lifetimes.num_sites)
    if work <= _WORK_OF_PUBLISHED:
        yield from PUBLISHED.values()
    elif work <= _WORK_OF_G10:
        yield from BY_AREA.values()


def _splits(plan: Plan) -> bool:
    return any(m.host_bytes for m in plan)


def bound_ns(problem: Problem) -> int:
    """No plan has a shorter step."""
    return step_bound_ns(
        problem.lifetimes, problem.hardware, problem.pressure(), problem.tier_bytes
    )


def near_bound_ns(problem: Problem) -> int:
    """When a step is near enough to the bound to stop searching."""
    exact_ns = bound_ns(problem)
    return exact_ns + exact_ns // 200 if len(problem.lifetimes) > NEAR else exact_ns
