"""Planners by name, and the one way to get a plan from them."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from importlib.metadata import entry_points
from types import MappingProxyType

from teraplan.bounds.bound import split_bound_ns, step_bound_ns
from teraplan.bounds.relaxation import relaxed_bound_ns
from teraplan.checker.check_plan import broken_rules, check_plan, invalid, require_valid
from teraplan.errors import ConfigError, InfeasibleBudgetError
from teraplan.near_names import nearest
from teraplan.planners.base import Planner, Problem, is_late
from teraplan.planners.baselines.simple import SIMPLE
from teraplan.planners.baselines.teraio import PUBLISHED
from teraplan.planners.feasible import (
    Works,
    finds_room,
    require_feasible,
    with_working_budget,
    works_by,
)
from teraplan.planners.foreign import load_planner
from teraplan.planners.placing.placement import with_reasons
from teraplan.planners.recompute import recomputations, with_recomputed
from teraplan.planners.rules import apply_rules
from teraplan.planners.search.finishing import NEAR
from teraplan.planners.search.slower_machine import as_on_its_machine
from teraplan.planners.search.stall_driven import plan_by_stalls
from teraplan.planners.updates.update_split import split_updates
from teraplan.simulation.simulate import predict
from teraplan.values.hardware import Budgets, Hardware, Tier
from teraplan.values.plan import UNKNOWN, HostUpdate, Migration, Plan, Recomputation
from teraplan.values.recomputed_step import recomputed_step
from teraplan.values.step_trace import StepTrace


def _with_reasons(planner: Planner, problem: Problem) -> tuple[Migration, ...]:
    return with_reasons(problem, planner(problem))


POLICIES: Mapping[str, Planner] = MappingProxyType(
    {
        "teraplan": plan_by_stalls,
        **PUBLISHED,
        **{name: partial(_with_reasons, planner) for name, planner in SIMPLE.items()},
    }
)
ENTRY_POINTS = "teraplan.policies"
"""Group of entry points in which other packages name their policies."""


def make_plan(
    trace: StepTrace,
    hardware: Hardware,
    budgets: Budgets,
    policy: str = "teraplan",
    *,
    rules: Mapping[str, Tier] | None = None,
    candidates: Sequence[Plan] = (),
    time_limit_s: float | None = None,
    tight_bound: bool = False,
    recompute: bool | Sequence[int] = True,
    contention_ns_per_byte: float = 0.0,
    split: bool = True,
) -> Plan:
    """A plan for `trace` within `budgets`, accepted by the independent checker.

    Args:
        trace: the step.
        hardware: the machine.
        budgets: the most that the plan may use.
        policy: name of a planner.
        rules: tiers by pattern of tensor names (`rules`); None is no rule.
        candidates: plans for the same step made before, for less memory or a slower machine: if
            one is valid here and faster than what the policy finds, it is the answer. Not looked
            at if there are rules.
        time_limit_s: stop searching after so many seconds with the best plan found by then; the
            first plan is finished in any case. The same input then no longer gives the same plan.
        tight_bound: bound the step by a linear program (`relaxation`), which needs scipy and takes
            about as long as planning.
        recompute: let "teraplan" compute activations again where the trace says how and that is
            faster, or exactly those with these ids. Not looked at if there are rules.
        contention_ns_per_byte: by which the computation takes longer for each byte that is moved
            beside it, out or back: then it can be faster to compute again what nobody waits for.
        split: let "teraplan" split tensors between host memory and storage.

    Raises:
        ConfigError: if there is no such policy, or that of another package fails, a rule matches
            nothing, scipy is missing, or the links are so slow that the step takes months.
        InfeasibleBudgetError: if no plan fits; says which site needs how much.
    """
    planner = planner_named(policy)
    deadline = None if time_limit_s is None else time.monotonic() + time_limit_s

    kept = Problem.of(trace, hardware, budgets)
    works = _works_by(policy, planner, kept)

    def problem_of(recomputed: tuple[Recomputation, ...]) -> Problem:
        if not recomputed:
            return kept
        step = recomputed_step(trace, [choice.tensor_id for choice in recomputed])
        return Problem.of(step, hardware, budgets)

    @cache
    def plan_step(recomputed: tuple[Recomputation, ...], draft: bool) -> Plan:
        asked = _asked(problem_of(recomputed), works, rules or {}, deadline, split)
        asked = replace(asked, draft=draft)
        try:
            migrations = planner(asked)
        except InfeasibleBudgetError as error:
            raise with_working_budget(error, asked, works) from error
        host_updates: tuple[HostUpdate, ...] = ()
        if planner is plan_by_stalls:
            migrations, host_updates = split_updates(asked, planner, migrations)
        plan = Plan(
            policy=policy,
            budgets=budgets,
            hardware=hardware,
            trace=trace,
            migrations=migrations,
            prediction=UNKNOWN,
            host_updates=host_updates,
            recomputed=recomputed,
        )
        if policy not in POLICIES:  # only what holds can be simulated, and others may have bugs
            broken = broken_rules(check_plan(plan))
            if broken:
                raise invalid(broken, policy)
        plan = replace(plan, prediction=predict(trace, hardware, *plan.choices))
        require_valid(plan)
        return plan

    def found() -> Plan:
        if planner is not plan_by_stalls or rules:
            return plan_step((), False)
        if not isinstance(recompute, bool):
            return plan_step(recomputations(trace, recompute), False)
        kept = plan_step((), False)
        if not recompute:
            return kept
        late, contention = partial(is_late, deadline), contention_ns_per_byte
        return with_recomputed(kept, plan_step, late, contention_ns_per_byte=contention)

    allowed = [
        other
        for other in (candidates if not rules else ())
        if (recompute or not other.recomputed) and (split or not _splits(other))
    ]
    plan = _best(found, allowed, kept)
    bound_ns = _bound_ns(problem_of(plan.recomputed), tight_bound)
    return replace(plan, prediction=replace(plan.prediction, bound_ns=bound_ns))


def _works_by(policy: str, planner: Planner, problem: Problem) -> Works | None:
    """By which the budget is found that an error names; None if the policy is too slow for that."""
    if planner is plan_by_stalls:
        return finds_room
    quick = policy in SIMPLE or (policy in POLICIES and len(problem.lifetimes) <= NEAR)
    return partial(works_by, planner) if quick else None


def _asked(
    problem: Problem,
    works: Works | None,
    rules: Mapping[str, Tier],
    deadline: float | None,
    splits: bool,
) -> Problem:
    """What a planner is asked, which is feasible."""
    ruled = apply_rules(problem.trace, rules)
    asked = replace(
        Problem.of(ruled.trace, problem.hardware, problem.budgets) if rules else problem,
        only_tier=ruled.only_tier,
        may_be_hosted=ruled.may_be_hosted,
        deadline=deadline,
        splits=splits,
    )
    require_feasible(asked, works)
    return asked


def _splits(plan: Plan) -> bool:
    return any(m.host_bytes for m in plan.migrations)


def _bound_ns(problem: Problem, tight: bool) -> int:
    if problem.hardware.host_cores is not None and problem.trace.updates:
        return split_bound_ns(problem.lifetimes, problem.hardware, problem.pressure())
    bound = relaxed_bound_ns if tight else step_bound_ns
    return bound(problem.lifetimes, problem.hardware, problem.pressure(), problem.tier_bytes)


def with_choices_of(plan: Plan, trace: StepTrace, hardware: Hardware) -> Plan | None:
    """The choices of `plan` for the same step, measured anew; None if they do not hold there."""
    remade = _predicted(replace(plan, trace=trace, hardware=hardware))
    return None if remade is None or check_plan(remade) else with_bound(remade)


def with_bound(plan: Plan) -> Plan:
    """The plan, whose prediction is its own, with a lower bound of the step."""
    bound_ns = _bound_ns(Problem.of(plan.step, plan.hardware, plan.budgets), tight=False)
    return replace(plan, prediction=replace(plan.prediction, bound_ns=bound_ns))


def as_it_is(plan: Plan) -> Plan:
    """A plan that somebody may have edited, with the prediction of what it says now.

    It is the plan itself if that is what it predicts.

    Raises:
        InvalidPlanError: it does not hold.
    """
    violations = check_plan(plan)
    broken = broken_rules(violations)
    if broken:
        raise invalid(broken)
    again = _simulated(plan)
    said = replace(again.prediction, bound_ns=plan.prediction.bound_ns)
    return with_bound(again) if violations or said != plan.prediction else plan


def _predicted(plan: Plan) -> Plan | None:
    """The plan with a prediction of its own; None if it does not hold.

    It may come from a file that somebody has edited, and only what the checker accepts can be
    simulated.
    """
    if broken_rules(check_plan(plan)):
        return None
    return _simulated(plan)


def _simulated(plan: Plan) -> Plan:
    """The plan, which holds, with a prediction of its own but for the bound."""
    return replace(plan, prediction=predict(plan.trace, plan.machine, *plan.choices))


def _best(found: Callable[[], Plan], candidates: Sequence[Plan], problem: Problem) -> Plan:
    """What is found, or a candidate that holds and is faster.

    Raises:
        InfeasibleBudgetError: neither is there.
    """
    plan, infeasible = None, None
    try:
        plan = found()
    except InfeasibleBudgetError as error:
        infeasible = error
    for other in candidates:
        plan = _faster(other, problem, plan) or plan
    if plan is None:
        assert infeasible is not None, "one of both was found"
        raise infeasible
    return plan


def _faster(candidate: Plan, problem: Problem, plan: Plan | None) -> Plan | None:
    """The candidate for another machine and budgets; None if it does not hold there.

    None, too, if that is not faster than `plan`.
    """
    if candidate.trace != problem.trace:
        return None
    remade = _predicted(replace(candidate, hardware=problem.hardware, budgets=problem.budgets))
    if remade is None:
        return None
    longer = remade.prediction.step_ns > candidate.prediction.step_ns
    if longer and not broken_rules(check_plan(candidate)):
        others = filter(None, map(_predicted, as_on_its_machine(candidate, remade)))
        remade = min((remade, *others), key=lambda one: one.prediction.step_ns)
    if plan and remade.prediction.step_ns >= plan.prediction.step_ns:
        return None
    return None if check_plan(remade) else remade


def planner_named(policy: str) -> Planner:
    """The planner of this name, ours or of an installed package.

    Raises:
        ConfigError: if there is none; as `load_planner`.
    """
    planner = POLICIES.get(policy)
    if planner is not None:
        return planner
    others = {point.name: point for point in entry_points(group=ENTRY_POINTS)}
    if policy in others:
        return load_planner(others[policy])
    names = sorted({*POLICIES, *others})
    near = nearest(policy, names)
    hint = f'; did you mean "{near}"?' if near else ""
    raise ConfigError(f'policy "{policy}" is not one of {", ".join(names)}{hint}')
