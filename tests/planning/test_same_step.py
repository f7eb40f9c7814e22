"""A plan that is replayed is for this program and these tensors, or what differs is named."""

from dataclasses import replace

import pytest

from teraplan.checker.same_step import require_same_program, require_same_step
from teraplan.errors import PlanMismatchError
from teraplan.planners import make_plan
from teraplan.simulation.memory_curve import device_curve, peak
from teraplan.values.plan import Plan
from teraplan.values.step_trace import StepTrace, Tensor, TensorKind
from tests.planning.synthetic import budgets, gpt_trace, machine


@pytest.fixture(scope="module")
def plan() -> Plan:
    trace = gpt_trace(1)
    return make_plan(trace, machine(), budgets(peak(device_curve(trace))))


def renamed(tensor: Tensor) -> Tensor:
    return replace(tensor, name="other/exp_avg")


def with_tensors(trace: StepTrace, *tensors: Tensor) -> StepTrace:
    return replace(
        trace,
        tensors=tensors,
        fingerprint=replace(trace.fingerprint, shapes="of these tensors"),
    )


def test_a_mismatch_names_the_field(plan: Plan) -> None:
    same = plan.trace.fingerprint
    require_same_program(plan, same)
    with pytest.raises(PlanMismatchError, match=r"torch_version is '2.13' in the plan and '9'"):
        require_same_program(plan, replace(same, torch_version="9"))


def test_the_same_step_is_no_mismatch(plan: Plan) -> None:
    require_same_step(plan, plan.trace)


def test_a_tensor_of_another_size_is_named(plan: Plan) -> None:
    first, *rest = plan.trace.tensors
    other = with_tensors(plan.trace, replace(first, nbytes=first.nbytes // 2), *rest)
    with pytest.raises(PlanMismatchError, match=rf"{first.name} has .* in the plan and .* here"):
        require_same_step(plan, other)


def test_tensors_that_only_one_has_are_named(plan: Plan) -> None:
    first, second, *rest = plan.trace.tensors
    with pytest.raises(
        PlanMismatchError, match=rf"{first.name}, .*, is only in the plan, as are 1"
    ):
        require_same_step(plan, with_tensors(plan.trace, *rest))
    more = with_tensors(plan.trace, first, second, *rest, renamed(first))
    with pytest.raises(PlanMismatchError, match=r"other/exp_avg, .* bytes\), is only here; plan"):
        require_same_step(plan, more)


def test_another_order_is_named(plan: Plan) -> None:
    first, second, *rest = plan.trace.tensors
    turned = with_tensors(plan.trace, second, first, *rest)
    where = rf"{first.name} comes in the plan where {second.name} comes here"
    with pytest.raises(PlanMismatchError, match=where):
        require_same_step(plan, turned)


@pytest.mark.parametrize("update", ["step", "gradient"])
def test_gradients_that_only_one_has_tell_of_the_option(plan: Plan, update: str) -> None:
    first, *rest = plan.trace.tensors
    gradient = replace(first, kind=TensorKind.GRADIENT)
    with_one = with_tensors(plan.trace, gradient, *rest), with_tensors(plan.trace, *rest)
    made_from, here = with_one if update == "step" else with_one[::-1]
    with pytest.raises(PlanMismatchError, match=rf'made with update="{update}", set that, or plan'):
        require_same_step(replace(plan, trace=made_from), here)
