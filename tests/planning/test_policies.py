"""Rules, candidates, the time limit, and plans of coarse steps."""

import re
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from teraplan import planners
from teraplan.checker.check_plan import check_plan
from teraplan.errors import (
    ConfigError,
    FileFormatError,
    InfeasibleBudgetError,
)
from teraplan.library.machines import GB, machine_named, machine_of_teraio
from teraplan.library.models import Workload, trace_of
from teraplan.planners import make_plan
from teraplan.planners.base import Planner, Problem
from teraplan.planners.feasible import require_feasible
from teraplan.planners.rules import read_rules
from teraplan.planners.search.coarse import coarsen
from teraplan.planners.search.stall_driven import plan_by_stalls
from teraplan.simulation.memory_curve import device_curve, least_budget, peak
from teraplan.simulation.simulate import predict
from teraplan.units import MIB
from teraplan.values.hardware import Budgets, Hardware, Tier
from teraplan.values.plan import Migration, Plan
from teraplan.values.step_trace import StepTrace
from tests.planning.synthetic import budgets, gpt_trace, machine, plan_of
from tests.planning.test_simulate import step
from tests.planning.traces import machines, traces

quick = settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def between(trace: StepTrace, part: float) -> int:
    least, most = least_budget(trace).nbytes, peak(device_curve(trace))
    return least + int((most - least) * part)


def never(problem: Problem) -> tuple[Migration, ...]:
    raise InfeasibleBudgetError("no plan was found", least_budget_bytes=0)


def test_a_candidate_is_taken_where_nothing_else_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    trace = gpt_trace(2)
    limit = budgets(between(trace, 0.4))
    before = make_plan(trace, machine(), limit)
    monkeypatch.setattr(planners, "POLICIES", {"never": never})
    assert make_plan(trace, machine(), limit, "never", candidates=[before]) == before
    with pytest.raises(InfeasibleBudgetError, match="no plan was found"):
        make_plan(trace, machine(), budgets(between(trace, 0.2)), "never", candidates=[before])


@pytest.mark.parametrize(
    "policy",
    [
        pytest.param("teraplan", marks=pytest.mark.slow),
        "teraio",
        "g10",
        "lru",
        "belady",
        "zero-infinity",
    ],
)
def test_rules_hold_under_every_policy(policy: str) -> None:
    trace = gpt_trace(4)
    rules = {"blocks.*": Tier.STORAGE, "blocks.1": Tier.DEVICE, "g0.c0/gelu_3": Tier.HOST}
    plan = make_plan(trace, machine(6.0, 25.0), budgets(between(trace, 0.6)), policy, rules=rules)
    moved = {trace.tensors[m.tensor_id].name: m.tier for m in plan.migrations}
    assert moved
    assert not [name for name in moved if name.endswith("_1")]
    for name, tier in moved.items():
        assert tier is (Tier.HOST if name == "g0.c0/gelu_3" else Tier.STORAGE)


