"""A picture of one step: device memory over time, and under it what the links do.

Needs matplotlib (`teraplan[plot]`), as do the other `picture_*` modules and nothing else in
`teraplan.report`. Figures are made without pyplot: there is no global state, and no display is
needed.
"""

from pathlib import Path

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from teraplan.report.drawing import Drawing
from teraplan.report.palette import BACKWARD_SHADE, INK, MUTED
from teraplan.report.picture_links import draw_links, link_rows
from teraplan.report.picture_memory import draw_memory
from teraplan.report.summary import covered, step_line
from teraplan.units import format_nbytes, format_ns
from teraplan.values.plan import Plan

_DPI = 200
_METADATA: dict[str, dict[str, str | None]] = {
    "png": {"Software": None},
    "svg": {"Date": None},
    "pdf": {"CreationDate": None},
}
# Inches; the height of the links follows from the number of their rows.
_WIDTH, _MEMORY, _GAP, _TITLE, _BOTTOM, _ROW = 11.0, 3.5, 0.2, 0.95, 0.55, 0.27
_RIGHT_EDGE = 0.82


def save_picture(
    plan: Plan, planned: Drawing, actual: Drawing | None, path: Path, file_format: str
) -> None:
    """Draws the step and writes it to `path` as "png", "svg" or "pdf"."""
    with mpl.rc_context(
        {
            "font.size": 9,
            "axes.edgecolor": "#9a9a9a",
            "axes.linewidth": 0.7,
            "axes.labelcolor": INK,
            "text.color": INK,
            "xtick.color": "#9a9a9a",
            "ytick.color": "#9a9a9a",
            "xtick.labelcolor": INK,
            "ytick.labelcolor": INK,
            "svg.fonttype": "none",
            "svg.hashsalt": "teraplan",
            "pdf.fonttype": 42,
        }
    ):
        figure = step_figure(plan, planned, actual)
        figure.savefig(
            path, format=file_format, dpi=_DPI, bbox_inches="tight", metadata=_METADATA[file_format]
        )


def step_figure(plan: Plan, planned: Drawing, actual: Drawing | None) -> Figure:
    """The figure: memory above, links below, one time axis."""
    rows = link_rows([planned] if actual is None else [planned, actual])
    links_inches = _ROW * (rows[-1].bottom + rows[-1].height + 0.4)
    left = 0.105 if actual is None else 0.15
    span = _RIGHT_EDGE - left
    height = _TITLE + _MEMORY + _GAP + links_inches + _BOTTOM
    figure = Figure(figsize=(_WIDTH, height))
    FigureCanvasAgg(figure)
    links = figure.add_axes((left, _BOTTOM / height, span, links_inches / height))
    bottom = (_BOTTOM + links_inches + _GAP) / height
    memory = figure.add_axes((left, bottom, span, _MEMORY / height), sharex=links)
    longest_ns = max(planned.duration_ns, actual.duration_ns if actual else 0, 1)
    links.set_xlim(0, longest_ns / 1e9)
    draw_memory(memory, plan, planned, actual)
    draw_links(links, rows, longest_ns)
    for axes in (memory, links):
        _shade_backward(axes, planned)
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(length=2.5, width=0.6)
    memory.tick_params(labelbottom=False)
    links.tick_params(axis="y", length=0)
    links.set_xlabel("time in the step (s)")
    _label_phases(memory, planned, longest_ns)
    _write_title(figure, plan, actual, left, height)
    return figure


def _write_title(
    figure: Figure, plan: Plan, actual: Drawing | None, left: float, height: float
) -> None:
    prediction = plan.prediction
    title = (
        f"Peak device memory {format_nbytes(prediction.unlimited_peak_bytes)} → "
        f"{format_nbytes(prediction.device_peak_bytes)}, "
        f"budget {format_nbytes(plan.budgets.device_bytes)}"
    )
    step = f"Step: {step_line(plan)}"
    if actual is not None:
        step += f"; {actual.name} took {format_ns(actual.duration_ns)}"
    sentence = covered(plan)
    figure.text(left, 1 - 0.26 / height, title, fontsize=13, fontweight="bold", va="center")
    for line, text in enumerate((step, sentence[0].upper() + sentence[1:])):
        y = 1 - (0.51 + 0.185 * line) / height
        figure.text(left, y, text, color=MUTED, va="center")


def _phases(drawing: Drawing) -> list[tuple[bool, int, int]]:
    """Stretches of the step in one phase, as (backward, start_ns, end_ns)."""
    found: list[tuple[bool, int, int]] = []
    for call in drawing.calls:
        if found and found[-1][0] == call.backward:
            found[-1] = (call.backward, found[-1][1], call.end_ns)
        else:
            found.append((call.backward, call.start_ns, call.end_ns))
    return found


def _shade_backward(axes: Axes, drawing: Drawing) -> None:
    for backward, start_ns, end_ns in _phases(drawing):
        if backward:
            axes.axvspan(start_ns / 1e9, end_ns / 1e9, color=BACKWARD_SHADE, lw=0, zorder=0)


def _label_phases(axes: Axes, drawing: Drawing, longest_ns: int) -> None:
    for backward, start_ns, end_ns in _phases(drawing):
        if end_ns - start_ns > longest_ns / 12:
            axes.annotate(
                "backward" if backward else "forward",
                (start_ns / 1e9, 1),
                xycoords=("data", "axes fraction"),
                xytext=(4, -3),
                textcoords="offset points",
                va="top",
                color=MUTED,
                fontsize=8.5,
            )
