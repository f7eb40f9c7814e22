"""The plan of a step whose training state moves is one of all its tensors, and is what is done."""

from collections import Counter
from pathlib import Path

import pytest
import torch
from torch import Tensor

from teraplan.checker.check_plan import require_valid
from teraplan.errors import FileFormatError, PlanMismatchError
from teraplan.files.plan_file import read_plan
from teraplan.runtime.session.case import Case
from teraplan.runtime.session.feedback import Lesson
from teraplan.values.plan import Plan
from teraplan.values.run_record import Direction
from teraplan.values.step_trace import UPDATE_GRAPH, TensorKind
from tests.end_to_end.moving import (
    BUDGET,
    DEPTH,
    STEPS,
    adamw,
    budget_beside_others,
    check,
    looping,
    run_moving,
    training,
)
from tests.end_to_end.training import MLP, assert_same, run, sessions


def planned_case() -> tuple[Case, Plan]:
    """The kind of step of the session whose state moves, and its plan."""
    (session,) = [s for s in sessions() if s.keeper.state is not None]
    case = session.active
    assert case is not None
    assert case.schedule is not None
    return case, case.schedule.plan


def test_one_plan_for_all_classes_of_tensors() -> None:
    last = run_moving(training(adamw)).statuses[-1]
    case, plan = planned_case()
    assert case.schedule is not None
    tensors = plan.trace.tensors
    kinds = Counter(tensor.kind for tensor in tensors)
    assert kinds[TensorKind.ACTIVATION] > 0
    assert kinds[TensorKind.PARAMETER] == kinds[TensorKind.GRADIENT] == DEPTH
    assert kinds[TensorKind.OPTIMIZER_STATE] == 2 * DEPTH
    assert TensorKind.OPTIMIZER_STATE in {tensors[m.tensor_id].kind for m in plan.migrations}
    require_valid(plan)
    assert plan.prediction.device_peak_bytes <= plan.budgets.device_bytes
    assert last.predicted_step_ns == plan.prediction.step_ns
    assert plan.prediction.device_peak_bytes <= last.predicted_peak_bytes
    assert last.predicted_peak_bytes <= plan.budgets.device_bytes
    assert last.moving_state_budget_bytes == case.schedule.state_peak_bytes
    assert last.unlimited_peak_bytes == plan.prediction.unlimited_peak_bytes
    assert last.diverged_steps == 0


@pytest.mark.slow
def test_waits_are_told_apart_from_computation() -> None:
    run_moving(training(adamw))
    case, plan = planned_case()
    tensors = {tensor.name: tensor for tensor in plan.trace.tensors}
    waits = [stall for record in case.runs for stall in record.stalls]
    assert any(tensors[wait.tensor].kind is not TensorKind.ACTIVATION for wait in waits)
    for record in case.runs:
        assert sum(stall.duration_ns for stall in record.stalls) < record.duration_ns
    assert case.last is not None
    assert sum(case.last.durations_ns()) <= case.last.total_ns()


@pytest.mark.slow
def test_a_parameter_is_used_in_the_graphs_and_changed_in_its_update() -> None:
    run_moving(training(adamw))
    _, plan = planned_case()
    trace = plan.trace
    updates = [k for k, site in enumerate(trace.sites) if site.graph == UPDATE_GRAPH]
    for tensor in trace.tensors:
        if tensor.kind is TensorKind.PARAMETER:
            assert len(tensor.windows) >= 2
            assert tensor.changed_in == (len(tensor.windows) - 1,)
            assert tensor.persistent
        if tensor.kind is TensorKind.GRADIENT:
            born, update = tensor.windows
            assert born[0] + 1 == born[1] <= updates[0]
            assert update[0] in updates
            assert not tensor.persistent
        if tensor.kind is TensorKind.OPTIMIZER_STATE:
            assert len(tensor.windows) == 1
            assert set(tensor.windows[0]) <= set(updates)


