"""Step time over the device budget as a picture, one curve for each machine."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from matplotlib.figure import Figure

from teraplan.units import GIB

_ALIKE_FRACTION = 0.02
"""Of a step: what differs less at every budget lies on one another."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """Step times of one machine."""

    label: str
    points: tuple[tuple[int, int], ...]
    """Device budget in bytes and step in ns, by budget."""


def merged(curves: Sequence[Curve]) -> list[Curve]:
    """The curves, one in the place of those that would lie on one another, with all their names."""
    found: list[Curve] = []
    for curve in curves:
        for number, other in enumerate(found):
            if _look_alike(curve, other):
                found[number] = replace(other, label=f"{other.label}\n{curve.label}")
                break
        else:
            found.append(curve)
    return found


def _look_alike(one: Curve, other: Curve) -> bool:
    if [budget for budget, _ in one.points] != [budget for budget, _ in other.points]:
        return False
    steps = zip(one.points, other.points, strict=True)
    return all(abs(a - b) <= _ALIKE_FRACTION * b for (_, a), (_, b) in steps)


def save_sweep(curves: Sequence[Curve], ideal_ns: int, path: Path) -> None:
    """Writes the picture to `path` as PNG; curves that lie on one another are one."""
    figure = Figure(figsize=(8.0, 5.0), layout="constrained")
    axes = figure.subplots()
    for curve in merged(curves):
        budgets = [nbytes / GIB for nbytes, _ in curve.points]
        axes.plot(budgets, [ns / 1e9 for _, ns in curve.points], marker="o", label=curve.label)
    axes.axhline(ideal_ns / 1e9, color="grey", linestyle="--", label="unlimited memory")
    axes.set_title("Predicted step by device budget")
    axes.set_xlabel("device budget, GiB")
    axes.set_ylabel("step, s")
    axes.set_ylim(bottom=0)
    axes.legend(fontsize="small")
    figure.savefig(path, format="png", dpi=120)
