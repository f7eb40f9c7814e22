"""Updates on the host: examples worked out by hand, the checker's rules, the planner."""

import json
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from teraplan.checker.check_plan import check_plan
from teraplan.checker.violations import ViolationKind
from teraplan.errors import ConfigError, FileFormatError
from teraplan.files.plan_file import read_plan, write_plan
from teraplan.files.trace_file import read_trace, write_trace
from teraplan.planners import make_plan
from teraplan.planners.base import Problem
from teraplan.planners.updates.update_split import best_part, step_lines
from teraplan.report.critical_path import critical_path
from teraplan.simulation.channels import speeds
from teraplan.simulation.memory_curve import device_curve, least_budget, peak
from teraplan.simulation.simulate import simulate
from teraplan.values.hardware import Hardware, HostCores, Tier
from teraplan.values.plan import HostUpdate, Migration, Plan
from teraplan.values.step_trace import StepTrace, TensorKind, Update
from tests.planning.synthetic import budgets, machine, plan_of
from tests.planning.test_simulate import one_byte_per_ns, step
from tests.planning.updating import layers_step, updating_machines, updating_steps

quick = settings(max_examples=5, deadline=None, suppress_health_check=[HealthCheck.too_slow])

W, G, M = range(3)


def one_update() -> StepTrace:
    """Seven intervals of 100 ns: w is used in 3, w and g in 4; the update, with m, is in 6."""
    trace = step(
        7,
        (100, ((3, 5), (6, 7)), True),
        (50, ((4, 5), (6, 7)), False),
        (200, ((6, 7),), True),
    )
    kinds = (TensorKind.PARAMETER, TensorKind.GRADIENT, TensorKind.OPTIMIZER_STATE)
    changes = ((1,), (0,), (0,))
    tensors = tuple(
        replace(tensor, kind=kind, changed_in=changed)
        for tensor, kind, changed in zip(trace.tensors, kinds, changes, strict=True)
    )
    update = Update(start=6, end=7, ready=5, parameters=(W,), gradients=(G,), states=(M,))
    return replace(trace, tensors=tensors, updates=(update,))


def with_cores(hardware: Hardware, speed: float, memory: float = 1000.0) -> Hardware:
    """Bytes per ns of updates, and of host memory."""
    cores = HostCores(update_bytes_per_s=int(speed * 1e9), memory_bytes_per_s=int(memory * 1e9))
    return replace(hardware, host_cores=cores)


def placed(back: int = 10, gone: int = 7, needed: int = 10) -> HostUpdate:
    return HostUpdate(update=0, flush=5, gone=gone, back=back, needed=needed)


def test_an_update_on_the_host_is_waited_for_where_its_parameter_is_used() -> None:
    # g leaves at 500 until 550; the host reads 50 and reads and writes 2 x 300 until 1200. The step
    # ends at 600, the next reaches its site 3 at 900, waits for the host and then for 100 of w.
    hardware = with_cores(one_byte_per_ns(), 1.0)
    done = simulate(one_update(), hardware, (), (placed(),))
    assert done.step_ns == 600 + 400
    assert [(s.tensor, s.site, s.duration_ns) for s in done.stalls] == [("t0", 3, 400)]
    assert (done.prediction.out_bytes, done.prediction.back_bytes) == (
        {Tier.HOST: 50},
        {Tier.HOST: 100},
    )
    assert done.prediction.host_peak_bytes == 350
    # m is never there, w in 3 and 4 alone, g in 4 and on its way out in 5 and 6
    assert done.managed_bytes == (0, 0, 0, 100, 150, 50, 50)
    run = done.host_updates[-1]
    assert (run.tensor, run.nbytes, run.end_ns - run.start_ns) == ("t0", 650, 650)


def test_an_update_that_is_done_in_time_costs_nothing() -> None:
    # done at 550 + 162.5; w starts back at site 1 of the next step, at 700, and is there at 812.5
    hardware = with_cores(one_byte_per_ns(), 4.0)
    done = simulate(one_update(), hardware, (), (placed(back=8),))
    assert (done.step_ns, done.stalls) == (600, ())
    assert done.prediction.ideal_ns == 700
    assert done.managed_bytes == (0, 100, 100, 100, 150, 50, 50)


def test_the_host_begins_no_sooner_than_the_gradients_are_final() -> None:
    trace = one_update()
    late = replace(trace, updates=(replace(trace.updates[0], ready=6),))
    done = simulate(late, with_cores(one_byte_per_ns(), 1.0), (), (placed(),))
    # begins at 600 in the place of 550
    assert done.step_ns == 600 + 450