@pytest.mark.slow
def test_what_moves_is_what_the_plan_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a step that follows one under the same plan."""
    monkeypatch.setattr("teraplan.runtime.session.session.learn", lambda *_, **__: Lesson())
    run_moving(training(adamw, steps=STEPS + 2))
    case, plan = planned_case()
    assert len(case.runs) > 2, "the first may still write what was there without a plan"
    names = [plan.trace.tensors[m.tensor_id].name for m in plan.migrations]
    assert names
    last = case.runs[-1]
    came = Counter(t.tensor for t in last.transfers if t.direction is Direction.BACK)
    assert came == Counter(names)
    # What leaves at the end of a step may have left in the next one.
    left = {t.tensor for r in case.runs[-2:] for t in r.transfers if t.direction is Direction.OUT}
    written = {n for n, m in zip(names, plan.migrations, strict=True) if not m.clean}
    assert written <= left
    more = [name for name in left - written if not name.startswith("gradient")]
    assert not more, "a gradient is the user's after its update, and may go"


@pytest.mark.slow
def test_a_plan_file_with_training_state_is_replayed(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    options: dict[str, object] = {"training_state": "moves"}
    options["device_budget"] = budget_beside_others(BUDGET)
    first = run(training(adamw), **options, report=str(tmp_path))
    plan = read_plan(path)
    moved = {plan.trace.tensors[m.tensor_id].kind for m in plan.migrations}
    assert TensorKind.OPTIMIZER_STATE in moved
    for given in (options, {"device_budget": 100 << 30}, {}):
        replayed = run(training(adamw), **given, plan=str(path))
        assert_same(first, replayed)
        assert planned_case()[1] == plan
        assert replayed.statuses[-1].diverged_steps == 0
    with pytest.raises(PlanMismatchError, match=r'training_state is "stays"; leave'):
        run(training(adamw), plan=str(path), training_state="stays")
    with pytest.raises(PlanMismatchError, match=r"with encrypt.*; leave that out"):
        run(training(adamw), plan=str(path), encrypt=True)
    path.write_text(path.read_text()[:-100])
    with pytest.raises(FileFormatError, match=r'is not JSON: .*; mend the file, or .* plan="auto"'):
        run(training(adamw), plan=str(path))


@pytest.mark.slow
def test_evaluation_between_steps_is_no_part_of_the_plan() -> None:
    def between(net: MLP, optimizer: torch.optim.Optimizer, step: int) -> None:
        with torch.no_grad():
            net(*net.batch(step))

    last = run_moving(training(adamw, between=between)).statuses[-1]
    assert last.phase == "planned"
    assert last.diverged_steps == 0


@pytest.mark.slow
def test_a_step_that_leaves_its_plan_keeps_its_bits() -> None:
    """A gradient is computed twice in one step, and half of the parameters get none in another."""

    def step_of(net: MLP, optimizer: torch.optim.Optimizer, step: int) -> Tensor:
        loss: Tensor = net(*net.batch(step))
        torch.autograd.backward(loss)
        if step == STEPS - 2:
            torch.autograd.backward(net(*net.batch(step)))
        if step == STEPS - 1:
            for parameter in list(net.parameters())[::2]:
                parameter.grad = None
        optimizer.step()
        return loss

    state = check(looping(step_of))
    (session,) = [s for s in sessions() if s.keeper.state is state]
    assert session.diverged_steps > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    "kernels", ["aot_eager", pytest.param("inductor", marks=pytest.mark.exhaustive)]
)
def test_steps_whose_saved_activations_are_all_small_have_a_plan(kernels: str) -> None:
    """A batch of a few rows, and large weights."""

    def make_model() -> MLP:
        return MLP(width=192, depth=DEPTH, rows=4)

    check(training(adamw, make_model=make_model, steps=STEPS + 2), kernels=kernels)
    _, plan = planned_case()
    kinds = Counter(tensor.kind for tensor in plan.trace.tensors)
    assert kinds[TensorKind.ACTIVATION] == 1, "the largest of them"
    assert kinds[TensorKind.PARAMETER] == DEPTH
    assert {plan.trace.tensors[m.tensor_id].kind for m in plan.migrations} >= {
        TensorKind.OPTIMIZER_STATE
    }
