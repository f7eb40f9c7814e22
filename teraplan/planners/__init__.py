"""Planners by name, and the one way to get a plan from them."""

import difflib
from collections.abc import Mapping
from functools import partial
from types import MappingProxyType

from teraplan.check_plan import require_valid
from teraplan.errors import ConfigError
from teraplan.hardware import Budgets, Hardware
from teraplan.plan import Plan
from teraplan.planners.base import Planner, Problem, require_feasible
from teraplan.planners.stall_driven import plan_by_stalls
from teraplan.planners.teraio import g10_area, paper_ratio, plan_as_teraio, prose
from teraplan.simulate import predict
from teraplan.step_trace import StepTrace

POLICIES: Mapping[str, Planner] = MappingProxyType(
    {
        "teraplan": plan_by_stalls,
        "teraio": partial(plan_as_teraio, score=paper_ratio),
        "teraio-prose": partial(plan_as_teraio, score=prose),
        "teraio-area": partial(plan_as_teraio, score=g10_area),
    }
)


def make_plan(
    trace: StepTrace, hardware: Hardware, budgets: Budgets, policy: str = "teraplan"
) -> Plan:
    """A plan for `trace` within `budgets`, accepted by the independent checker.

    Raises:
        ConfigError: if there is no such policy.
        InfeasibleBudgetError: if no plan fits; says which site needs how much.
    """
    planner = planner_named(policy)
    problem = Problem.of(trace, hardware, budgets)
    require_feasible(problem)
    migrations = planner(problem)
    plan = Plan(
        policy=policy,
        budgets=budgets,
        hardware=hardware,
        trace=trace,
        migrations=migrations,
        prediction=predict(trace, hardware, migrations),
    )
    require_valid(plan)
    return plan


def planner_named(policy: str) -> Planner:
    """The planner of this name.

    Raises:
        ConfigError: if there is none.
    """
    planner = POLICIES.get(policy)
    if planner is None:
        near = difflib.get_close_matches(policy, POLICIES, n=1, cutoff=0.0)
        hint = f'; did you mean "{near[0]}"?' if near else ""
        raise ConfigError(f'policy "{policy}" is not one of {", ".join(sorted(POLICIES))}{hint}')
    return planner
