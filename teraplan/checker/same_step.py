"""Whether a plan was made for what runs here: the same program, and in it the same tensors."""

from collections.abc import Iterator
from dataclasses import fields, replace

from teraplan.errors import PlanMismatchError
from teraplan.units import format_nbytes
from teraplan.values.plan import Plan
from teraplan.values.step_trace import Fingerprint, StepTrace, Tensor, TensorKind

_REMEDY = "plan again (teraplan measures and plans by itself when no plan file is given)"
_MOST_CHARACTERS = 200


def require_same_program(plan: Plan, fingerprint: Fingerprint) -> None:
    """Does nothing if `plan` was made for the program that `fingerprint` describes.

    Raises:
        PlanMismatchError: names the first field that differs, and both values.
    """
    planned = plan.trace.fingerprint
    for field in fields(Fingerprint):
        wanted, found = getattr(planned, field.name), getattr(fingerprint, field.name)
        if wanted != found and wanted is not None:
            raise PlanMismatchError(
                f"the plan is for another program: {field.name} is {_short(wanted)} in the plan "
                f"and {_short(found)} here; {_REMEDY}"
            )


def require_same_step(plan: Plan, trace: StepTrace) -> None:
    """Does nothing if `plan` was made for the step that `trace` describes.

    Raises:
        PlanMismatchError: names the first field or tensor that differs.
    """
    hashed = plan.trace.fingerprint.shapes  # the tensors themselves are compared
    require_same_program(plan, replace(trace.fingerprint, shapes=hashed))
    difference = next(_differences(plan.trace.tensors, trace.tensors), None)
    if difference is not None:
        raise PlanMismatchError(
            "the plan is for another step, or for one whose sizes follow from other values: "
            f"{difference}; {_about_updates(plan.trace, trace)}{_REMEDY}"
        )


def _about_updates(planned: StepTrace, actual: StepTrace) -> str:
    """What the gradients say of the option `update`: at "gradient" few of them stay."""
    there, here = (
        sum(t.kind is TensorKind.GRADIENT for t in trace.tensors) for trace in (planned, actual)
    )
    if there == here:
        return ""
    update = "step" if there > here else "gradient"
    return (
        f"{there} gradients stay until the optimizer steps in the plan and {here} here: if it was "
        f'made with update="{update}", set that, or '
    )


def _differences(planned: tuple[Tensor, ...], actual: tuple[Tensor, ...]) -> Iterator[str]:
    """In words, first those that say most."""
    there, here = ({t.name: t for t in tensors} for tensors in (planned, actual))
    for name, tensor in there.items():
        if name in here and tensor.nbytes != here[name].nbytes:
            yield f"{name} has {_size(tensor)} in the plan and {_size(here[name])} here"
    for found, other, where in ((there, here, "in the plan"), (here, there, "here")):
        names = [name for name in found if name not in other]
        if names:
            rest = f", as are {len(names) - 1} more" if len(names) > 1 else ""
            yield f"{names[0]}, {_size(found[names[0]])}, is only {where}{rest}"
    for one, two in zip(planned, actual, strict=False):
        if one.name != two.name:
            yield f"{one.name} comes in the plan where {two.name} comes here"


def _size(tensor: Tensor) -> str:
    return f"{format_nbytes(tensor.nbytes)} ({tensor.nbytes} bytes)"


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _MOST_CHARACTERS else text[: _MOST_CHARACTERS - 3] + "..."