def test_host_memory_is_shared_by_updates_and_copies() -> None:
    link = one_byte_per_ns().host_link
    assert link is not None
    links = {Tier.HOST: link, Tier.STORAGE: link}
    cores = HostCores(update_bytes_per_s=10**9, memory_bytes_per_s=15 * 10**8)
    table = speeds(links, None, cores)
    busy_cores, busy_out, busy_storage = 1 << 4, 1 << 0, 1 << 2
    assert table[busy_cores][4] == 1.0
    assert table[busy_cores | busy_out][4] == pytest.approx(0.75)
    assert table[busy_cores | busy_out][0] == pytest.approx(0.75)
    # what storage moves does not go through host memory
    assert table[busy_cores | busy_storage][4] == 1.0
    assert [row[:4] for row in table[:16]] == speeds(links, None)


def test_a_parameter_that_the_host_updates_is_clean_there() -> None:
    trace = step(6, (100, ((0, 1), (3, 4), (5, 6)), True), (50, ((3, 4), (5, 6)), False))
    tensors = (
        replace(trace.tensors[0], kind=TensorKind.PARAMETER, changed_in=(2,)),
        replace(trace.tensors[1], kind=TensorKind.GRADIENT, changed_in=(0,)),
    )
    update = Update(start=5, end=6, ready=4, parameters=(0,), gradients=(1,), states=())
    trace = replace(trace, tensors=tensors, updates=(update,))
    hardware = with_cores(one_byte_per_ns(), 1.0)
    away = Migration(tensor_id=0, leave=1, gone=1, back=2, needed=3, tier=Tier.HOST, clean=True)
    h = HostUpdate(update=0, flush=4, gone=5, back=6, needed=6)
    done = simulate(trace, hardware, (away,), (h,))
    # the copy is the one that the host updated: no bytes beside those of the update
    assert done.prediction.host_peak_bytes == 150
    limit = budgets(10**6)
    assert check_plan(plan_of(trace, hardware, limit, (away,), (h,))) == ()
    alone = plan_of(trace, hardware, limit, (away,))
    assert {v.kind for v in check_plan(alone)} == {ViolationKind.CLEAN}


def hosted() -> Plan:
    trace, hardware = one_update(), with_cores(one_byte_per_ns(), 1.0)
    return plan_of(trace, hardware, budgets(10**6), (), (placed(),))


def test_the_plan_of_the_example_holds() -> None:
    assert check_plan(hosted()) == ()


def without_cores(plan: Plan) -> Plan:
    return replace(plan, hardware=replace(plan.hardware, host_cores=None))


WRONG: list[tuple[Callable[[Plan], Plan], ViolationKind, str]] = [
    (without_cores, ViolationKind.UPDATE, "no host cores"),
    (
        lambda p: replace(p, host_updates=(placed(), placed())),
        ViolationKind.UPDATE,
        "is on the host already",
    ),
    (
        lambda p: replace(p, host_updates=(replace(placed(), update=1),)),
        ViolationKind.UPDATE,
        "update 1 of 1",
    ),
    (
        lambda p: replace(p, host_updates=(replace(placed(), flush=4),)),
        ViolationKind.UPDATE,
        "t1 leaves at site 4, but is used until 5",
    ),
    (
        lambda p: replace(p, host_updates=(placed(gone=8, back=9),)),
        ViolationKind.UPDATE,
        "leave until site 8, after the step",
    ),
    (
        lambda p: replace(p, host_updates=(placed(needed=11),)),
        ViolationKind.UPDATE,
        "t0 is waited for at site 11, but used at 10",
    ),
    (lambda p: replace(p, host_updates=(placed(back=11),)), ViolationKind.UPDATE, "the order is"),
    (
        lambda p: replace(
            p,
            trace=replace(p.trace, updates=(replace(p.trace.updates[0], ready=6),)),
            host_updates=(placed(gone=5, back=5),),
        ),
        ViolationKind.UPDATE,
        "come back at site 5, but it begins at 6",
    ),
    (
        lambda p: replace(p, budgets=replace(p.budgets, host_bytes=349)),
        ViolationKind.HOST_BUDGET,
        "over the limit of 349 B",
    ),
    (
        lambda p: replace(p, budgets=replace(p.budgets, device_bytes=1149)),
        ViolationKind.DEVICE_BUDGET,
        "over the limit of 1.12 KiB",
    ),
    (
        lambda p: replace(p, prediction=replace(p.prediction, step_ns=599)),
        ViolationKind.PREDICTION,
        "less than the step without waits, 600",
    ),
    (
        lambda p: replace(p, prediction=replace(p.prediction, out_bytes={})),
        ViolationKind.PREDICTION,
        "out_bytes of host is 0 in the plan, 50",
    ),
    (
        lambda p: replace(
            p,
            migrations=(
                Migration(tensor_id=M, leave=0, gone=1, back=2, needed=3, tier=Tier.STORAGE),
            ),
        ),
        ViolationKind.PERIOD,
        "t2 is never on the device",
    ),
    (
        lambda p: replace(
            p,
            migrations=(
                Migration(tensor_id=W, leave=7, gone=8, back=9, needed=10, tier=Tier.STORAGE),
            ),
        ),
        ViolationKind.PERIOD,
        "t0 is away from site 7 to 10",
    ),
    (
        lambda p: replace(
            p, trace=replace(p.trace, updates=(replace(p.trace.updates[0], ready=7),))
        ),
        ViolationKind.TRACE,
        "its sites are not ready <= start < end",
    ),
]