def test_a_rule_that_matches_nothing_is_an_error() -> None:
    trace = gpt_trace(1)
    with pytest.raises(ConfigError, match=r'rule "layers.9" matches no tensor'):
        make_plan(trace, machine(), budgets(1 << 40), rules={"layers.9": Tier.HOST})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[1]", "rules.json: is a list of 1, expected an object"),
        ('{"a": "disk"}', 'rules.json: a: "disk" is not one of'),
        ('{"a": 1}', "rules.json: a: is 1, expected a string"),
        ('{"a": "host", "a": "device"}', 'has the field "a" twice'),
        ("{", "is not JSON"),
        ('{"a":' * 100_000, "nested too deeply"),
    ],
)
def test_wrong_files_of_rules(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "rules.json"
    path.write_text(text)
    with pytest.raises(FileFormatError, match=message):
        read_rules(path)


def test_files_of_rules(tmp_path: Path) -> None:
    """The last one that matches counts, so their order is that of the file."""
    with pytest.raises(FileFormatError, match="cannot be read"):
        read_rules(tmp_path / "absent.json")
    with pytest.raises(FileFormatError, match="is a device, not a file"):
        read_rules(Path("/dev/zero"))
    path = tmp_path / "rules.json"
    path.write_text('{"b*": "device", "a": "host"}')
    assert list(read_rules(path).items()) == [("b*", Tier.DEVICE), ("a", Tier.HOST)]


def test_a_faster_candidate_is_the_answer_and_a_wrong_one_is_not() -> None:
    trace = gpt_trace(4)
    limit = budgets(between(trace, 0.3))
    ours = make_plan(trace, machine(2.0), limit)
    taken = make_plan(trace, machine(2.0), limit, "lru", candidates=[ours])
    assert taken.migrations == ours.migrations
    assert taken.policy == "teraplan"
    assert taken.prediction == ours.prediction
    first = ours.migrations[0]
    edited = replace(first, gone=first.back, back=first.gone)
    wrong = replace(ours, migrations=(edited, *ours.migrations[1:]))
    assert make_plan(trace, machine(2.0), limit, "lru", candidates=[wrong]).policy == "lru"
    nowhere = replace(ours.hardware, host_link=None, storage_link=None)
    said = replace(ours.prediction, step_ns=1)
    foreign = replace(ours, hardware=nowhere, prediction=said)
    taken = make_plan(trace, machine(2.0), limit, "lru", candidates=[foreign])
    assert taken.migrations == ours.migrations, "its own machine could not have run it"
    smaller = budgets(between(trace, 0.1))
    kept = make_plan(trace, machine(2.0), smaller, candidates=[ours])
    assert check_plan(kept) == ()
    assert kept.migrations != ours.migrations


@pytest.mark.slow
@quick
@given(
    trace=traces(),
    hardware=machines(),
    parts=st.tuples(st.floats(0, 1), st.floats(0, 1)),
    factor=st.integers(1, 4),
)
def test_more_memory_is_never_slower_than_the_plan_before(
    trace: StepTrace, hardware: Hardware, parts: tuple[float, float], factor: int
) -> None:
    low, high = sorted(parts)
    least, room = least_budget(trace).nbytes, 1 << 40
    before: Plan | None = None
    for part, host in ((low, 0), (high, 0), (high, factor * 20_000), (high, room)):
        limit = budgets(between(trace, part), host_bytes=host)
        plan = make_plan(trace, hardware, limit, candidates=[before] if before else [])
        assert limit.device_bytes >= least
        if before is not None:
            assert plan.prediction.step_ns <= before.prediction.step_ns
        before = plan


@pytest.mark.slow
def test_more_disks_behind_a_port_that_the_host_link_fills_are_not_slower() -> None:
    """Both links at once are no faster there, and each copy gets a part of the port."""
    names = [f"rtx-4090:ssd={num_ssds}:host=64GiB" for num_ssds in (1, 4)]
    trace = trace_of(Workload(model="unet", batch=16, length=256), machine_named(names[0]))
    limit = budgets(peak(device_curve(trace)) * 3 // 5, host_bytes=64 << 30)
    few, many = (
        make_plan(trace, machine_named(name).hardware, limit).prediction.step_ns for name in names
    )
    assert many <= few


@pytest.mark.slow
@quick
@given(
    trace=traces(),
    hardware=machines(),
    part=st.floats(0, 1),
    host=st.integers(0, 200),
    factors=st.lists(st.sampled_from((1.1, 1.5, 2.0, 4.0)), min_size=1, max_size=3),
)
def test_faster_storage_behind_a_port_is_never_slower_than_the_plan_before(
    trace: StepTrace, hardware: Hardware, part: float, host: int, factors: list[float]
) -> None:
    limit = budgets(between(trace, part), host_bytes=host * 1000)
    hardware = replace(hardware, device_port=hardware.host_link)
    before = make_plan(trace, hardware, limit)
    for factor in factors:
        assert hardware.storage_link is not None
        hardware = replace(hardware, storage_link=hardware.storage_link.times(factor))
        plan = make_plan(trace, hardware, limit, candidates=[before])
        assert check_plan(plan) == ()
        assert plan.prediction.step_ns <= before.prediction.step_ns
        before = plan


@pytest.mark.slow
def test_more_disks_are_driven_as_fewer_where_they_would_take_the_port() -> None:
    """At full speed they take from the host link what it needs, and the same plan is slower."""
    plans: list[Plan] = []
    for num_ssds in (1, 2):
        machine = machine_named(f"gh200:ssd={num_ssds}:host=120GiB")
        workload = Workload(model="unet", batch=16, length=256)
        trace = plans[0].trace if plans else trace_of(workload, machine)
        limit = budgets(peak(device_curve(trace)) // 4, host_bytes=120 << 30)
        plans.append(make_plan(trace, machine.hardware, limit, candidates=plans))
    few, many = plans
    assert few.storage_pace is None
    assert many.storage_pace == few.hardware.storage_link
    assert many.migrations == few.migrations
    assert many.prediction.step_ns == few.prediction.step_ns
    assert predict(trace, many.hardware, *many.choices).step_ns > many.prediction.step_ns


def test_a_named_least_budget_can_have_a_margin() -> None:
    trace = gpt_trace(2)
    least = least_budget(trace).nbytes
    problem = Problem.of(trace, machine(), budgets(least - 1))
    named = f"at least .* \\({least + 7} bytes, 7 B of it to spare\\)"
    with pytest.raises(InfeasibleBudgetError, match=named) as raised:
        require_feasible(problem, margin_bytes=7)
    assert raised.value.least_budget_bytes == least + 7
    require_feasible(Problem.of(trace, machine(), budgets(least)), margin_bytes=7)


def test_a_time_limit_gives_a_plan_in_time() -> None:
    workload = Workload(model="llama3-70b", dtype="float32", batch=2, micro_batches=2, stages=2)
    hardware = machine_of_teraio(385 * GB).hardware
    trace = trace_of(workload, machine_of_teraio(385 * GB))
    limit = budgets(94 * GB, host_bytes=385 * GB, storage_bytes=hardware.storage_capacity_bytes)
    problem = Problem.of(trace, hardware, limit)
    start = time.monotonic()
    plan = make_plan(trace, hardware, limit, time_limit_s=0.0)
    assert time.monotonic() - start < 20
    assert check_plan(plan) == ()
    assert problem.pressure().any()


@pytest.mark.slow
@quick
@given(
    trace=traces(),
    hardware=machines(),
    part=st.floats(0, 1),
    slots=st.integers(1, 12),
    host=st.integers(0, 300),
)
def test_plans_of_coarse_steps_hold(
    trace: StepTrace, hardware: Hardware, part: float, slots: int, host: int
) -> None:
    limit = budgets(between(trace, part), host_bytes=host * 1000)
    problem = Problem.of(trace, hardware, limit)
    coarse = coarsen(problem, slots)
    assert (coarse.problem.device >= 0).all()
    assert (coarse.problem.device - problem.limit_bytes <= coarse.problem.idle).all()
    migrations = coarse.expand(plan_by_stalls(coarse.problem))
    plan = make_plan(trace, hardware, limit)
    held = plan_of(trace, hardware, limit, migrations)
    assert check_plan(held) == ()
    assert plan.prediction.bound_ns <= held.prediction.step_ns


def policy_in_the_documents() -> Planner:
    text = (Path(__file__).parents[2] / "docs" / "adding-a-policy.md").read_text()
    example = re.findall(r"```python\n(.*?)```", text, re.DOTALL)[0]
    assert len(example.splitlines()) < 50
    names: dict[str, Any] = {}
    exec(compile(example, "adding-a-policy.md", "exec"), names)
    planner: Planner = names["plan_by_size"]
    return planner


@settings(quick, max_examples=40)
@given(
    trace=traces(), hardware=machines(), part=st.floats(0, 1), room=st.none() | st.integers(0, 200)
)
def test_the_policy_in_the_documents_works(
    trace: StepTrace, hardware: Hardware, part: float, room: int | None
) -> None:
    nbytes = 1 << 50 if room is None else room * 1000
    limit = budgets(between(trace, part), host_bytes=nbytes, storage_bytes=nbytes)
    try:
        migrations = policy_in_the_documents()(Problem.of(trace, hardware, limit))
    except InfeasibleBudgetError:
        assert room is not None
        return
    assert check_plan(plan_of(trace, hardware, limit, migrations)) == ()


def test_the_policy_in_the_documents_fills_one_tier_after_another() -> None:
    trace, hardware = gpt_trace(4), machine(6.0, host=12.0)
    limit = budgets(between(trace, 0.2), host_bytes=600 * MIB)
    migrations = policy_in_the_documents()(Problem.of(trace, hardware, limit))
    assert {m.tier for m in migrations} == {Tier.HOST, Tier.STORAGE}
    assert check_plan(plan_of(trace, hardware, limit, migrations)) == ()


def planned_within_what_errors_name(
    trace: StepTrace, hardware: Hardware, limit: Budgets, policy: str
) -> Plan:
    """The plan; where there is none, that for the budget that the error names."""
    try:
        return make_plan(trace, hardware, limit, policy)
    except InfeasibleBudgetError as error:
        assert error.least_budget_bytes > limit.device_bytes
        assert f"({error.least_budget_bytes} bytes)" in str(error)
        enough = replace(limit, device_bytes=error.least_budget_bytes)
    return make_plan(trace, hardware, enough, policy)


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    trace=traces(),
    hardware=machines(),
    part=st.floats(-0.2, 1.2),
    rooms=st.tuples(st.integers(0, 200), st.integers(0, 200)),
    without=st.sampled_from(["", "host_link", "storage_link", "both"]),
    port=st.booleans(),
    policy=st.sampled_from(sorted(planners.POLICIES)),
)
def test_a_plan_that_holds_or_an_error_that_says_why_not(
    trace: StepTrace,
    hardware: Hardware,
    part: float,
    rooms: tuple[int, int],
    without: str,
    port: bool,
    policy: str,
) -> None:
    if without in ("host_link", "both"):
        hardware = replace(hardware, host_link=None)
    if without in ("storage_link", "both"):
        hardware = replace(hardware, storage_link=None)
    if port:
        hardware = replace(hardware, device_port=hardware.host_link or hardware.storage_link)
    limit = budgets(
        max(between(trace, part), 0), host_bytes=rooms[0] * 1000, storage_bytes=rooms[1] * 1000
    )
    plan = planned_within_what_errors_name(trace, hardware, limit, policy)
    assert check_plan(plan) == ()
    assert plan.prediction.bound_ns <= plan.prediction.step_ns


def test_the_least_budget_counts_the_room_in_other_tiers() -> None:
    trace, hardware = gpt_trace(1), machine()
    most = peak(device_curve(trace))
    limit = budgets(0, host_bytes=0, storage_bytes=128 * MIB)
    with pytest.raises(
        InfeasibleBudgetError, match=r"bytes\), with room for .* in storage"
    ) as error:
        make_plan(trace, hardware, limit)
    assert error.value.least_budget_bytes == most - limit.storage_bytes
    again = replace(limit, device_bytes=error.value.least_budget_bytes - 1)
    with pytest.raises(InfeasibleBudgetError, match="must be elsewhere at site") as error:
        make_plan(trace, hardware, again)
    assert error.value.least_budget_bytes == most - limit.storage_bytes


@pytest.mark.parametrize("policy", sorted(planners.POLICIES))
@pytest.mark.parametrize("budget", [1040, 1083, 1084, 1095])
def test_the_budget_that_an_error_names_works_where_whole_tensors_do_not_fit(
    budget: int, policy: str
) -> None:
    """At once 3 of 48 are there, and storage has room for 60: for one of them, not for 60."""
    spans = [(48, ((i, i), (6 - i, 7 - i)), False) for i in range(3)]
    trace, limit = step(7, *spans), budgets(budget, host_bytes=0, storage_bytes=60)
    with pytest.raises(InfeasibleBudgetError, match="there is a plan, and perhaps") as error:
        make_plan(trace, machine(), limit, policy)
    assert error.value.least_budget_bytes == 1096
    assert check_plan(make_plan(trace, machine(), replace(limit, device_bytes=1096), policy)) == ()


def test_the_budget_that_an_error_names_works_under_the_rules() -> None:
    spans = [(48, ((i, i), (6 - i, 7 - i)), False) for i in range(3)]
    trace, hardware = step(7, *spans), machine(host=12.0)
    limit, rules = budgets(1040, storage_bytes=40), {"t*": Tier.STORAGE, "t0": Tier.DEVICE}
    with pytest.raises(InfeasibleBudgetError, match=r"\(1144 bytes\): .* there is a plan"):
        make_plan(trace, hardware, limit, rules=rules)
    with pytest.raises(InfeasibleBudgetError, match=r"\(1144 bytes\) of the device there is"):
        make_plan(trace, hardware, replace(limit, device_bytes=1143), rules=rules)
    plan = make_plan(trace, hardware, replace(limit, device_bytes=1144), rules=rules)
    assert not plan.migrations


@pytest.mark.parametrize("policy", ["teraio", "g10"])
def test_a_byte_over_a_link_that_could_carry_all_there_is(policy: str) -> None:
    """What goes in long intervals is so much that one byte more is the same float."""
    trace = step(6, (1, ((0, 2), (4, 6)), False), (1, ((2, 4),), False))
    durations = (10**13, 0, 10**13, 10**13, 0, 10**13)
    sites = tuple(
        replace(site, duration_ns=ns) for site, ns in zip(trace.sites, durations, strict=True)
    )
    plan = make_plan(
        replace(trace, sites=sites), machine(storage=1e6, device_bytes=1001), budgets(1001), policy
    )
    assert check_plan(plan) == ()


def test_links_that_would_take_months_are_an_error() -> None:
    trace = gpt_trace(1)
    with pytest.raises(ConfigError, match=r"takes 9007199.25 s or longer, over links that are too"):
        make_plan(trace, machine(storage=2e-9), budgets(between(trace, 0.5)))
