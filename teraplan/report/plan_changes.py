"""What changed from one plan to another: budgets, prediction, and decisions, folded."""

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import asdict, dataclass
from itertools import zip_longest

from teraplan.report.folding import by_template, layer_fold, name_template, node_label
from teraplan.report.plan_text import speed_text
from teraplan.report.table import TIMES, aligned, shorten
from teraplan.units import format_nbytes, format_ns
from teraplan.values.hardware import Tier
from teraplan.values.plan import HostUpdate, Migration, Plan
from teraplan.values.step_trace import StepTrace, Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """A number or word that differs between two plans."""

    name: str
    before: str
    after: str
    difference: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DecisionChange:
    """A decision that one plan has and the other has not, or that both have otherwise."""

    what: str
    """ "added", "removed", "storage to host", "sites" or "reason"."""
    tensors: tuple[Tensor, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors together."""
        return sum(tensor.nbytes for tensor in self.tensors)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanChanges:
    """Everything that differs between two plans."""

    facts: tuple[Change, ...]
    decisions: tuple[DecisionChange, ...]

    @property
    def any(self) -> bool:
        """Whether anything differs."""
        return bool(self.facts or self.decisions)


def plan_changes(before: Plan, after: Plan) -> PlanChanges:
    """What is different in `after`; tensors are matched by name."""
    return PlanChanges(facts=_facts(before, after), decisions=_decisions(before, after))


def _facts(before: Plan, after: Plan) -> tuple[Change, ...]:
    changes: list[Change] = []

    def word(name: str, old: str, new: str) -> None:
        if old != new:
            changes.append(Change(name=name, before=old, after=new, difference=""))

    def number(name: str, old: int, new: int, show: Callable[[int], str]) -> None:
        if old != new:
            sign = "+" if new > old else "-"
            percent = f" ({sign}{100 * abs(new - old) / old:.1f} %)" if old else ""
            difference = f"{sign}{show(abs(new - old))}{percent}"
            changes.append(
                Change(name=name, before=show(old), after=show(new), difference=difference)
            )

    word("policy", before.policy, after.policy)
    word("updates on the host", str(len(before.host_updates)), str(len(after.host_updates)))
    word("pace of storage", *map(_pace, (before, after)))
    word("program", _program(before), _program(after))
    word("measured step", *_measured(before.trace, after.trace))
    word("device", before.hardware.device, after.hardware.device)
    if before.hardware != after.hardware and before.hardware.device == after.hardware.device:
        word("machine", "capacities or links", "others")
    for (name, old), (_, new) in zip(_numbers(before), _numbers(after), strict=True):
        number(name, old, new, format_ns if name.endswith("time") else format_nbytes)
    return tuple(changes)


def _pace(plan: Plan) -> str:
    return "as fast as it can" if plan.storage_pace is None else speed_text(plan.storage_pace)


def _program(plan: Plan) -> str:
    fingerprint = plan.trace.fingerprint
    graphs = ",".join(graph[:8] for graph in fingerprint.graphs[:3])
    more = f" and {len(fingerprint.graphs) - 3} more" if len(fingerprint.graphs) > 3 else ""
    return (
        f"graphs {graphs}{more}, shapes {fingerprint.shapes[:8]}, {fingerprint.torch_version}, "
        f"{fingerprint.kernels} on {fingerprint.device}"
    )


_OF_TRACE: Mapping[str, Callable[[StepTrace], object]] = {
    "graphs": lambda trace: trace.fingerprint.graphs,
    "shapes": lambda trace: trace.fingerprint.shapes,
    "chunks of small tensors": lambda trace: trace.fingerprint.chunk_bytes,
    "state": lambda trace: trace.state_bytes,
    "sites": lambda trace: [
        (s.kind, s.graph, s.call, s.backward, s.tensor_id) for s in trace.sites
    ],
    "times": lambda trace: [site.duration_ns for site in trace.sites],
    "workspaces": lambda trace: [site.workspace_bytes for site in trace.sites],
    "tensors": lambda trace: trace.tensors,
    "updates": lambda trace: trace.updates,
}


def _measured(before: StepTrace, after: StepTrace) -> tuple[str, str]:
    """What of the steps that the plans were made for differs, in words."""
    if before == after:
        return "", ""
    differ = [name for name, of in _OF_TRACE.items() if of(before) != of(after)]
    return ", ".join(differ), "others"


def _numbers(plan: Plan) -> tuple[tuple[str, int], ...]:
    budgets, prediction = plan.budgets, plan.prediction
    moved = [
        (f"{tier} bytes {way}", by_tier.get(tier, 0))
        for tier in (Tier.HOST, Tier.STORAGE)
        for way, by_tier in (("out", prediction.out_bytes), ("back", prediction.back_bytes))
    ]
    return (
        ("device budget", budgets.device_bytes),
        ("host budget", budgets.host_bytes),
        ("storage budget", budgets.storage_bytes),
        ("step time", prediction.step_ns),
        ("ideal time", prediction.ideal_ns),
        ("device peak", prediction.device_peak_bytes),
        ("unlimited peak", prediction.unlimited_peak_bytes),
        ("host peak", prediction.host_peak_bytes),
        ("storage peak", prediction.storage_peak_bytes),
        *moved,
        ("waiting time", sum(prediction.stall_ns.values())),
    )


def _decisions(before: Plan, after: Plan) -> tuple[DecisionChange, ...]:
    old, new = _by_period(before), _by_period(after)
    groups: dict[tuple[str, str, str], list[Tensor]] = {}

    def add(what: str, tensor: Tensor) -> None:
        template = name_template(tensor.layer or tensor.name)
        node = node_label(tensor.name, tensor.layer) if tensor.layer else ""
        groups.setdefault((what, template, node), []).append(tensor)

    for key in [*old, *(key for key in new if key not in old)]:
        for one, other in zip_longest(old.get(key, ()), new.get(key, ())):
            what, there = _difference(one, other), other or one
            if what and there:
                add(what, there[0])
    for what, tensors in _moved_updates(before, after):
        template = name_template(tensors[0].layer or tensors[0].name)
        groups.setdefault((what, template, ""), []).extend(tensors)
    made, makes = _recomputed(before), _recomputed(after)
    for name, tensor in (made | makes).items():
        if name not in made or name not in makes:
            add("computed again" if name in makes else "no longer computed again", tensor)
    changes = [
        DecisionChange(what=what, tensors=tuple(tensors))
        for (what, _, _), tensors in groups.items()
    ]
    return tuple(sorted(changes, key=lambda change: -change.nbytes))


def _moved_updates(before: Plan, after: Plan) -> list[tuple[str, list[Tensor]]]:
    """Buckets that are updated elsewhere, or at other sites, with the parameters of each."""

    def hosted(plan: Plan) -> dict[str, tuple[HostUpdate, list[Tensor]]]:
        found: dict[str, tuple[HostUpdate, list[Tensor]]] = {}
        for choice in plan.host_updates:
            ids = plan.trace.updates[choice.update].parameters
            parameters = [plan.trace.tensors[i] for i in ids]
            found[parameters[0].name] = choice, parameters
        return found

    old, new = hosted(before), hosted(after)
    gone = [("update on the device", old[name][1]) for name in old if name not in new]
    come = [("update on the host", new[name][1]) for name in new if name not in old]
    moved = [
        ("update on the host, other sites", parameters)
        for name, (choice, parameters) in new.items()
        if name in old and _host_sites(old[name][0]) != _host_sites(choice)
    ]
    return gone + come + moved


def _host_sites(choice: HostUpdate) -> tuple[int, ...]:
    return choice.flush, choice.gone, choice.back, choice.needed


def _by_period(plan: Plan) -> dict[tuple[str, int], list[tuple[Tensor, Migration]]]:
    """Migrations by tensor name and number of the inactive period of that tensor.

    More than one in a period are in no plan that holds, but may be in a file.
    """
    found: dict[tuple[str, int], list[tuple[Tensor, Migration]]] = {}
    for migration in plan.migrations:
        tensor = plan.trace.tensors[migration.tensor_id]
        period = tensor.name, _period(plan.trace, migration)
        found.setdefault(period, []).append((tensor, migration))
    return found


def _recomputed(plan: Plan) -> dict[str, Tensor]:
    tensors = (plan.trace.tensors[choice.tensor_id] for choice in plan.recomputed)
    return {tensor.name: tensor for tensor in tensors}


def _period(trace: StepTrace, migration: Migration) -> int:
    windows = trace.tensors[migration.tensor_id].windows
    return sum(end <= migration.leave for _, end in windows)


def _difference(old: tuple[Tensor, Migration] | None, new: tuple[Tensor, Migration] | None) -> str:
    if old is None or new is None:
        added = new or old
        assert added is not None, "a change has a migration on one side"
        return f"{'added' if old is None else 'removed'} ({_place(added[1])})"
    before, after = old[1], new[1]
    if _place(before) != _place(after):
        return f"{_place(before)} → {_place(after)}"
    if before.host_bytes != after.host_bytes:
        return "split elsewhere"
    if before.clean != after.clean:
        return "no longer written" if after.clean else "written again"
    if _sites(before) != _sites(after):
        return "other sites"
    return ""


def _place(migration: Migration) -> str:
    return f"host + {migration.tier}" if migration.host_bytes else str(migration.tier)


def _sites(migration: Migration) -> tuple[int, int, int, int]:
    return migration.leave, migration.gone, migration.back, migration.needed


def changes_text(changes: PlanChanges, layers: Sequence[str]) -> str:
    """`changes` for people; `layers` are all layers, so that a fold can say which are meant."""
    if not changes.any:
        return "The plans are equal."
    blocks: list[list[str]] = []
    if changes.facts:
        rows = [("", "before", "after", "")]
        rows += [(c.name, c.before, c.after, c.difference) for c in changes.facts]
        blocks.append(aligned(rows, "<>><"))
    if changes.decisions:
        table = [("decision", "tensors", "", "bytes")]
        known = by_template(layers)
        table += [_decision_row(change, known) for change in changes.decisions]
        blocks.append(aligned(table, "<<>>"))
    else:
        blocks.append(["The decisions are equal."])
    return "\n\n".join("\n".join(block) for block in blocks)


def _decision_row(
    change: DecisionChange, layers: Mapping[str, Set[str]]
) -> tuple[str, str, str, str]:
    first = change.tensors[0]
    node = node_label(first.name, first.layer) if first.layer else ""
    folded = layer_fold((tensor.layer or tensor.name for tensor in change.tensors), layers)
    count = len(change.tensors)
    return (
        change.what,
        shorten(f"{folded[0].label} {node}".rstrip(), 56),
        f"{TIMES}{count}" if count > 1 else "",
        format_nbytes(change.nbytes),
    )


def all_layers(*plans: Plan) -> tuple[str, ...]:
    """Layers (names where there are none) of all tensors of `plans`."""
    return tuple(tensor.layer or tensor.name for plan in plans for tensor in plan.trace.tensors)


def changes_json(changes: PlanChanges) -> dict[str, object]:
    """`changes` as JSON values."""
    return {
        "equal": not changes.any,
        "facts": [asdict(change) for change in changes.facts],
        "decisions": [
            {
                "change": change.what,
                "tensors": [tensor.name for tensor in change.tensors],
                "nbytes": change.nbytes,
            }
            for change in changes.decisions
        ],
    }