@pytest.mark.parametrize(("change", "kind", "message"), WRONG)
def test_the_checker_catches_it(
    change: Callable[[Plan], Plan], kind: ViolationKind, message: str
) -> None:
    found = [v for v in check_plan(change(hosted())) if v.kind is kind]
    assert found, check_plan(change(hosted()))
    assert any(message in v.message for v in found), found


def test_cores_are_needed_to_simulate_updates_on_the_host() -> None:
    with pytest.raises(ConfigError, match="no host_cores"):
        simulate(one_update(), one_byte_per_ns(), (), (placed(),))


def test_the_model_gives_the_split_that_follows_from_published_rates() -> None:
    """Rates of Deep Optimizer States on H100s: 1.69 G parameters/s on the host, 50 GB/s of link.

    All state moves if it is updated on the device; parameters have 2 bytes, states 12. With a part
    x on the device, (1 - x) / 1.69 G = (12 x + 2 (1 - x)) / 50 G, so x = 0.697 of the parameters,
    and 3.83 billion of them take 0.69 s.
    """
    count = 3_830_000_000
    trace = one_update()
    sizes = {W: 2 * count, G: 0, M: 12 * count}
    tensors = tuple(replace(t, nbytes=sizes[i]) for i, t in enumerate(trace.tensors))
    trace = replace(trace, tensors=tensors)
    hardware = replace(with_cores(machine(1.0, 1.0), 1.69 * 28, 1e9), storage_link=None)
    assert hardware.host_link is not None
    link = replace(
        hardware.host_link,
        out_while_back_bytes_per_s=50 * 10**9,
        back_while_out_bytes_per_s=50 * 10**9,
    )
    lines = step_lines(trace, replace(hardware, host_link=link), [0], 12 * count)
    on_host = best_part(lines)
    assert 1 - on_host == pytest.approx(0.697, abs=0.001)
    assert max(line.at(on_host) for line in lines) * 1e-9 == pytest.approx(0.69, abs=0.005)


@pytest.mark.slow
@quick
@given(trace=updating_steps(), hardware=updating_machines(), part=st.floats(0, 1.2))
def test_plans_hold_and_are_never_slower_than_with_all_updates_on_the_device(
    trace: StepTrace, hardware: Hardware, part: float
) -> None:
    least, most = least_budget(trace).nbytes, peak(device_curve(trace))
    limit = budgets(least + int((most - least) * part))
    plan = make_plan(trace, hardware, limit)
    assert check_plan(plan) == ()
    assert plan.prediction.bound_ns <= plan.prediction.step_ns
    alone = make_plan(trace, replace(hardware, host_cores=None), limit)
    assert not alone.host_updates
    assert plan.prediction.step_ns <= alone.prediction.step_ns
    if hardware.host_link is None:
        assert not plan.host_updates
    found = critical_path(trace, hardware, plan.migrations, plan.host_updates)
    total = found.computation_ns + found.before_ns + found.host_ns + sum(found.copies_ns.values())
    count = len(plan.migrations) + len(plan.host_updates)
    assert abs(total - plan.prediction.step_ns) <= 2 + 4 * count


def under_pressure(part: float = 0.3) -> tuple[StepTrace, Hardware, int]:
    trace = layers_step((20_000,) * 4, wide=4000)
    hardware = with_cores(machine(1.0, 4.0), 10.0, 40.0)
    least, most = least_budget(trace).nbytes, peak(device_curve(trace))
    return trace, hardware, least + int((most - least) * part)


