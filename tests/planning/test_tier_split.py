"""Tensors split between host and storage: worked out by hand, checked, chosen by the planner."""

from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from teraplan.bounds.bound import step_bound_ns
from teraplan.bounds.relaxation import relaxed_bound_ns
from teraplan.checker.check_plan import check_plan
from teraplan.checker.violations import ViolationKind
from teraplan.errors import InfeasibleBudgetError
from teraplan.planners import make_plan
from teraplan.planners.base import LEAST_PART_BYTES, PAGE_BYTES, Problem
from teraplan.planners.baselines.simple import on_demand
from teraplan.planners.placing.victims import farthest_use
from teraplan.planners.search.coarse import coarsen
from teraplan.planners.search.tier_split import split_between_tiers
from teraplan.report.critical_path import critical_path
from teraplan.report.plan_changes import changes_text, plan_changes
from teraplan.report.plan_text import plan_details, plan_screen
from teraplan.simulation.memory_curve import device_curve, least_budget, peak, tier_curve
from teraplan.simulation.simulate import predict, simulate
from teraplan.units import MIB
from teraplan.values.hardware import Hardware, Link, Tier
from teraplan.values.plan import Migration, Plan
from teraplan.values.run_record import Direction
from teraplan.values.step_trace import StepTrace
from tests.planning.optimum import optimum_ns
from tests.planning.synthetic import budgets, gpt_trace, machine, plan_of
from tests.planning.test_check_plan import kinds, parameter_step
from tests.planning.test_simulate import one_byte_per_ns, step
from tests.planning.traces import grown, machines, traces
from tests.planning.updating import layers_step

quick = settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.too_slow])
H, S = Tier.HOST, Tier.STORAGE


def split(
    tensor: int, leave: int, gone: int, back: int, needed: int, host_bytes: int, clean: bool = False
) -> Migration:
    return Migration(
        tensor_id=tensor,
        leave=leave,
        gone=gone,
        back=back,
        needed=needed,
        tier=S,
        host_bytes=host_bytes,
        clean=clean,
    )


def between(trace: StepTrace, part: float) -> int:
    least, most = least_budget(trace).nbytes, peak(device_curve(trace))
    return least + int((most - least) * part)


def one_tensor(nbytes: int) -> StepTrace:
    """Idle in intervals 0 to 3 of five of 100 ns."""
    return step(5, (nbytes, ((0, 0), (4, 5)), False))


# -- the simulator --------------------------------------------------------------------------------


def test_both_parts_move_at_once_and_the_later_one_counts() -> None:
    done = simulate(one_tensor(300), one_byte_per_ns(), (split(0, 0, 1, 3, 4, host_bytes=100),))
    # out until 100 and 200, waited for from 100; site 3 at 400; back until 500 and 600, from 500 on
    assert [(t.tier, t.direction, t.nbytes, t.start_ns, t.end_ns) for t in done.transfers] == [
        (H, Direction.OUT, 100, 0, 100),
        (S, Direction.OUT, 200, 0, 200),
        (H, Direction.BACK, 100, 400, 500),
        (S, Direction.BACK, 200, 400, 600),
    ]
    assert [(s.site, s.start_ns, s.duration_ns) for s in done.stalls] == [
        (1, 100, 100),
        (4, 500, 100),
    ]
    assert done.step_ns == 700
    assert (done.prediction.host_peak_bytes, done.prediction.storage_peak_bytes) == (100, 200)
    assert done.prediction.out_bytes == done.prediction.back_bytes == {H: 100, S: 200}
    assert done.managed_bytes == (300, 0, 0, 300, 300)


def test_both_parts_go_first_where_the_computation_waits() -> None:
    link = Link(
        out_bytes_per_s=10**11,
        back_bytes_per_s=10**9,
        out_while_back_bytes_per_s=10**11,
        back_while_out_bytes_per_s=10**9,
        latency_ns=0,
    )
    trace = step(
        6, (200, ((0, 0), (3, 4)), False), *((200, ((0, 0), (5, 6)), False) for _ in range(4))
    )
    others = (
        Migration(tensor_id=i, leave=0, gone=1, back=2, needed=5, tier=tier)
        for i, tier in ((1, S), (2, S), (3, H), (4, H))
    )
    hardware = replace(one_byte_per_ns(), host_link=link, storage_link=link)
    done = simulate(trace, hardware, (split(0, 0, 1, 3, 3, host_bytes=100), *others))
    # t1 and t3 run from 200 to 400; then both parts, asked for at 300, before t2 and t4
    back = [(t.tensor, t.tier, t.start_ns) for t in done.transfers if t.direction is Direction.BACK]
    assert back[2:4] == [("t0", H, 400), ("t0", S, 400)]
    assert done.stalls[0].duration_ns == 200


