"""Plans that compute activations again: right steps, right checks, never slower."""

import functools
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from teraplan.checker.check_plan import check_plan
from teraplan.checker.violations import ViolationKind
from teraplan.cli import main
from teraplan.errors import FileFormatError, InfeasibleBudgetError
from teraplan.files.plan_file import read_plan, write_plan
from teraplan.files.trace_file import write_trace
from teraplan.planners import make_plan
from teraplan.planners.recompute import _that_fit, with_recomputed
from teraplan.report.plan_text import plan_details, plan_json, plan_screen
from teraplan.simulation.memory_curve import device_curve, least_budget, peak
from teraplan.simulation.simulate import predict
from teraplan.units import GIB
from teraplan.values.hardware import Budgets, Hardware
from teraplan.values.plan import Plan, Recomputation
from teraplan.values.recomputed_step import independent, recomputable, recomputed_step
from teraplan.values.step_trace import Recompute, StepTrace
from tests.fakes.slow_link import link_of
from tests.planning.synthetic import budgets, gpt_trace
from tests.planning.synthetic import machine as two_tiers
from tests.planning.traces import traces

MS = 1_000_000
NORM, UP, GELU = 6, 7, 8
"""Tensors of a layer of the synthetic GPT, of ten."""


def with_recipes(layers: int = 4) -> StepTrace:
    """A GPT whose activation functions and norms can be computed again."""
    trace = gpt_trace(layers=layers, state_bytes=0)
    tensors = list(trace.tensors)
    for layer in range(layers):
        for tensor, source in ((NORM, NORM - 1), (GELU, UP)):
            number = 10 * layer + tensor
            recipe = Recompute(duration_ns=MS, sources=(10 * layer + source,), temporary_bytes=1000)
            tensors[number] = replace(tensors[number], recompute=recipe)
    return replace(trace, tensors=tuple(tensors))


def too_large(trace: StepTrace, *tensor_ids: int) -> StepTrace:
    """`trace`, where computing these again takes more memory at once than any budget has."""
    tensors = list(trace.tensors)
    for number in tensor_ids:
        recipe = tensors[number].recompute
        assert recipe is not None
        large = replace(recipe, temporary_bytes=1 << 40)
        tensors[number] = replace(tensors[number], recompute=large)
    return replace(trace, tensors=tuple(tensors))


def machine(bytes_per_s: int) -> Hardware:
    return Hardware(
        device="test",
        device_capacity_bytes=1 << 50,
        host_capacity_bytes=0,
        storage_capacity_bytes=1 << 50,
        host_link=None,
        storage_link=link_of(bytes_per_s),
    )


def test_what_is_named_is_computed_again() -> None:
    """As a plan is made that corrects another one."""
    trace = with_recipes()
    budgets, slow = half(trace), machine(2_000_000_000)
    found = make_plan(trace, slow, budgets)
    chosen = [choice.tensor_id for choice in found.recomputed]
    assert chosen
    again = make_plan(trace, slow, budgets, recompute=chosen)
    assert again == found
    fewer = make_plan(trace, slow, budgets, recompute=chosen[:1])
    assert [choice.tensor_id for choice in fewer.recomputed] == chosen[:1]


def half(trace: StepTrace) -> Budgets:
    device_bytes = peak(device_curve(trace)) // 2
    return Budgets(device_bytes=device_bytes, host_bytes=0, storage_bytes=1 << 50)


