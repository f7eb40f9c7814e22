"""The checker catches each kind of violation, as a change of a plan that holds."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from teraplan.checker.check_plan import check_plan, require_valid
from teraplan.checker.violations import ViolationKind
from teraplan.errors import InvalidPlanError
from teraplan.planners import make_plan
from teraplan.simulation.memory_curve import device_curve, least_budget, peak
from teraplan.simulation.simulate import predict
from teraplan.values.hardware import Tier
from teraplan.values.plan import Migration, Plan
from teraplan.values.step_trace import StepTrace, TensorKind
from tests.planning.synthetic import budgets, gpt_trace, machine, plan_of


@pytest.fixture(scope="module")
def plan() -> Plan:
    trace = gpt_trace(2)
    least, most = least_budget(trace).nbytes, peak(device_curve(trace))
    return make_plan(trace, machine(host=None), budgets((least + most) // 2))


def with_first(plan: Plan, change: Callable[[Migration], Migration]) -> Plan:
    first, *rest = plan.migrations
    return replace(plan, migrations=(change(first), *rest))


def kinds(plan: Plan) -> set[ViolationKind]:
    return {violation.kind for violation in check_plan(plan)}


def test_a_plan_of_a_planner_holds(plan: Plan) -> None:
    require_valid(plan)
    assert check_plan(plan) == ()


MIGRATION_CHANGES: list[tuple[ViolationKind, Callable[[Migration], Migration]]] = [
    (ViolationKind.TENSOR, lambda m: replace(m, tensor_id=10**6)),
    (ViolationKind.TENSOR, lambda m: replace(m, tensor_id=-1)),
    (ViolationKind.ORDER, lambda m: replace(m, gone=m.leave - 1)),
    (ViolationKind.ORDER, lambda m: replace(m, back=m.gone)),
    (ViolationKind.ORDER, lambda m: replace(m, back=m.needed + 1)),
    (ViolationKind.ORDER, lambda m: replace(m, leave=-1, gone=0)),
    (ViolationKind.PERIOD, lambda m: replace(m, leave=m.leave - 1)),
    (ViolationKind.PERIOD, lambda m: replace(m, needed=m.needed + 1)),
    (ViolationKind.CLEAN, lambda m: replace(m, clean=True)),
    (ViolationKind.TIER, lambda m: replace(m, tier=Tier.HOST)),
    (ViolationKind.TIER, lambda m: replace(m, tier=Tier.DEVICE)),
]


@pytest.mark.parametrize(("kind", "change"), MIGRATION_CHANGES)
def test_catches_a_wrong_migration(
    plan: Plan, kind: ViolationKind, change: Callable[[Migration], Migration]
) -> None:
    assert kind in kinds(with_first(plan, change))


def test_catches_two_migrations_in_one_period(plan: Plan) -> None:
    doubled = replace(plan, migrations=(*plan.migrations, plan.migrations[0]))
    assert kinds(doubled) == {ViolationKind.OVERLAP}


def test_catches_a_dropped_migration(plan: Plan) -> None:
    assert ViolationKind.DEVICE_BUDGET in kinds(replace(plan, migrations=plan.migrations[1:]))


@pytest.mark.parametrize(
    ("field", "kind"),
    [
        ("device_bytes", ViolationKind.DEVICE_BUDGET),
        ("storage_bytes", ViolationKind.STORAGE_BUDGET),
    ],
)
def test_catches_a_budget_that_is_too_small(plan: Plan, field: str, kind: ViolationKind) -> None:
    peak_bytes = getattr(plan.prediction, field.replace("_bytes", "_peak_bytes"))
    exact = replace(plan, budgets=replace(plan.budgets, **{field: peak_bytes}))
    assert check_plan(exact) == ()
    short = replace(plan, budgets=replace(plan.budgets, **{field: peak_bytes - 1}))
    assert kinds(short) == {kind}


def test_catches_a_host_budget_that_is_too_small(plan: Plan) -> None:
    hardware = machine(host=25.0)
    moved = tuple(replace(m, tier=Tier.HOST) for m in plan.migrations)
    prediction = predict(plan.trace, hardware, moved)
    hosted = replace(plan, hardware=hardware, migrations=moved, prediction=prediction)
    assert check_plan(hosted) == ()
    small = replace(plan.budgets, host_bytes=prediction.host_peak_bytes - 1)
    assert kinds(replace(hosted, budgets=small)) == {ViolationKind.HOST_BUDGET}


@pytest.mark.parametrize(
    "field",
    [
        "ideal_ns",
        "device_peak_bytes",
        "unlimited_peak_bytes",
        "managed_peak_bytes",
        "host_peak_bytes",
        "storage_peak_bytes",
    ],
)
def test_catches_a_wrong_prediction(plan: Plan, field: str) -> None:
    wrong = replace(plan.prediction, **{field: getattr(plan.prediction, field) + 1})
    found = check_plan(replace(plan, prediction=wrong))
    assert {v.kind for v in found} == {ViolationKind.PREDICTION}
    assert any(v.message.startswith(field) for v in found)


def test_catches_an_impossible_time_and_wrong_sums(plan: Plan) -> None:
    fast = replace(plan.prediction, step_ns=plan.prediction.ideal_ns - 1)
    assert kinds(replace(plan, prediction=fast)) == {ViolationKind.PREDICTION}
    none = replace(plan.prediction, out_bytes={})
    assert kinds(replace(plan, prediction=none)) == {ViolationKind.PREDICTION}


def test_catches_a_trace_that_contradicts_itself(plan: Plan) -> None:
    first, *rest = plan.trace.tensors
    for windows in (((5, 4),), ((0, 3), (2, 5)), ((0, 10**6),), ()):
        tensors = (replace(first, windows=windows), *rest)
        broken = replace(plan, trace=replace(plan.trace, tensors=tensors))
        assert kinds(broken) == {ViolationKind.TRACE}


def test_a_parameter_is_never_clean(plan: Plan) -> None:
    tensors = tuple(replace(t, kind=TensorKind.PARAMETER) for t in plan.trace.tensors)
    changed = with_first(plan, lambda m: replace(m, clean=True))
    found = check_plan(replace(changed, trace=replace(plan.trace, tensors=tensors)))
    assert "since it changed in window 0" in found[0].message


def test_the_error_lists_the_first_few(plan: Plan) -> None:
    broken = tuple(replace(m, needed=m.needed + 1) for m in plan.migrations)
    with pytest.raises(InvalidPlanError, match=r"breaks \d+ rules:\n  period: migration 0: g0.c0/"):
        require_valid(replace(plan, migrations=broken))


def parameter_step(changed_in: tuple[int, ...] | None) -> StepTrace:
    """Eight sites of 100 ns; a parameter of 100 bytes is used at 1, 4 and 7."""
    site = gpt_trace(1).sites[0]
    tensor = replace(
        gpt_trace(1).tensors[0],
        name="weight",
        kind=TensorKind.PARAMETER,
        nbytes=100,
        windows=((1, 2), (4, 5), (6, 7)),
        persistent=True,
        changed_in=changed_in,
    )
    sites = tuple(replace(site, duration_ns=100, workspace_bytes=0) for _ in range(8))
    return replace(gpt_trace(1), sites=sites, tensors=(tensor,), state_bytes=0)


def move(leave: int, needed: int, clean: bool) -> Migration:
    return Migration(
        tensor_id=0,
        leave=leave,
        gone=leave,
        back=needed,
        needed=needed,
        tier=Tier.STORAGE,
        clean=clean,
    )


def of_parameter(trace: StepTrace, *migrations: Migration) -> Plan:
    return plan_of(trace, machine(), budgets(100), migrations)


def test_a_parameter_is_clean_until_it_changes() -> None:
    trace = parameter_step(changed_in=(2,))
    wrapped, first, second = move(7, 9, False), move(2, 4, True), move(5, 6, True)
    held = of_parameter(trace, wrapped, first, second)
    assert check_plan(held) == ()
    assert held.prediction.out_bytes == {Tier.STORAGE: 100}
    # the copy of the step before is kept until 6, the new one is written from 7 on
    assert held.prediction.storage_peak_bytes == 100
    alone = of_parameter(trace, replace(first, clean=False), second)
    assert check_plan(alone) == ()
    assert kinds(of_parameter(trace, first, second)) == {ViolationKind.CLEAN}
    elsewhere = replace(first, tier=Tier.HOST, clean=False)
    mixed = replace(of_parameter(trace, second), migrations=(elsewhere, second))
    assert ViolationKind.CLEAN in kinds(replace(mixed, hardware=machine(host=9.0)))


def test_a_parameter_that_changes_everywhere_is_written_every_time() -> None:
    for changed_in in (None, (0, 1, 2)):
        plan = of_parameter(parameter_step(changed_in), move(7, 9, False), move(2, 4, True))
        assert kinds(plan) == {ViolationKind.CLEAN}
    twice = parameter_step(changed_in=(0, 2))
    assert kinds(of_parameter(twice, move(7, 9, False), move(2, 4, True))) == {ViolationKind.CLEAN}
    assert check_plan(of_parameter(twice, move(2, 4, False), move(5, 6, True))) == ()