def test_the_links_disturb_each_other_behind_a_port() -> None:
    port = replace(one_byte_per_ns().host_link or pytest.fail("it has one"), latency_ns=0)
    done = simulate(
        one_tensor(300),
        replace(one_byte_per_ns(), device_port=port),
        (split(0, 0, 3, 3 + 1, 4, host_bytes=100),),
    )
    # each at half speed until the host's 100 are out at 200; then the other 100 until 300
    out = [(t.tier, t.end_ns) for t in done.transfers if t.direction is Direction.OUT]
    assert out == [(H, 200), (S, 300)]


def test_a_split_parameter_that_wraps_is_clean_in_both_parts() -> None:
    trace = parameter_step(changed_in=(2,))
    wrapped = split(0, 7, 7, 9, 9, host_bytes=40)
    again = (split(0, 2, 2, 4, 4, 40, clean=True), split(0, 5, 5, 6, 6, 40, clean=True))
    plan = plan_of(trace, machine(host=9.0), budgets(100), (wrapped, *again))
    assert check_plan(plan) == ()
    assert plan.prediction.out_bytes == {H: 40, S: 60}
    assert plan.prediction.back_bytes == {H: 120, S: 180}
    assert (plan.prediction.host_peak_bytes, plan.prediction.storage_peak_bytes) == (40, 60)
    for other in (0, 41):  # another cut: these bytes are not there
        moved = (wrapped, replace(again[0], host_bytes=other), again[1])
        assert ViolationKind.CLEAN in kinds(replace(plan, migrations=moved))


def test_the_critical_path_goes_over_the_later_part() -> None:
    plan = (split(0, 0, 1, 3, 4, host_bytes=100),)
    path = critical_path(one_tensor(300), one_byte_per_ns(), plan)
    assert path.step_ns == 700
    assert path.computation_ns + sum(path.copies_ns.values()) == 700
    assert set(path.copies_ns) == {(S, Direction.OUT), (S, Direction.BACK)}


# -- the checker ----------------------------------------------------------------------------------


@pytest.fixture
def plan() -> Plan:
    trace = grown(one_tensor(10_000))
    moves = (split(0, 0, 1, 3, 4, host_bytes=4_000_000),)
    return plan_of(trace, machine(host=9.0), budgets(1_000_000 + 10_000_000), moves)


def test_a_split_holds(plan: Plan) -> None:
    assert check_plan(plan) == ()


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        ({"tier": H}, ViolationKind.SPLIT),
        ({"host_bytes": 10_000_000}, ViolationKind.SPLIT),
        ({"host_bytes": 11_000_000}, ViolationKind.SPLIT),
        ({"host_bytes": -1}, ViolationKind.SPLIT),
        ({"host_bytes": 4_000_001}, ViolationKind.PREDICTION),
    ],
)
def test_catches_a_wrong_split(plan: Plan, change: dict[str, object], kind: ViolationKind) -> None:
    first = replace(plan.migrations[0], **change)  # type: ignore[arg-type]
    assert kinds(replace(plan, migrations=(first,))) == {kind}


def test_catches_a_tier_that_is_too_small_for_its_part(plan: Plan) -> None:
    exact = replace(plan.budgets, host_bytes=4_000_000, storage_bytes=6_000_000)
    assert check_plan(replace(plan, budgets=exact)) == ()
    small = replace(exact, host_bytes=3_999_999)
    assert kinds(replace(plan, budgets=small)) == {ViolationKind.HOST_BUDGET}
    small = replace(exact, storage_bytes=5_999_999)
    assert kinds(replace(plan, budgets=small)) == {ViolationKind.STORAGE_BUDGET}


def test_catches_a_split_without_host_memory(plan: Plan) -> None:
    assert ViolationKind.TIER in kinds(replace(plan, hardware=machine()))


# -- the planner ----------------------------------------------------------------------------------


def splits(plan: Plan) -> list[Migration]:
    return [m for m in plan.migrations if m.host_bytes]


@pytest.mark.slow
@quick
@given(trace=traces(), hardware=machines(), part=st.floats(0, 1), host=st.integers(0, 200))
def test_plans_with_splits_hold_and_bounds_bound_them(
    trace: StepTrace, hardware: Hardware, part: float, host: int
) -> None:
    trace = grown(trace)
    limit = budgets(between(trace, part), host_bytes=host * 1_000_000)
    plan = make_plan(trace, hardware, limit)
    assert check_plan(plan) == ()
    for m in splits(plan):
        nbytes = trace.tensors[m.tensor_id].nbytes
        assert m.host_bytes % PAGE_BYTES == 0
        assert LEAST_PART_BYTES <= m.host_bytes <= nbytes - LEAST_PART_BYTES
    problem = Problem.of(trace, hardware, limit)
    given_of = (problem.lifetimes, hardware, problem.pressure(), problem.tier_bytes)
    assert step_bound_ns(*given_of) <= plan.prediction.step_ns
    assert relaxed_bound_ns(*given_of, checkpoints=12) <= plan.prediction.step_ns


