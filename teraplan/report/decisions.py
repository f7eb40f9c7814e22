"""What a plan decides for each tensor, identical layers folded into one row."""

from collections.abc import Mapping, Set
from dataclasses import dataclass

from teraplan.report.folding import (
    by_template,
    layer_fold,
    merge_numbers,
    name_template,
    node_label,
    text_template,
)
from teraplan.values.hardware import Tier
from teraplan.values.plan import HostUpdate, Migration, Plan, Recomputation
from teraplan.values.step_trace import StepTrace, Tensor, TensorKind


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What happens to one tensor in one inactive period, or that it stays."""

    tensor_id: int
    tensor: Tensor
    migration: Migration | None
    """None: the tensor stays on the device in all of the step, unless one of the others is set."""
    when: str
    """Phases in which it leaves and is needed: "forward → backward"."""
    stall_ns: int
    """Waiting for this tensor; counted once, with the first of its decisions."""
    host_update: HostUpdate | None = None
    """The host updates its bucket, and has its bytes meanwhile."""
    recomputed: Recomputation | None = None
    """It is dropped and computed again."""

    @property
    def chosen(self) -> Migration | HostUpdate | Recomputation | None:
        """The one that is set."""
        return self.migration or self.host_update or self.recomputed


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Decisions that are the same for several layers."""

    layer: str
    num_layers: int
    node: str
    num_tensors: int
    kind: TensorKind
    tier: Tier | None
    """None: stays on the device, is dropped, or its update is the host's."""
    host_bytes: int
    """Where tensors are split between host and storage, the bytes of them in host memory."""
    recomputed: bool
    """Dropped and computed again."""
    clean: bool
    hosted: bool
    """Whether the host updates its bucket."""
    when: str
    nbytes: int
    stall_ns: int
    reason: str
    tensor_ids: tuple[int, ...]


def decisions(plan: Plan) -> tuple[Decision, ...]:
    """Every decision of `plan`, in order of tensors, at least one for each."""
    by_tensor: dict[int, list[Migration]] = {}
    for migration in plan.migrations:
        by_tensor.setdefault(migration.tensor_id, []).append(migration)
    hosted = {i: h for h in plan.host_updates for i in plan.trace.updates[h.update].tensor_ids}
    again = {choice.tensor_id: choice for choice in plan.recomputed}
    found: list[Decision] = []
    for tensor_id, tensor in enumerate(plan.trace.tensors):
        chosen = sorted(by_tensor.get(tensor_id, ()), key=lambda migration: migration.leave)
        choices: list[Migration | HostUpdate | Recomputation | None] = [*chosen]
        choices += [known[tensor_id] for known in (hosted, again) if tensor_id in known]
        for place, choice in enumerate(choices or [None]):
            found.append(
                Decision(
                    tensor_id=tensor_id,
                    tensor=tensor,
                    migration=choice if isinstance(choice, Migration) else None,
                    when=_when(plan.trace, choice),
                    stall_ns=0 if place else plan.prediction.stall_ns.get(tensor_id, 0),
                    host_update=choice if isinstance(choice, HostUpdate) else None,
                    recomputed=choice if isinstance(choice, Recomputation) else None,
                )
            )
    return tuple(found)


def _when(trace: StepTrace, migration: Migration | HostUpdate | Recomputation | None) -> str:
    if isinstance(migration, HostUpdate):
        return "update"
    if not isinstance(migration, Migration):
        return ""
    num_sites = len(trace.sites)
    start = trace.sites[migration.leave % num_sites]
    end = trace.sites[migration.needed % num_sites]
    if migration.needed >= num_sites:
        return f"{_phase(start.backward)} → next step"
    if start.backward == end.backward:
        return f"within {_phase(start.backward)}"
    return f"{_phase(start.backward)} → {_phase(end.backward)}"


def _phase(backward: bool) -> str:
    return "backward" if backward else "forward"


def fold(plan: Plan) -> tuple[Row, ...]:
    """Decisions with identical layers folded, most bytes first, the staying ones last."""
    all_decisions = decisions(plan)
    groups: dict[tuple[object, ...], list[Decision]] = {}
    for decision in all_decisions:
        groups.setdefault(_key(decision), []).append(decision)
    layers = by_template(tensor.layer or tensor.name for tensor in plan.trace.tensors)
    rows = [_row(group, layers) for group in groups.values()]

    def rank(row: Row) -> tuple[object, ...]:
        return row.tier is None and not row.recomputed, -row.nbytes, row.layer, row.node

    return tuple(sorted(rows, key=rank))


def _key(decision: Decision) -> tuple[object, ...]:
    migration, tensor = decision.migration, decision.tensor
    return (
        name_template(tensor.layer or tensor.name),
        node_label(tensor.name, tensor.layer) if tensor.layer else "",
        tensor.kind,
        decision.when,
        _way(migration) if migration else None,
        decision.host_update is not None,
        text_template(decision.recomputed.reason) if decision.recomputed else None,
    )


def _way(migration: Migration) -> tuple[object, ...]:
    split = migration.host_bytes > 0
    return migration.tier, split, migration.clean, text_template(migration.reason)


def _row(group: list[Decision], layers: Mapping[str, Set[str]]) -> Row:
    first = group[0]
    folded = layer_fold(
        (decision.tensor.layer or decision.tensor.name for decision in group), layers
    )
    migration = first.migration
    reasons = [decision.chosen.reason for decision in group if decision.chosen]
    return Row(
        layer=folded[0].label,
        num_layers=folded[0].count,
        node=node_label(first.tensor.name, first.tensor.layer) if first.tensor.layer else "",
        num_tensors=len(group),
        kind=first.tensor.kind,
        tier=migration.tier if migration else None,
        host_bytes=sum(d.migration.host_bytes for d in group if d.migration),
        recomputed=first.recomputed is not None,
        clean=migration.clean if migration else False,
        hosted=first.host_update is not None,
        when=first.when,
        nbytes=sum(decision.tensor.nbytes for decision in group),
        stall_ns=sum(decision.stall_ns for decision in group),
        reason=merge_numbers(reasons) if reasons else "",
        tensor_ids=tuple(decision.tensor_id for decision in group),
    )
