"""A plan on one screen, all of its decisions, or as JSON."""

from collections.abc import Sequence
from dataclasses import asdict

from teraplan.report.decisions import Decision, Row, decisions, fold
from teraplan.report.memory_chart import memory_chart
from teraplan.report.summary import covered, hosted_line, step_line, top_stalls
from teraplan.report.table import TIMES, aligned, shorten
from teraplan.units import format_bandwidth, format_nbytes, format_ns
from teraplan.values.hardware import Link, Tier
from teraplan.values.plan import Plan

_MAX_ROWS = 16
_KEPT = "stays"
_HOSTED = "host cores"
_RECOMPUTED = "recomputed"


def plan_screen(plan: Plan) -> str:
    """`plan` in at most 45 lines: budgets, peaks, time, memory over the step, folded decisions."""
    rows = fold(plan)
    shown = rows if len(rows) <= _MAX_ROWS else rows[: _MAX_ROWS - 1]
    text = _row_table(shown)
    if len(shown) < len(rows):
        rest = rows[len(shown) :]
        nbytes = sum(row.nbytes for row in rest)
        text.append(f"… {len(rest)} more rows, {format_nbytes(nbytes)}; --all shows every tensor")
    return "\n".join([*_head(plan), "", *text])


def plan_details(plan: Plan) -> str:
    """`plan` with every decision on a line of its own, nothing folded."""
    rows = [("tier", "tensor", "layer", "bytes", "wait", "leave", "gone", "back", "needed", "why")]
    for decision in decisions(plan):
        tensor, chosen = decision.tensor, decision.chosen
        rows.append(
            (
                _place(decision),
                tensor.name,
                tensor.layer,
                format_nbytes(tensor.nbytes),
                format_ns(decision.stall_ns) if decision.stall_ns else "",
                *_sites(decision),
                chosen.reason if chosen else "",
            )
        )
    return "\n".join([*_head(plan), "", *aligned(rows, "<<<>>>>>>")])


def _head(plan: Plan) -> list[str]:
    lines = [f"Plan: {covered(plan)}", "", *_tier_table(plan), "", f"Step   {step_line(plan)}"]
    stalls = top_stalls(plan)
    if stalls:
        lines.append(f"Waits  {', '.join(stalls)}")
    if plan.host_updates:
        lines.append(f"Update {hosted_line(plan)}")
    caption = "Memory on the device: █ with the plan, ░ without it, --- budget"
    return [*lines, "", caption, *memory_chart(plan)]


def _staging_row(staging_bytes: int) -> list[tuple[str, str, str, str]]:
    return [("of it for staging", "", format_nbytes(staging_bytes), "")] if staging_bytes else []


def _tier_table(plan: Plan) -> list[str]:
    budgets, prediction, hardware = plan.budgets, plan.prediction, plan.hardware
    rows = [
        ("", "device", "host", "storage"),
        ("budget", *_sizes(budgets.device_bytes, budgets.host_bytes, budgets.storage_bytes)),
        *_staging_row(hardware.staging_bytes),
        (
            "peak with the plan",
            *_sizes(
                prediction.device_peak_bytes,
                prediction.host_peak_bytes,
                prediction.storage_peak_bytes,
            ),
        ),
        ("peak without it", format_nbytes(prediction.unlimited_peak_bytes), "", ""),
        ("out each step", "", *_traffic(prediction.out_bytes)),
        ("back each step", "", *_traffic(prediction.back_bytes)),
        ("link out, back", "", speed_text(hardware.host_link), speed_text(hardware.storage_link)),
    ]
    if plan.storage_pace is not None:
        rows.append(("driven at most at", "", "", speed_text(plan.storage_pace)))
    return aligned(rows, "<>>>")


def _sizes(*sizes: int) -> tuple[str, ...]:
    return tuple(format_nbytes(size) for size in sizes)


def _traffic(by_tier: dict[Tier, int]) -> tuple[str, str]:
    host, storage = (format_nbytes(by_tier.get(tier, 0)) for tier in (Tier.HOST, Tier.STORAGE))
    return host, storage


def speed_text(link: Link | None) -> str:
    """Out of the device and back to it."""
    if link is None:
        return "none"
    return f"{format_bandwidth(link.out_bytes_per_s)}, {format_bandwidth(link.back_bytes_per_s)}"


def _place(decision: Decision) -> str:
    if decision.host_update:
        return _HOSTED
    if decision.recomputed:
        return _RECOMPUTED
    migration = decision.migration
    if not migration:
        return _KEPT
    return _tier(migration.tier, migration.host_bytes, migration.clean)


def _row_place(row: Row) -> str:
    if row.hosted:
        return _HOSTED
    if row.recomputed:
        return _RECOMPUTED
    return _tier(row.tier, row.host_bytes, row.clean)


def _sites(decision: Decision) -> tuple[str, str, str, str]:
    """Sites of leaving and coming back; of an update on the host, those of its bucket."""
    m, h = decision.migration, decision.host_update
    if m:
        return str(m.leave), str(m.gone), str(m.back), str(m.needed)
    return (str(h.flush), str(h.gone), str(h.back), str(h.needed)) if h else ("", "", "", "")


def _tier(tier: Tier | None, host_bytes: int, clean: bool) -> str:
    if tier is None:
        return _KEPT
    place = f"host {format_nbytes(host_bytes)} + {tier}" if host_bytes else str(tier)
    return f"{place} (clean)" if clean else place


def _row_table(rows: Sequence[Row]) -> list[str]:
    table = [("where", "what", "", "bytes", "wait", "when", "why")]
    table += [
        (
            _row_place(row),
            row_label(row),
            f"{TIMES}{row.num_tensors}" if row.num_tensors > 1 else "",
            format_nbytes(row.nbytes),
            format_ns(row.stall_ns) if row.stall_ns else "",
            row.when,
            shorten(row.reason, 64),
        )
        for row in rows
    ]
    return aligned(table, "<<>>>")


def row_label(row: Row) -> str:
    """Layer and role of the tensors of `row`."""
    return shorten(f"{row.layer} {row.node}".rstrip(), 44)


def plan_json(plan: Plan, *, everything: bool = False) -> dict[str, object]:
    """The facts of `plan_screen` as JSON values; `everything` adds each single decision."""
    prediction = asdict(plan.prediction)
    names = [tensor.name for tensor in plan.trace.tensors]
    prediction["stall_ns"] = {names[i]: ns for i, ns in sorted(plan.prediction.stall_ns.items())}
    facts: dict[str, object] = {
        "policy": plan.policy,
        "device": plan.hardware.device,
        "budgets": asdict(plan.budgets),
        "prediction": prediction,
        "num_tensors": len(names),
        "num_migrations": len(plan.migrations),
        "num_host_updates": len(plan.host_updates),
        "num_recomputed": len(plan.recomputed),
        "storage_pace": None if plan.storage_pace is None else asdict(plan.storage_pace),
        "rows": [asdict(row) for row in fold(plan)],
    }
    if everything:
        facts["migrations"] = [
            {"tensor": names[m.tensor_id], "layer": plan.trace.tensors[m.tensor_id].layer}
            | asdict(m)
            for m in plan.migrations
        ]
        facts["host_updates"] = [asdict(h) for h in plan.host_updates]
        facts["recomputed"] = [
            {"tensor": names[choice.tensor_id], "reason": choice.reason}
            for choice in plan.recomputed
        ]
    return facts
