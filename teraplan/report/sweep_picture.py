"""Step time over the device budget as a picture, one curve for each machine."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from matplotlib.figure import Figure

from teraplan.units import GIB


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """Step times of one machine."""

    label: str
    points: tuple[tuple[int, int], ...]
    """Device budget in bytes and step in ns, by budget."""


def save_sweep(curves: Sequence[Curve], ideal_ns: int, path: Path) -> None:
    """Writes the picture to `path` as PNG."""
    figure = Figure(figsize=(8.0, 5.0), layout="constrained")
    axes = figure.subplots()
    for curve in curves:
        budgets = [nbytes / GIB for nbytes, _ in curve.points]
        axes.plot(budgets, [ns / 1e9 for _, ns in curve.points], marker="o", label=curve.label)
    axes.axhline(ideal_ns / 1e9, color="grey", linestyle="--", label="unlimited memory")
    axes.set_xlabel("device budget, GiB")
    axes.set_ylabel("step, s")
    axes.set_ylim(bottom=0)
    axes.legend(fontsize="small")
    figure.savefig(path, format="png", dpi=120)
