"""Memory over the step as a small chart of block characters.

4.30 GiB │          ░░░░░░░
         │      ░░░░░░░░░░░░░░░░          ░ without the plan
3.50 GiB ┤---------------------------     - budget
         │ ▂▄██████████████████████▄     █ with the plan
         └forward─────────backward─────
"""

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate, pairwise

from teraplan.simulation.memory_curve import device_curve
from teraplan.simulation.placed_step import PlacedStep
from teraplan.units import format_nbytes
from teraplan.values.plan import Plan
from teraplan.values.step_trace import StepTrace

_EIGHTHS = "▁▂▃▄▅▆▇█"


def memory_chart(plan: Plan, width: int = 72, height: int = 8) -> list[str]:
    """Device memory with and without `plan` over the computation of the step, budget marked."""
    placed = PlacedStep.of(plan.step, plan.host_updates)
    with_plan: list[int] = placed.device(plan.migrations).tolist()
    without: list[int] = device_curve(plan.trace).tolist()
    intervals = sampled_intervals(plan.trace, width)
    if not intervals:
        return ["(the trace has no sites)"]
    top = max(*without, *with_plan, 1)
    columns = [
        (max(with_plan[low:high]) / top * height, max(without[low:high]) / top * height)
        for low, high in intervals
    ]
    budget = plan.budgets.device_bytes / top * height
    lines = [
        _chart_line(level, columns, budget, _axis_label(level, height, budget, top, plan))
        for level in reversed(range(height))
    ]
    axis = _phase_axis([plan.trace.sites[low].backward for low, _ in intervals])
    return [*lines, f"{'':>11} └{axis}"]


def sampled_intervals(trace: StepTrace, width: int) -> list[tuple[int, int]]:
    """The range of intervals that falls into each of `width` equal parts of the computation."""
    starts = [0, *accumulate(site.duration_ns for site in trace.sites)]
    total = starts.pop()
    if not starts:
        return []
    edges = [bisect_right(starts, total * column // width) - 1 for column in range(width)]
    edges.append(len(starts))
    return [(low, max(high, low + 1)) for low, high in pairwise(edges)]


def _axis_label(level: int, height: int, budget: float, top: int, plan: Plan) -> str:
    if level == int(budget) and budget < height:
        return f"{format_nbytes(plan.budgets.device_bytes):>11} ┤"
    return f"{format_nbytes(top):>11} ┤" if level == height - 1 else f"{'':>11} │"


def _chart_line(
    level: int, columns: Sequence[tuple[float, float]], budget: float, label: str
) -> str:
    empty = "-" if level == int(budget) else " "
    cells = [_cell(with_plan - level, without - level, empty) for with_plan, without in columns]
    return (label + "".join(cells)).rstrip()


def _cell(with_plan: float, without: float, empty: str) -> str:
    if with_plan >= 1:
        return "█"
    if with_plan >= 1 / 8:
        return _EIGHTHS[int(with_plan * 8) - 1]
    if empty == " " and without >= 0.5:
        return "░"
    return empty


def _phase_axis(backward: Sequence[bool]) -> str:
    parts: list[list[bool]] = []
    for phase in backward:
        if parts and parts[-1][0] == phase:
            parts[-1].append(phase)
        else:
            parts.append([phase])
    return "".join(_phase_word(part[0], len(part)) for part in parts)


def _phase_word(backward: bool, width: int) -> str:
    for word in ("backward", "bwd") if backward else ("forward", "fwd"):
        if len(word) < width:
            return word.ljust(width, "─")
    return "─" * width
