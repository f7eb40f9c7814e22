"""What the independent checker says of a plan, in words."""

from collections.abc import Sequence

from teraplan.checker.violations import Violation
from teraplan.report.summary import tensor_label
from teraplan.report.table import aligned
from teraplan.units import format_nbytes
from teraplan.values.plan import Plan
from teraplan.values.step_trace import StepTrace


def valid_text(plan: Plan, outdated: Sequence[str] = ()) -> str:
    """That `plan` holds, and the peak of each tier beside its budget.

    `outdated`: what its file predicts, and is not so any more.
    """
    budgets, peaks = plan.budgets, plan.prediction
    rows = [
        (
            f"  {tier}",
            format_nbytes(peak),
            f"of {format_nbytes(budget)}",
            f"{100 * peak / budget:.1f} %" if budget else "",
        )
        for tier, peak, budget in (
            ("device", peaks.device_peak_bytes, budgets.device_bytes),
            ("host", peaks.host_peak_bytes, budgets.host_bytes),
            ("storage", peaks.storage_peak_bytes, budgets.storage_bytes),
        )
    ]
    count = len(plan.migrations)
    head = f"The plan holds: {count} migrations over {len(plan.trace.sites)} sites. Verified peaks:"
    lines = [head, *aligned(rows, "<>><")]
    if outdated:
        lines.append("The file was edited, and its prediction is of the plan before:")
        lines += [f"  {message}" for message in outdated]
    return "\n".join(lines)


def violations_text(plan: Plan, violations: Sequence[Violation]) -> str:
    """Each of `violations` with the tensor and the site that it is about."""
    noun = "rule" if len(violations) == 1 else "rules"
    lines = [f"The plan does not hold, it breaks {len(violations)} {noun}:"]
    for violation in violations:
        lines.append(f"  {violation.kind}: {violation.message}")
        places = _places(plan, violation)
        if places:
            lines.append(f"      {places}")
    return "\n".join(lines)


def _places(plan: Plan, violation: Violation) -> str:
    words: list[str] = []
    if violation.migration is not None:
        migration = plan.migrations[violation.migration]
        tensors = plan.trace.tensors
        if 0 <= migration.tensor_id < len(tensors):
            words.append(tensor_label(tensors[migration.tensor_id]))
        words += [
            f"{name} at {site_name(plan.trace, site)}"
            for name, site in (("leaves", migration.leave), ("is needed", migration.needed))
        ]
    if violation.site is not None:
        words.append(site_name(plan.trace, violation.site))
    return ", ".join(words)


def site_name(trace: StepTrace, site: int) -> str:
    """ "site 26 (save g0.c8/gelu_1, forward)"."""
    if not trace.sites or site < 0:
        return f"site {site}"
    entry = trace.sites[site % len(trace.sites)]
    valid = entry.tensor_id is not None and 0 <= entry.tensor_id < len(trace.tensors)
    name = trace.tensors[entry.tensor_id].name if valid and entry.tensor_id is not None else ""
    what = f"{entry.kind} {name}" if name else f"{entry.kind} {entry.graph} call {entry.call}"
    later = " of the next step" if site >= len(trace.sites) else ""
    return f"site {site} ({what}, {'backward' if entry.backward else 'forward'}{later})"