@pytest.mark.slow
@quick
@given(trace=traces(), hardware=machines(), part=st.floats(0, 1))
def test_splits_never_make_the_step_longer(
    trace: StepTrace, hardware: Hardware, part: float
) -> None:
    trace = grown(trace)
    limit = budgets(between(trace, part))
    whole = make_plan(trace, hardware, limit, split=False)
    assert not splits(whole)
    assert make_plan(trace, hardware, limit).prediction.step_ns <= whole.prediction.step_ns


def in_the_way(nbytes: int) -> tuple[StepTrace, int]:
    """A step whose one tensor of so many bytes has to be away in interval 2, and its budget."""
    trace = one_tensor(nbytes)
    sites = list(trace.sites)
    sites[2] = replace(sites[2], workspace_bytes=nbytes)
    return replace(trace, sites=tuple(sites)), trace.state_bytes + nbytes


def test_a_split_beats_the_best_plan_of_whole_tensors() -> None:
    trace, limit = in_the_way(60_000_000)
    hardware = machine(6.0, host=12.0)
    plan = make_plan(trace, hardware, budgets(limit))
    best = optimum_ns(trace, hardware, budgets(limit))
    assert best is not None
    assert plan.prediction.step_ns < 0.75 * best
    (m,) = splits(plan)
    # both parts take about as long: twice as many bytes over the link of twice the speed
    assert abs(m.host_bytes / 40_000_000 - 1) < 0.02


def test_the_host_pool_is_used_to_the_last_block() -> None:
    trace = gpt_trace(2)  # tensors of 32 MiB
    limit = budgets(between(trace, 0.2), host_bytes=20 * MIB)
    plan = make_plan(trace, machine(2.0, host=25.0), limit)
    assert splits(plan)
    assert check_plan(plan) == ()
    assert plan.prediction.host_peak_bytes == 20 * MIB


def test_host_memory_is_divided_between_tensors_that_are_away_at_once() -> None:
    """With all of it for the first one, the step takes 120.8 ms."""
    first, second = ((1, 1), (4, 5)), ((3, 3), (6, 7))
    trace = step(
        9, (196 * MIB, first, False), (170 * MIB, ((0, 2),), False), (96 * MIB, second, False)
    )
    ms = (1.352, 4.389, 9.840, 5.358, 6.946, 9.031, 4.455, 1.478, 7.125)
    sites = (
        replace(site, duration_ns=int(t * 1e6)) for site, t in zip(trace.sites, ms, strict=True)
    )
    trace = replace(trace, sites=tuple(sites))
    host = Link(
        out_bytes_per_s=8_645_400_746,
        back_bytes_per_s=6_189_240_942,
        out_while_back_bytes_per_s=6_051_780_522,
        back_while_out_bytes_per_s=4_332_468_659,
        latency_ns=10_000,
    )
    storage = Link(
        out_bytes_per_s=3_943_009_500,
        back_bytes_per_s=5_573_374_949,
        out_while_back_bytes_per_s=2_760_106_650,
        back_while_out_bytes_per_s=5_016_037_454,
        latency_ns=1_000_000,
    )
    hardware = replace(machine(), host_link=host, storage_link=storage)
    plan = make_plan(trace, hardware, budgets(230 * MIB + 1000, host_bytes=85 * MIB))
    assert len(splits(plan)) == 2
    assert plan.prediction.step_ns < 114_000_000


def test_a_tensor_that_fits_nowhere_as_a_whole_is_split() -> None:
    trace, limit_bytes = in_the_way(64_000_000)
    limit = budgets(limit_bytes, host_bytes=40_000_000, storage_bytes=30_000_000)
    plan = make_plan(trace, machine(6.0, host=6.0), limit)
    assert [m.tensor_id for m in splits(plan)] == [0]
    with pytest.raises(InfeasibleBudgetError, match="whole, or in two parts that are not small"):
        make_plan(trace, machine(6.0, host=6.0), limit, "lru")


@pytest.mark.slow
def test_what_has_a_rule_is_not_split() -> None:
    trace = gpt_trace(2)
    limit, hardware = budgets(between(trace, 0.05)), machine(6.0, host=6.0)
    assert splits(make_plan(trace, hardware, limit))
    for tier in (H, S):
        plan = make_plan(trace, hardware, limit, rules={"*": tier})
        assert {(m.tier, m.host_bytes) for m in plan.migrations} == {(tier, 0)}


