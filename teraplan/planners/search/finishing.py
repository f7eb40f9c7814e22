"""What only the best plan of a search is worth: splits between tiers, and copies out that wait.

Also when a plan is good enough: near to the bound of its step.
"""

from collections.abc import Iterator

from teraplan.bounds.bound import step_bound_ns
from teraplan.planners.base import Problem
from teraplan.planners.baselines.simple import SIMPLE, plan_or_none
from teraplan.planners.placing.postpone import postpone_copies_out
from teraplan.planners.search.tier_split import split_between_tiers
from teraplan.simulation.simulator import Simulator, Timing
from teraplan.values.plan import Migration

Plan = tuple[Migration, ...]

PLENTY = 20_000
"""Idle periods from which on simple policies are tried on the coarse step alone, and from which on
three attempts are all."""
NEAR = 500
"""Idle periods from which on half a percent over the bound is near enough to stop."""


def finished(
    problem: Problem, simulator: Simulator, migrations: Plan, timing: Timing | None = None
) -> tuple[Plan, ...]:
    """With what only the best plan is worth, the fastest first, and as it was before each.

    `timing` is that of `migrations`, where it is known.
    """
    near_ns = near_bound_ns(problem)
    split = split_between_tiers(problem, simulator, migrations, near_ns)
    if timing is None or split is not migrations:
        timing = simulator.run(split)
    return postpone_copies_out(problem, simulator, split, timing, near_ns), split, migrations


def best_of_step_itself(problem: Problem, plans: Iterator[Plan]) -> Plan:
    """The first plan of a coarse step; another, or a simple policy's, if that is faster here."""
    if len(problem.lifetimes) > PLENTY or problem.deadline is not None:
        return next(plans)
    simulator = problem.simulator()
    others = [plan_or_none(planner, problem) for planner in SIMPLE]
    candidates = [*plans, *(other for other in others if other is not None)]
    best = min(candidates, key=lambda plan: simulator.run(plan).step_ns)
    timing = simulator.run(best)
    return postpone_copies_out(problem, simulator, best, timing, near_bound_ns(problem))


def bound_ns(problem: Problem) -> int:
    """No plan has a shorter step."""
    return step_bound_ns(
        problem.lifetimes, problem.hardware, problem.pressure(), problem.tier_bytes
    )


def near_bound_ns(problem: Problem) -> int:
    """When a step is near enough to the bound to stop searching."""
    exact_ns = bound_ns(problem)
    return exact_ns + exact_ns // 200 if len(problem.lifetimes) > NEAR else exact_ns
