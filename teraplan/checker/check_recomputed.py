"""The checker's rules of tensors that are computed again, and the step that follows from them.

Like `check_plan` it shares no code with what it checks.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace

from teraplan.checker.violations import Violation, ViolationKind
from teraplan.values.plan import Plan


def check_recomputed(plan: Plan) -> Iterator[Violation]:
    """Tensors that cannot be computed again as the plan has it."""
    times_chosen = Counter(choice.tensor_id for choice in plan.recomputed)
    for choice in plan.recomputed:
        tensor_id = choice.tensor_id
        why = _why_not(plan, tensor_id, times_chosen)
        if why is not None:
            message = f"tensor {tensor_id} cannot be computed again: {why}"
            yield Violation(kind=ViolationKind.RECOMPUTED, message=message)


def _why_not(plan: Plan, tensor_id: int, times_chosen: Mapping[int, int]) -> str | None:
    if not 0 <= tensor_id < len(plan.trace.tensors):
        return f"there are {len(plan.trace.tensors)}"
    if times_chosen[tensor_id] > 1:
        return "it is named twice"
    tensor = plan.trace.tensors[tensor_id]
    if tensor.recompute is None:
        return "nothing is known to compute it from"
    if len(tensor.windows) != 2 or tensor.windows[0][0] != tensor.windows[0][1]:
        return "it is not simply saved once and needed once"
    need = tensor.windows[1][0]
    if need >= len(plan.trace.sites):
        return "no site needs it"
    for number in tensor.recompute.sources:
        if not 0 <= number < len(plan.trace.tensors) or number in times_chosen:
            return "it is computed from one that is not there either"
        source = plan.trace.tensors[number]
        if len(source.windows) != 2 or not source.windows[0][1] <= need < source.windows[1][1]:
            return f"{source.name}, which that takes, is not kept until site {need}"
    return None


def with_recomputed(plan: Plan) -> Plan:
    """The plan with a trace in which the recomputed tensors are born where they are needed."""
    if not plan.recomputed:
        return plan
    windows = [list(tensor.windows) for tensor in plan.trace.tensors]
    extra_ns = [0] * len(plan.trace.sites)
    extra_bytes = [0] * len(plan.trace.sites)
    for choice in plan.recomputed:
        recompute = plan.trace.tensors[choice.tensor_id].recompute
        assert recompute is not None, "checked before"
        need = windows[choice.tensor_id][1][0]
        del windows[choice.tensor_id][0]
        extra_ns[need] += recompute.duration_ns
        extra_bytes[need] += recompute.temporary_bytes
        for source in recompute.sources:
            start, end = windows[source][1]
            windows[source][1] = (need if need < start else start, end)
    sites = tuple(
        replace(
            site,
            duration_ns=site.duration_ns + extra_ns[i],
            workspace_bytes=site.workspace_bytes + extra_bytes[i],
        )
        for i, site in enumerate(plan.trace.sites)
    )
    tensors = tuple(
        replace(tensor, windows=tuple(windows[i])) for i, tensor in enumerate(plan.trace.tensors)
    )
    return replace(plan, trace=replace(plan.trace, sites=sites, tensors=tensors), recomputed=())