def test_nothing_is_split_where_one_link_fills_the_port() -> None:
    trace = gpt_trace(2)
    hardware = machine(6.0, host=25.0)
    behind = replace(hardware, device_port=hardware.host_link)
    plan = make_plan(trace, behind, budgets(between(trace, 0.2)))
    assert not splits(plan)


@pytest.mark.slow
def test_a_plan_without_splits_is_replaced_where_it_is_slower() -> None:
    """A plan for a slower machine stays a candidate."""
    trace = gpt_trace(2)
    limit = budgets(between(trace, 0.1))
    slow = make_plan(trace, machine(3.0, host=6.0), limit)
    assert splits(slow)
    fast = make_plan(trace, machine(6.0, host=12.0), limit, candidates=[slow])
    assert fast.prediction.step_ns <= slow.prediction.step_ns
    one_tier = make_plan(trace, machine(6.0), limit, candidates=[slow])
    assert not splits(one_tier)
    assert not splits(
        make_plan(trace, machine(4.0, host=6.0), limit, candidates=[slow], split=False)
    )


@pytest.mark.exhaustive
@pytest.mark.slow
def test_what_relies_on_one_copy_is_split_together() -> None:
    trace = grown(layers_step((4000, 8000, 12_000, 6000), micro_batches=2), 1000)
    found = 0
    for part in (0.0, 0.1, 0.2, 0.3, 0.5):
        limit = budgets(between(trace, part))
        plan = make_plan(trace, machine(6.0, host=9.0), limit)
        assert check_plan(plan) == ()
        found += sum(m.clean for m in splits(plan))
    assert found


def test_a_group_is_split_into_its_members() -> None:
    """A coarse plan's split gives whole members to either tier, and at most one is cut."""
    trace = gpt_trace(24)
    hardware, limit = machine(6.0, host=12.0), budgets(between(trace, 0.9))
    coarse = coarsen(Problem.of(trace, hardware, limit), 20)
    group = max(range(len(coarse.members)), key=lambda i: len(coarse.members[i]))
    sizes = [trace.tensors[i].nbytes for i in coarse.members[group]]
    assert len(sizes) > 1
    tensor = coarse.problem.trace.tensors[group]
    (_, start), (end, _) = tensor.windows[0], tensor.windows[1]
    for wanted in (0, 5 * MIB, sizes[0], sizes[0] + 5 * MIB, sum(sizes) - 1, sum(sizes)):
        host_bytes = coarse.problem.cut(group, wanted)
        assert wanted - 2 * LEAST_PART_BYTES < host_bytes <= wanted
        if host_bytes in (0, sum(sizes)):
            continue
        moved = coarse.expand((split(group, start, start, end, end, host_bytes),))
        assert [m.tensor_id for m in moved] == list(coarse.members[group])
        assert peak(tier_curve(trace, moved, H)) == host_bytes
        assert peak(tier_curve(trace, moved, S)) == sum(sizes) - host_bytes
        assert sum(m.host_bytes > 0 for m in moved) <= 1


@pytest.mark.slow
def test_a_coarse_plan_with_splits_holds() -> None:
    trace, hardware = gpt_trace(12, layer_ns=5_000_000), machine(6.0, host=12.0)
    limit = budgets(between(trace, 0.1))
    coarse = coarsen(Problem.of(trace, hardware, limit), 100)
    simulator = coarse.problem.simulator()
    whole = on_demand(coarse.problem, farthest_use)
    assert {m.tier for m in whole} == {S}
    found = split_between_tiers(coarse.problem, simulator, whole, 0)
    assert simulator.run(found).step_ns < 0.8 * simulator.run(whole).step_ns
    plan = plan_of(trace, hardware, limit, coarse.expand(found))
    assert check_plan(plan) == ()
    assert splits(plan)


# -- reports --------------------------------------------------------------------------------------


def test_reports_tell_both_tiers(plan: Plan) -> None:
    assert "host 3.81 MiB + storage" in plan_details(plan)
    assert "host 3.81 MiB + storage" in plan_screen(plan)
    moved = (replace(plan.migrations[0], host_bytes=0),)
    whole = replace(plan, migrations=moved)
    other = replace(plan, migrations=(replace(plan.migrations[0], host_bytes=8192),))
    assert "storage → host + storage" in changes_text(plan_changes(whole, plan), ())
    assert "split elsewhere" in changes_text(plan_changes(plan, other), ())
    said = predict(plan.trace, plan.hardware, moved)
    assert said.step_ns > plan.prediction.step_ns
