"""The upper part of a picture: device memory over time, with and without the plan."""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes

from teraplan.report.drawing import Drawing
from teraplan.report.palette import INK, PLAN, WAIT, WITHOUT
from teraplan.units import GIB, MIB, format_nbytes
from teraplan.values.plan import Plan

_LEAST_GAP = 0.062
"""Between two labels of the right margin, as a part of the height."""


_STALLS_UP_TO = 40
"""More of them are left to the row of the computation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Label:
    """A line of text in the right margin, at the height of what it names."""

    nbytes: int
    text: str
    colour: str
    bold: bool


def draw_memory(axes: Axes, plan: Plan, planned: Drawing, actual: Drawing | None) -> None:
    """Curves of `planned` and `actual`, the budget, and labels at the heights of the peaks."""
    budget_bytes = plan.budgets.device_bytes
    curves = [planned.unlimited_bytes, planned.device_bytes]
    if actual is not None:
        curves.append(actual.device_bytes)
    highest = max(max(curve, default=0) for curve in curves)
    # A budget far above the peak would squeeze the curves: it is then only named.
    budget_shown = budget_bytes <= 1.6 * highest
    top = max(highest, budget_bytes if budget_shown else 0, 1)
    unit, unit_name = (GIB, "GiB") if top >= GIB else (MIB, "MiB")
    _draw_curves(axes, planned, actual, unit)
    labels = [
        _Label(
            nbytes=max(planned.unlimited_bytes, default=0),
            text="without the plan",
            colour="#707070",
            bold=False,
        ),
        _Label(
            nbytes=max(planned.device_bytes, default=0),
            text="with the plan",
            colour=PLAN,
            bold=True,
        ),
    ]
    if actual is not None:
        peak = max(actual.device_bytes, default=0)
        labels.append(_Label(nbytes=peak, text=actual.name, colour=INK, bold=False))
    if budget_shown:
        axes.axhline(budget_bytes / unit, color=INK, lw=0.9, ls=(0, (6, 3)), zorder=4)
        labels.append(_Label(nbytes=budget_bytes, text="budget", colour=INK, bold=True))
    axes.set_ylim(0, 1.1 * top / unit)
    axes.set_ylabel(f"device memory ({unit_name})")
    _label_margin(axes, labels, 1.1 * top)


def _steps(drawing: Drawing, curve: Sequence[int], unit: int) -> tuple[list[float], list[float]]:
    """Times and values for `step="post"`, the last value held to the end of the step."""
    times = [start_ns / 1e9 for start_ns in drawing.site_start_ns]
    values = [nbytes / unit for nbytes in curve]
    return [*times, drawing.duration_ns / 1e9], [*values, *values[-1:]]


def _draw_curves(axes: Axes, planned: Drawing, actual: Drawing | None, unit: int) -> None:
    if not planned.site_start_ns:
        return
    times, without = _steps(planned, planned.unlimited_bytes, unit)
    _, with_plan = _steps(planned, planned.device_bytes, unit)
    _, fixed = _steps(planned, planned.fixed_bytes, unit)
    axes.fill_between(times, with_plan, without, step="post", color=WITHOUT, alpha=0.18, lw=0)
    axes.step(times, without, where="post", color=WITHOUT, lw=1.0)
    axes.fill_between(times, fixed, with_plan, step="post", color=PLAN, alpha=0.28, lw=0)
    axes.fill_between(times, 0, fixed, step="post", color=PLAN, alpha=0.50, lw=0)
    axes.step(times, with_plan, where="post", color=PLAN, lw=1.5)
    if actual is not None:
        axes.step(*_steps(actual, actual.device_bytes, unit), where="post", color=INK, lw=0.9)
    _mark_stalls(axes, actual or planned)
    _label_areas(axes, planned, unit)


def _mark_stalls(axes: Axes, drawing: Drawing) -> None:
    if len(drawing.stalls) <= _STALLS_UP_TO:
        for stall in drawing.stalls:
            start, end = stall.start_ns / 1e9, (stall.start_ns + stall.duration_ns) / 1e9
            axes.axvspan(start, end, color=WAIT, alpha=0.14, lw=0, zorder=1.5)


def _label_areas(axes: Axes, planned: Drawing, unit: int) -> None:
    """Names the two areas under the plan's curve where they are high enough."""
    highest = max(planned.unlimited_bytes)
    fixed = min(planned.fixed_bytes)
    x_ns = planned.duration_ns * 3 // 4
    place = bisect_right(planned.site_start_ns, x_ns) - 1
    managed = planned.managed_bytes[place]
    for low, high, text in (
        (0, fixed, "state and workspace"),
        (planned.fixed_bytes[place], planned.fixed_bytes[place] + managed, "managed tensors"),
    ):
        if high - low > 0.07 * highest:
            y = (low + high) / 2 / unit
            axes.text(x_ns / 1e9, y, text, ha="center", va="center", color="#0b3a5a", fontsize=8.5)


def _label_margin(axes: Axes, labels: Sequence[_Label], top: float) -> None:
    """Writes `labels` beside the axes, lowest first, each at least a line above the one before."""
    y = -1.0
    for label in sorted(labels, key=lambda label: label.nbytes):
        y = max(label.nbytes / top, y + _LEAST_GAP)
        axes.plot(
            (1.0, 1.012, 1.022),
            (label.nbytes / top, label.nbytes / top, y),
            transform=axes.transAxes,
            color=label.colour,
            lw=0.8,
            clip_on=False,
        )
        axes.text(
            1.027,
            y,
            f"{format_nbytes(label.nbytes)} {label.text}",
            transform=axes.transAxes,
            va="center",
            color=label.colour,
            fontweight="bold" if label.bold else "normal",
        )
