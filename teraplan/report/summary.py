"""A plan in a few lines: the runtime's banner at the first step and `teraplan.status()`."""

from collections import Counter
from collections.abc import Iterable

from teraplan.report.folding import Fold, layer_fold, node_label
from teraplan.report.table import shorten
from teraplan.units import format_nbytes, format_ns
from teraplan.values.hardware import Tier
from teraplan.values.plan import Plan
from teraplan.values.step_trace import Tensor, TensorKind

__all__ = ["Fold", "covered", "hosted_line", "layer_fold", "plan_banner", "step_line", "top_stalls"]

_PLURALS = {
    TensorKind.ACTIVATION: "activations",
    TensorKind.PARAMETER: "parameters",
    TensorKind.GRADIENT: "gradients",
    TensorKind.OPTIMIZER_STATE: "optimizer states",
}


def plan_banner(plan: Plan) -> str:
    """What `plan` covers, its budgets, peaks, traffic, predicted time and longest waits."""
    prediction, budgets = plan.prediction, plan.budgets
    lines = [
        f"teraplan: {covered(plan)}",
        f"  device   peak {format_nbytes(prediction.device_peak_bytes)} of "
        f"{format_nbytes(budgets.device_bytes)}; without the plan "
        f"{format_nbytes(prediction.unlimited_peak_bytes)}",
    ]
    for tier, peak, budget in (
        (Tier.HOST, prediction.host_peak_bytes, budgets.host_bytes),
        (Tier.STORAGE, prediction.storage_peak_bytes, budgets.storage_bytes),
    ):
        out, back = prediction.out_bytes.get(tier, 0), prediction.back_bytes.get(tier, 0)
        if peak or out or back:
            lines.append(
                f"  {tier:<7}  peak {format_nbytes(peak)} of {format_nbytes(budget)}; "
                f"each step {format_nbytes(out)} out, {format_nbytes(back)} back"
            )
    lines.append(f"  step     {step_line(plan)}")
    stalls = top_stalls(plan)
    if stalls:
        lines.append(f"  waits    {', '.join(stalls)}")
    if plan.host_updates:
        lines.append(f"  update   {hosted_line(plan)}")
    return "\n".join(lines)


def covered(plan: Plan) -> str:
    """How many tensors of which kind move, as one sentence."""
    tensors = plan.trace.tensors
    moved = {migration.tensor_id for migration in plan.migrations}
    again = _computed_again(plan)
    if not moved and plan.host_updates:
        return f'{hosted_line(plan)}; policy "{plan.policy}" on {_device(plan)}'
    if not moved and again:
        return f'nothing moves; {again}; policy "{plan.policy}" on {_device(plan)}'
    if not moved:
        return f"nothing moves, all {len(tensors)} tensors of the step stay on {_device(plan)}"
    kinds = Counter(tensors[tensor_id].kind for tensor_id in moved)
    words = ", ".join(_counted(count, kind) for kind, count in kinds.most_common())
    return (
        f"{len(moved)} of {len(tensors)} tensors move ({words}); {again}{'; ' if again else ''}"
        f'policy "{plan.policy}" on {_device(plan)}'
    )


def hosted_line(plan: Plan) -> str:
    """How many updates run on the host, and the bytes of parameters that they update."""
    updates, tensors = plan.trace.updates, plan.trace.tensors
    hosted = [updates[h.update] for h in plan.host_updates]
    nbytes = sum(tensors[i].nbytes for update in hosted for i in update.parameters)
    return (
        f"{len(hosted)} of {len(updates)} updates run on the host's cores, "
        f"{format_nbytes(nbytes)} of parameters"
    )


def _computed_again(plan: Plan) -> str:
    if not plan.recomputed:
        return ""
    nbytes = sum(plan.trace.tensors[choice.tensor_id].nbytes for choice in plan.recomputed)
    return f"{len(plan.recomputed)} are computed again ({format_nbytes(nbytes)})"


def _counted(count: int, kind: TensorKind) -> str:
    return f"{count} {_PLURALS[kind] if count > 1 else kind.replace('_', ' ')}"


def _device(plan: Plan) -> str:
    return plan.hardware.device or "the device"


def step_line(plan: Plan) -> str:
    """Predicted time of the step beside the ideal."""
    step_ns, ideal_ns = plan.prediction.step_ns, plan.prediction.ideal_ns
    again_ns = plan.step.duration_ns - plan.trace.duration_ns
    waiting_ns = step_ns - ideal_ns - again_ns
    if step_ns < ideal_ns:
        return (
            f"{format_ns(step_ns)} predicted, {format_ns(ideal_ns - step_ns)} less than with all "
            "updates on a device of unlimited memory"
        )
    if step_ns == ideal_ns:
        return f"{format_ns(step_ns)} predicted, all of it computation (the ideal)"
    percent = f"+{100 * (step_ns - ideal_ns) / ideal_ns:.1f} %" if ideal_ns else "ideal unknown"
    again = f"+ {format_ns(again_ns)} computing again " if again_ns else ""
    gap = plan.prediction.gap
    near = "" if gap is None else f"; no plan is more than {100 * gap:.1f} % faster"
    return (
        f"{format_ns(step_ns)} predicted = {format_ns(ideal_ns)} computation (the ideal) "
        f"{again}+ {format_ns(waiting_ns)} waiting ({percent}){near}"
    )


def top_stalls(plan: Plan, limit: int = 3) -> list[str]:
    """The longest waits with the tensors that they are for, longest first."""
    stalls = sorted(plan.prediction.stall_ns.items())
    return longest_waits(((ns, tensor_label(plan.trace.tensors[i])) for i, ns in stalls), limit)


def longest_waits(waits: Iterable[tuple[int, str]], limit: int = 3) -> list[str]:
    """The longest waits, longest first, each of so many ns for the tensor of that label."""
    ordered = sorted(waits, key=lambda wait: -wait[0])
    words = [f"{format_ns(wait_ns)} {shorten(label, 28)}" for wait_ns, label in ordered[:limit]]
    rest = ordered[limit:]
    if rest:
        words.append(f"{format_ns(sum(ns for ns, _ in rest))} for {len(rest)} more")
    return words


def tensor_label(tensor: Tensor) -> str:
    """The layer and role of `tensor` ("blocks.3.mlp gelu"), its name if the layer is unknown."""
    if not tensor.layer:
        return tensor.name
    return f"{tensor.layer} {node_label(tensor.name, tensor.layer)}".rstrip()
