"""What a machine has and how fast its links are, as tables."""

from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Protocol

from teraplan.report.table import aligned
from teraplan.units import format_bandwidth, format_ns, format_speed_beside
from teraplan.values.hardware import Link

_MARKS = {"ok": "✓", "note": "·", "warning": "!"}


class MachineFact(Protocol):
    """One thing that was found out about the machine (`teraplan.runtime.machine_facts`)."""

    @property
    def name(self) -> str: ...  # noqa: D102  what it is about

    @property
    def value(self) -> str: ...  # noqa: D102  what was found

    @property
    def status(self) -> str: ...  # noqa: D102  "ok", "note" or "warning"

    @property
    def advice(self) -> str: ...  # noqa: D102  what to do about it, "" if nothing


def facts_text(facts: Sequence[MachineFact]) -> str:
    """One line per fact with its mark, advice indented under it, and the number of warnings."""
    rows = [(_MARKS.get(fact.status, "?"), fact.name, fact.value) for fact in facts]
    lines: list[str] = []
    indent = " " * (max((len(name) for _, name, _ in rows), default=0) + 5)
    for fact, line in zip(facts, aligned(rows), strict=True):
        lines.append(line)
        lines += [f"{indent}→ {advice}" for advice in fact.advice.splitlines()]
    return "\n".join([*lines, "", _verdict(facts)])


def _verdict(facts: Sequence[MachineFact]) -> str:
    warnings = num_warnings(facts)
    if not warnings:
        return "No warnings."
    return f"{warnings} {'warning' if warnings == 1 else 'warnings'} (marked !)."


def num_warnings(facts: Iterable[MachineFact]) -> int:
    """How many of `facts` are warnings."""
    return sum(fact.status == "warning" for fact in facts)


def facts_json(facts: Sequence[MachineFact]) -> dict[str, object]:
    """`facts` as JSON values."""
    return {
        "facts": [
            {
                "name": fact.name,
                "value": fact.value,
                "status": str(fact.status),
                "advice": fact.advice,
            }
            for fact in facts
        ],
        "num_warnings": num_warnings(facts),
    }


def links_text(links: Sequence[tuple[str, Link]]) -> str:
    """Speeds of each link alone and in both directions at once; `out` leaves the device."""
    rows = [("link", "out", "back", "out, both at once", "back, both at once", "latency")]
    for name, link in links:
        cells = (
            format_bandwidth(link.out_bytes_per_s),
            format_bandwidth(link.back_bytes_per_s),
            format_speed_beside(link.out_while_back_bytes_per_s, "reads"),
            format_speed_beside(link.back_while_out_bytes_per_s, "writes"),
            format_ns(link.latency_ns),
        )
        rows.append((name, *cells))
    return "\n".join(aligned(rows, "<>>>>>"))


def links_json(links: Sequence[tuple[str, Link]]) -> dict[str, object]:
    """`links` as JSON values by name."""
    return {name: asdict(link) for name, link in links}
