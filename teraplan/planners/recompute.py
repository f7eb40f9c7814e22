"""Which saved activations a plan computes again: where that is faster than every way to move them.

    plan with everything kept -> candidates by what they free per time -> plans for parts of them

Each set makes another step of the trace (`recomputed_step`), which is planned like any other. Of
the candidates in order all are tried, then half, then parts nearer and nearer to the best: in
drafts, of which the fastest are then planned thoroughly. The plan in which everything is kept stays
unless another is faster by more than measurements are off.

Where copies and computation share cores, what is moved makes the computation slower even if nobody
waits for it. What is computed again is not moved; so it can be faster there, too.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence

from teraplan.errors import InfeasibleBudgetError
from teraplan.simulation.memory_curve import fixed_curve, touched_curve
from teraplan.units import format_nbytes, format_ns
from teraplan.values.plan import Plan, Recomputation
from teraplan.values.recomputed_step import independent, recomputable
from teraplan.values.step_trace import StepTrace

_WORTH = 0.02
"""Of the step, the least that computing again must save."""
_NEARLY = 0.05
"""By how much a draft may be slower than that of the step in which everything is kept."""
_THOROUGH = 2
"""Of the parts, how many at most are planned thoroughly: those with the fastest drafts."""
_PARTS = 8
_MANY_SITES = 5_000
"""Larger steps take seconds to plan: of their candidates all or half are computed again."""

PlanStep = Callable[[tuple[Recomputation, ...], bool], Plan]
"""A plan in which these tensors are computed again, and whether a draft will do."""


def with_recomputed(
    kept: Plan,
    plan_step: PlanStep,
    late: Callable[[], bool],
    *,
    contention_ns_per_byte: float = 0.0,
) -> Plan:
    """`kept`, or a faster plan for the same budgets that computes some activations again.

    Args:
        kept: computes nothing again.
        plan_step: makes other plans.
        late: that there is no time for another plan.
        contention_ns_per_byte: by which the computation takes longer for each byte that is moved
            beside it. What `kept` moves is in the times of its trace.
    """
    trace = kept.trace

    def cost_ns(plan: Plan) -> int:
        return plan.prediction.step_ns + int(plan.prediction.moved_bytes * contention_ns_per_byte)

    if cost_ns(kept) <= trace.duration_ns * (1 + _WORTH):
        return kept
    ranked = _ranked(kept)
    if not ranked:
        return kept
    small = len(trace.sites) <= _MANY_SITES
    drafts: dict[int, Plan] = {}
    """By how many of the candidates are computed again."""

    def plan_of(count: int, *, draft: bool) -> Plan:
        if late():
            return kept
        try:
            return plan_step(recomputations(trace, ranked[:count]), draft)
        except InfeasibleBudgetError:  # what they are computed from has to stay for longer
            return kept

    def draft_cost_ns(part: int) -> int:
        count = max(1, len(ranked) * part // _PARTS)
        if count not in drafts:
            drafts[count] = plan_of(count, draft=small)
        return cost_ns(drafts[count])

    best, stride = min((_PARTS, _PARTS // 2), key=draft_cost_ns), _PARTS // 4
    while stride and small:
        near = (best, best - stride, best + stride)
        best = min((part for part in near if 0 < part <= _PARTS), key=draft_cost_ns)
        stride //= 2
    least_ns = min(map(cost_ns, drafts.values()))
    most_ns = min(least_ns * (1 + _WORTH), cost_ns(plan_of(0, draft=small)) * (1 + _NEARLY))
    close = [count for count, draft in drafts.items() if cost_ns(draft) <= most_ns]
    close = sorted(close, key=lambda count: cost_ns(drafts[count]))[:_THOROUGH]
    thorough = [plan_of(count, draft=False) for count in close]
    plan = min([*thorough, *(drafts[count] for count in close)], key=cost_ns, default=kept)
    return plan if cost_ns(plan) <= cost_ns(kept) - kept.prediction.step_ns * _WORTH else kept


def _ranked(kept: Plan) -> Sequence[int]:
    """Candidates that do not need each other; first those that move, by what they free per time."""
    trace = kept.trace
    freed = {
        tensor_id: trace.tensors[tensor_id].nbytes / max(1, recompute.duration_ns)
        for tensor_id, recompute in recomputable(trace)
    }
    moving = Counter(migration.tensor_id for migration in kept.migrations)
    ranked = sorted(freed, key=lambda i: (i not in moving, -freed[i], -i))
    return tuple(_that_fit(trace, independent(trace, ranked), kept.budgets.device_bytes))


def _that_fit(trace: StepTrace, tensor_ids: Iterable[int], budget_bytes: int) -> Iterator[int]:
    """Those with which, beside those before them, there still is a plan for the budget.

    What one takes while it is computed, and its sources from there on, may be too much at once.
    """
    curve = fixed_curve(trace) + touched_curve(trace)
    starts = dict[int, int]()
    """Of the sources' last windows, where one needs them earlier."""
    for tensor_id in tensor_ids:
        tensor = trace.tensors[tensor_id]
        assert tensor.recompute is not None, f"{tensor.name} has no recipe"
        need = tensor.windows[1][0]
        sources = {
            source: starts.get(source, trace.tensors[source].windows[1][0])
            for source in tensor.recompute.sources
        }
        taken = [(need + 1, tensor.recompute.temporary_bytes)]
        taken += [(start, trace.tensors[source].nbytes) for source, start in sources.items()]
        for end, nbytes in taken:
            curve[need:end] += nbytes
        if curve[need : max(end for end, _ in taken)].max(initial=0) <= budget_bytes:
            starts.update((source, min(need, start)) for source, start in sources.items())
            yield tensor_id
            continue
        for end, nbytes in taken:
            curve[need:end] -= nbytes


def recomputations(trace: StepTrace, chosen: Sequence[int]) -> tuple[Recomputation, ...]:
    """That these tensors are computed again, with reasons."""
    return tuple(_recomputation(trace, tensor_id) for tensor_id in chosen)


def _recomputation(trace: StepTrace, tensor_id: int) -> Recomputation:
    tensor = trace.tensors[tensor_id]
    assert tensor.recompute is not None, f"{tensor.name} has no recipe"
    took = format_ns(tensor.recompute.duration_ns)
    reason = f"frees {format_nbytes(tensor.nbytes)} for {took}"
    return Recomputation(tensor_id=tensor_id, reason=reason)