@cache
@cache
def planned() -> Plan:
    trace, hardware, limit = under_pressure()
    return make_plan(trace, hardware, budgets(limit))


@pytest.mark.slow
def test_the_planner_uses_the_host_where_state_does_not_fit() -> None:
    trace, hardware, limit = under_pressure()
    plan = planned()
    alone = make_plan(trace, replace(hardware, host_cores=None), budgets(limit))
    assert plan.host_updates
    assert plan.prediction.step_ns < 0.9 * alone.prediction.step_ns
    # those whose gradients come first: of the last layers
    last = {trace.tensors[trace.updates[h.update].parameters[0]].layer for h in plan.host_updates}
    assert "layers.3" in last
    assert make_plan(trace, hardware, budgets(limit)) == plan


@pytest.mark.slow
def test_updates_stay_on_the_device_where_the_host_has_no_room_or_a_rule_says_so() -> None:
    trace, hardware, limit = under_pressure()
    assert not make_plan(trace, hardware, budgets(limit, host_bytes=1000)).host_updates
    for room in (0, 1000, planned().prediction.host_peak_bytes // 2):
        staging = replace(hardware, staging_bytes=hardware.host_capacity_bytes - room)
        assert not make_plan(trace, staging, budgets(limit)).host_updates
    rules = {"*.exp_avg": Tier.STORAGE}
    assert not make_plan(trace, hardware, budgets(limit), rules=rules).host_updates
    rules = {"layers.3.weight.exp_avg": Tier.STORAGE}
    ruled = make_plan(trace, hardware, budgets(limit), rules=rules)
    names = {
        trace.tensors[i].name for h in ruled.host_updates for i in trace.updates[h.update].states
    }
    assert names
    assert "layers.3.weight.exp_avg" not in names


@pytest.mark.slow
def test_a_candidate_with_host_updates_counts_where_there_are_cores() -> None:
    trace, hardware, limit = under_pressure()
    ours = planned()
    assert make_plan(trace, hardware, budgets(limit), "lru", candidates=[ours]) == ours
    alone = replace(hardware, host_cores=None)
    assert not make_plan(trace, alone, budgets(limit), "lru", candidates=[ours]).host_updates


@pytest.mark.slow
def test_files_keep_updates(tmp_path: Path) -> None:
    plan = planned()
    path = tmp_path / "plan.json"
    write_plan(plan, path)
    assert read_plan(path) == plan
    for field, value, message in (
        ("update", 4, r"host_updates\[0\].update: is 4; the trace has 4 updates"),
        ("back", -1, r"host_updates\[0\].back: is -1"),
        ("surprise", 1, 'unknown field "surprise"'),
    ):
        data = json.loads(path.read_text())
        data["host_updates"][0][field] = value
        (tmp_path / "wrong.json").write_text(json.dumps(data))
        with pytest.raises(FileFormatError, match=message):
            read_plan(tmp_path / "wrong.json")


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("parameters", ["nobody"], '"nobody" is no tensor'),
        ("parameters", [], "it has no parameters"),
        ("states", ["layers.0.weight.grad"], "it names a tensor twice"),
        ("states", ["layers.1.weight.exp_avg"], "exp_avg is touched elsewhere|is in update"),
        ("gradients", ["layers.0.weight.exp_avg"], "is touched nowhere before it|twice"),
        ("ready", 10**6, "its sites are not ready <= start < end"),
        ("end", 10**6, "it ends at site|its sites are not"),
        ("start", 0, "is touched in it|is not touched last|nowhere before|its sites are not"),
    ],
)
def test_wrong_updates_of_traces_are_refused(
    tmp_path: Path, field: str, value: object, message: str
) -> None:
    path = tmp_path / "trace.json"
    write_trace(layers_step((100, 200)), path)
    data = json.loads(path.read_text())
    data["trace"]["updates"][0][field] = value
    path.write_text(json.dumps(data))
    with pytest.raises(FileFormatError, match=message):
        read_trace(path)


def test_clipping_makes_all_updates_wait_for_the_last_gradient() -> None:
    free, clipped = layers_step((10, 10, 10)), layers_step((10, 10, 10), clipped=True)
    assert len({update.ready for update in free.updates}) == 3
    assert {update.ready for update in clipped.updates} == {clipped.updates[0].start}
    problem = Problem.of(free, machine(), budgets(1 << 40))
    assert problem.may_be_hosted == (0, 1, 2)