@functools.cache
def short_of_link() -> Plan:
    """Half of the memory, and storage that takes longer than the computation."""
    trace = with_recipes()
    return make_plan(trace, machine(GIB // 2), half(trace))


def test_the_step_in_which_a_tensor_is_computed_again() -> None:
    trace = with_recipes()
    step = recomputed_step(trace, [GELU])
    old, new = trace.tensors[GELU], step.tensors[GELU]
    need = old.windows[1][0]
    assert new.windows == old.windows[1:]
    assert step.tensors[UP].windows == (
        trace.tensors[UP].windows[0],
        (min(need, trace.tensors[UP].windows[1][0]), trace.tensors[UP].windows[1][1]),
    )
    assert step.sites[need].duration_ns == trace.sites[need].duration_ns + MS
    assert step.sites[need].workspace_bytes == trace.sites[need].workspace_bytes + 1000
    freed = device_curve(trace) - device_curve(step)
    assert set(freed[old.windows[0][1] : need].tolist()) == {old.nbytes}
    assert step.duration_ns == trace.duration_ns + MS


def test_what_needs_each_other_is_not_computed_again_together() -> None:
    trace = with_recipes()
    up = replace(trace.tensors[UP], recompute=Recompute(duration_ns=MS, sources=(NORM,)))
    trace = replace(trace, tensors=(*trace.tensors[:UP], up, *trace.tensors[UP + 1 :]))
    assert list(independent(trace, [GELU, UP, NORM])) == [GELU, NORM]
    assert list(independent(trace, [UP, GELU, NORM])) == [UP]


@pytest.mark.parametrize("over", [0, 3, 10, 30, 100, 1000])
def test_what_does_not_fit_where_it_is_computed_is_kept(over: int) -> None:
    """And does not keep the others from being computed again."""
    trace = too_large(with_recipes(), GELU, GELU + 20)
    budget = least_budget(trace).nbytes * (100 + over) // 100
    order = list(independent(trace, range(len(trace.tensors) - 1, -1, -1)))
    chosen = list(_that_fit(trace, order, budget))
    assert least_budget(recomputed_step(trace, chosen)).nbytes <= budget
    assert chosen == [number for number in order if number in chosen]
    for number in order:
        if number not in chosen:
            before = [n for n in chosen if order.index(n) < order.index(number)]
            assert least_budget(recomputed_step(trace, [*before, number])).nbytes > budget
    assert over < 1000 or len(chosen) == len(order) - 2


def test_one_that_needs_too_much_does_not_hide_the_others() -> None:
    trace = too_large(with_recipes(), GELU)
    kept = make_plan(trace, machine(GIB // 2), half(trace), recompute=False)
    plan = make_plan(trace, machine(GIB // 2), half(trace))
    assert len(plan.recomputed) > 1
    assert plan.prediction.step_ns < kept.prediction.step_ns


def test_what_moving_takes_from_the_computation_counts() -> None:
    """Nobody waits for these links; but what they carry makes the computation slower."""
    trace, fast = with_recipes(), machine(1 << 40)
    kept = make_plan(trace, fast, half(trace))
    assert not kept.recomputed, "nothing is to be won"
    assert kept.prediction.step_ns < 1.01 * trace.duration_ns
    moved_bytes = kept.prediction.moved_bytes
    plan = make_plan(trace, fast, half(trace), contention_ns_per_byte=100 * MS / moved_bytes)
    assert plan.recomputed
    won_ns = 100 * MS - 100 * MS * plan.prediction.moved_bytes // moved_bytes
    assert plan.prediction.step_ns - kept.prediction.step_ns < won_ns
    little = make_plan(trace, fast, half(trace), contention_ns_per_byte=MS / moved_bytes)
    assert little == kept, "computing again takes more"


def test_each_part_is_planned_once_and_the_nearest_ones_thoroughly() -> None:
    trace = with_recipes(2)
    kept = make_plan(trace, machine(GIB // 2), half(trace), recompute=False)
    asked: list[tuple[int, bool]] = []

    def plan_step(chosen: tuple[Recomputation, ...], draft: bool) -> Plan:
        asked.append((len(chosen), draft))
        step_ns = kept.prediction.step_ns * (10 - len(chosen)) // 10
        return replace(kept, prediction=replace(kept.prediction, step_ns=step_ns))

    found = with_recomputed(kept, plan_step, lambda: False)
    most = max(count for count, _ in asked)
    assert found.prediction.step_ns == kept.prediction.step_ns * (10 - most) // 10
    assert len(set(asked)) == len(asked) > 3
    assert [count for count, draft in asked if not draft] == [most]


def test_no_part_is_planned_once_it_is_late() -> None:
    trace = with_recipes(2)
    kept = make_plan(trace, machine(GIB // 2), half(trace), recompute=False)
    asked: list[int] = []

    def plan_step(chosen: tuple[Recomputation, ...], draft: bool) -> Plan:
        asked.append(len(chosen))
        return kept

    assert with_recomputed(kept, plan_step, lambda: bool(asked)) is kept
    assert len(asked) == 1


@pytest.mark.slow
def test_a_small_step_takes_few_simulations(simulated: list[object]) -> None:
    """Where tensors can be computed again and split, and lower budgets are tried."""
    trace = gpt_trace(1, micro_batches=2, state_bytes=0)
    tensors = list(trace.tensors)
    for number in (NORM, GELU, 10 + NORM, 10 + GELU):
        recipe = Recompute(duration_ns=MS, sources=(number - 1,), temporary_bytes=1000)
        tensors[number] = replace(tensors[number], recompute=recipe)
    trace = replace(trace, tensors=tuple(tensors))
    least, most = least_budget(trace).nbytes, peak(device_curve(trace))
    hardware, limit = two_tiers(3.0, host=6.0), budgets(least + (most - least) * 3 // 10)
    make_plan(trace, hardware, limit)
    assert 1_000 < len(simulated) < 12_000


def test_one_that_is_needed_at_the_very_end_takes_nothing() -> None:
    trace = with_recipes()
    tensor, end = trace.tensors[GELU], len(trace.sites)
    recipe = Recompute(duration_ns=1, sources=())
    late = replace(tensor, windows=(tensor.windows[0], (end, end)), recompute=recipe)
    tensors = (*trace.tensors[:GELU], late, *trace.tensors[GELU + 1 :])
    trace = replace(trace, tensors=tensors)
    assert list(_that_fit(trace, [GELU], 0)) == [GELU]


@pytest.mark.slow
def test_what_no_site_needs_is_not_computed_again(tmp_path: Path) -> None:
    trace = with_recipes()
    tensor, end = trace.tensors[GELU], len(trace.sites)
    recipe = Recompute(duration_ns=1, sources=())
    late = replace(tensor, windows=(tensor.windows[0], (end, end)), recompute=recipe)
    trace = replace(trace, tensors=(*trace.tensors[:GELU], late, *trace.tensors[GELU + 1 :]))
    assert GELU not in dict(recomputable(trace))
    plan = make_plan(trace, machine(GIB // 2), half(trace))
    assert plan.recomputed
    assert not check_plan(plan)
    edited = replace(plan, recomputed=(Recomputation(tensor_id=GELU),))
    (violation,) = [v for v in check_plan(edited) if v.kind is ViolationKind.RECOMPUTED]
    assert "no site needs it" in violation.message
    write_plan(edited, tmp_path / "plan.json")
    for command in ("check", "show", "simulate"):
        path = [str(tmp_path / "plan.json")]
        if command == "simulate":
            write_trace(trace, tmp_path / "trace.json")
            path.insert(0, str(tmp_path / "trace.json"))
        assert main([command, *path]) in (1, 2)


def test_a_source_that_is_done_with_too_early_is_none() -> None:
    trace = with_recipes()
    need = trace.tensors[GELU].windows[1][0]
    first, (start, _) = trace.tensors[UP].windows
    early = replace(trace.tensors[UP], windows=(first, (min(start, need - 1), need)))
    broken = replace(trace, tensors=(*trace.tensors[:UP], early, *trace.tensors[UP + 1 :]))
    assert GELU in dict(recomputable(trace))
    assert GELU not in dict(recomputable(broken))


def test_where_the_link_is_short_a_plan_computes_again() -> None:
    plan = short_of_link()
    kept = make_plan(plan.trace, plan.hardware, plan.budgets, recompute=False)
    assert plan.recomputed
    assert not kept.recomputed
    assert plan.prediction.step_ns < 0.9 * kept.prediction.step_ns
    assert plan.prediction.ideal_ns == kept.prediction.ideal_ns == plan.trace.duration_ns
    assert plan.prediction.unlimited_peak_bytes == kept.prediction.unlimited_peak_bytes
    assert not check_plan(plan)


def test_where_the_link_suffices_nothing_is_computed_again() -> None:
    trace = with_recipes()
    assert not make_plan(trace, machine(1000 * GIB), half(trace)).recomputed


def test_published_policies_compute_nothing_again() -> None:
    plan = short_of_link()
    assert not make_plan(plan.trace, plan.hardware, plan.budgets, "lru").recomputed


def kinds(plan: Plan) -> set[ViolationKind]:
    return {violation.kind for violation in check_plan(plan)}


def test_the_checker_refuses_what_cannot_be() -> None:
    plan = short_of_link()
    first = plan.recomputed[0]
    for wrong in (
        Recomputation(tensor_id=0),
        Recomputation(tensor_id=len(plan.trace.tensors)),
        first,
    ):
        broken = replace(plan, recomputed=(*plan.recomputed, wrong))
        assert kinds(broken) == {ViolationKind.RECOMPUTED}
    recipe = plan.trace.tensors[first.tensor_id].recompute
    assert recipe is not None
    (source,) = recipe.sources
    tensors = list(plan.trace.tensors)
    tensors[source] = replace(tensors[source], recompute=Recompute(duration_ns=1, sources=(0,)))
    chained = replace(
        plan,
        trace=replace(plan.trace, tensors=tuple(tensors)),
        recomputed=(*plan.recomputed, Recomputation(tensor_id=source)),
    )
    assert kinds(chained) == {ViolationKind.RECOMPUTED}


def test_the_checker_sees_memory_and_time_that_a_plan_hides() -> None:
    plan = short_of_link()
    kept_anyway = replace(plan, recomputed=plan.recomputed[1:])
    assert kinds(kept_anyway) >= {ViolationKind.DEVICE_BUDGET, ViolationKind.PREDICTION}
    too_fast = replace(plan, prediction=replace(plan.prediction, step_ns=plan.trace.duration_ns))
    assert kinds(too_fast) == {ViolationKind.PREDICTION}


def test_files_keep_it(tmp_path: Path) -> None:
    plan = short_of_link()
    path = tmp_path / "plan.json"
    write_plan(plan, path)
    assert read_plan(path) == plan


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('"tensor": "{gelu}"}}', '"tensor": "nobody"}}', "is no tensor of the trace"),
        ('"tensor": "{gelu}"}}', '"tensor": "{first}"}}', "cannot be computed again"),
        ('"tensor": "{other}"}}', '"tensor": "{gelu}"}}', 'names "{gelu}" 2 times'),
        ('"sources": ["{up}"]', '"sources": ["nobody"]', "is no tensor of this trace"),
        ('"sources": ["{up}"]', '"sources": ["{gelu}"]', "is the tensor itself"),
    ],
)
def test_a_file_with_a_mistake_is_refused(tmp_path: Path, old: str, new: str, message: str) -> None:
    plan = short_of_link()
    tensors = plan.trace.tensors
    gelu = next(c.tensor_id for c in plan.recomputed if c.tensor_id % 10 == GELU)
    other = next(c.tensor_id for c in plan.recomputed if c.tensor_id != gelu)
    found = {
        "gelu": tensors[gelu].name,
        "other": tensors[other].name,
        "up": tensors[gelu - 1].name,
        "first": tensors[0].name,
    }
    path = tmp_path / "plan.json"
    write_plan(plan, path)
    text = path.read_text(encoding="utf-8")
    assert old.format(**found) in text
    path.write_text(text.replace(old.format(**found), new.format(**found)), encoding="utf-8")
    with pytest.raises(FileFormatError, match=message.format(**found)):
        read_plan(path)


def test_people_are_told() -> None:
    plan = short_of_link()
    assert "are computed again" in plan_screen(plan)
    assert "computing again" in plan_screen(plan)
    assert plan_details(plan).count("recomputed") == len(plan.recomputed)
    facts = plan_json(plan, everything=True)
    assert facts["num_recomputed"] == len(plan.recomputed)
    assert facts["recomputed"]


def test_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan, paths = short_of_link(), (tmp_path / "trace.json", tmp_path / "plan.json")
    write_trace(plan.trace, paths[0])
    write_plan(plan, paths[1])
    arguments = ["simulate", *map(str, paths)]
    assert main(arguments) == 0
    assert "computing again" in capsys.readouterr().out
    assert main(["timeline", str(paths[1]), "-o", str(tmp_path / "timeline.json.gz")]) == 0
    unknown = tuple(replace(tensor, recompute=None) for tensor in plan.trace.tensors)
    write_trace(replace(plan.trace, tensors=unknown), paths[0])
    assert main(arguments) == 2
    assert "does not say what that takes" in capsys.readouterr().err


@st.composite
def traces_with_recipes(draw: st.DrawFn) -> StepTrace:
    """Steps in which some tensors can be computed from others."""
    trace = draw(traces())
    tensors = list(trace.tensors)
    for number in range(1, len(tensors)):
        if draw(st.booleans()):
            recipe = Recompute(
                duration_ns=draw(st.integers(0, 50)) * 1000,
                sources=tuple(draw(st.sets(st.integers(0, number - 1), min_size=1, max_size=2))),
                temporary_bytes=draw(st.integers(0, 2)) * 1000,
            )
            tensors[number] = replace(tensors[number], recompute=recipe)
    return replace(trace, tensors=tuple(tensors))


@pytest.mark.slow
@settings(max_examples=6, deadline=None)
@given(trace=traces_with_recipes(), part=st.floats(0.2, 1.0), speed=st.integers(4, 10))
def test_plans_hold_and_are_never_slower(trace: StepTrace, part: float, speed: int) -> None:
    budgets = replace(half(trace), device_bytes=int(peak(device_curve(trace)) * part))
    hardware = machine(10**speed)
    try:
        kept = make_plan(trace, hardware, budgets, recompute=False)
    except InfeasibleBudgetError:
        return
    plan = make_plan(trace, hardware, budgets)
    assert not check_plan(plan)
    assert plan.prediction.step_ns <= kept.prediction.step_ns
    again = predict(trace, hardware, *plan.choices)
    assert again.step_ns == plan.prediction.step_ns
