"""The lower part of a picture: one row per link and direction, with its transfers as bars.

computation   [fwd][fwd][fwd]|[bwd ]| [bwd ]      waits in red
host out        [==][==]
host back                      [==]  [==]
storage out        [=====][=====]        planned
                    [====][======]       actual, if there is a run
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes

from teraplan.report.chrome_trace import lanes
from teraplan.report.drawing import Drawing
from teraplan.report.palette import BACK, BACKWARD_WORK, FORWARD_WORK, MUTED, OUT, WAIT
from teraplan.units import format_bandwidth, format_nbytes, format_ns
from teraplan.values.hardware import Tier
from teraplan.values.run_record import Direction, TransferRecord

_LEAST_BAR = 1 / 900
"""Of the axis: what is shorter is drawn as long as this, or it could not be seen."""
_WIDENED_UP_TO = 120
"""Bars of a colour; more of them, all widened, would claim time that they did not take."""
_EDGES_UP_TO = 120
"""Bars in a row; white edges between more of them would leave little of the bars."""
_LINKS = tuple((tier, way) for tier in (Tier.HOST, Tier.STORAGE) for way in Direction)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """A stretch of time in one colour; `lane` counts from 0 where bars overlap."""

    start_ns: int
    end_ns: int
    colour: str
    lane: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkRow:
    """One row; `bottom` counts in rows from the top of the axes."""

    name: str
    note: str
    """In the right margin: what went over it."""
    bars: tuple[Bar, ...]
    num_lanes: int
    bottom: float
    height: float


def link_rows(drawings: Sequence[Drawing]) -> list[LinkRow]:
    """Rows of the computation and of each link that has transfers, planned above actual."""
    contents: list[tuple[str, str, list[Bar], int, bool]] = []
    suffix = ", planned" if len(drawings) > 1 else ""
    for place, drawing in enumerate(drawings):
        name = "actual" if place else f"computation{suffix}"
        contents.append((name, *_computation(drawing), place == 0))
    links = [_links(drawing) for drawing in drawings]
    for tier, direction in _LINKS:
        if not any((tier, direction) in found for found in links):
            continue
        for place, found in enumerate(links):
            name = "actual" if place else f"{tier} {direction}{suffix}"
            contents.append((name, *_transfers(found.get((tier, direction), [])), place == 0))
    rows: list[LinkRow] = []
    bottom = 0.0
    for name, note, bars, num_lanes, first in contents:
        bottom += 0.45 if first and rows else 0.12
        height = min(max(1.0, 0.42 * num_lanes), 3.0)
        rows.append(
            LinkRow(
                name=name,
                note=note,
                bars=tuple(bars),
                num_lanes=num_lanes,
                bottom=bottom,
                height=height,
            )
        )
        bottom += height
    return rows


def _links(drawing: Drawing) -> dict[tuple[Tier, Direction], list[TransferRecord]]:
    """Transfers by tier and direction, all stores of a tier together."""
    found: dict[tuple[Tier, Direction], list[TransferRecord]] = {}
    for transfer in drawing.transfers:
        found.setdefault((transfer.tier, transfer.direction), []).append(transfer)
    return found


def _computation(drawing: Drawing) -> tuple[str, list[Bar], int]:
    bars = [
        Bar(
            start_ns=call.start_ns,
            end_ns=call.end_ns,
            colour=BACKWARD_WORK if call.backward else FORWARD_WORK,
        )
        for call in drawing.calls
    ]
    bars += [
        Bar(start_ns=stall.start_ns, end_ns=stall.start_ns + stall.duration_ns, colour=WAIT)
        for stall in drawing.stalls
    ]
    waiting_ns = sum(stall.duration_ns for stall in drawing.stalls)
    return f"waits {format_ns(waiting_ns)}" if waiting_ns else "no waits", bars, 1


def _transfers(transfers: Sequence[TransferRecord]) -> tuple[str, list[Bar], int]:
    in_lanes = lanes(transfers)
    bars = [
        Bar(
            start_ns=transfer.start_ns,
            end_ns=transfer.end_ns,
            colour=OUT if transfer.direction is Direction.OUT else BACK,
            lane=number,
        )
        for number, lane in enumerate(in_lanes)
        for transfer in lane
    ]
    nbytes = sum(transfer.nbytes for transfer in transfers)
    busy_ns = _union_ns(transfers)
    speed = f" at {format_bandwidth(nbytes * 10**9 // busy_ns)}" if busy_ns else ""
    return f"{format_nbytes(nbytes)}{speed}", bars, max(len(in_lanes), 1)


def _union_ns(transfers: Sequence[TransferRecord]) -> int:
    """Time in which at least one of `transfers` runs."""
    total_ns = end_ns = 0
    for transfer in sorted(transfers, key=lambda transfer: transfer.start_ns):
        total_ns += max(transfer.end_ns - max(transfer.start_ns, end_ns), 0)
        end_ns = max(end_ns, transfer.end_ns)
    return total_ns


def draw_links(axes: Axes, rows: Sequence[LinkRow], longest_ns: int) -> None:
    """Draws `rows`, first row on top, with their names left and what went over them right."""
    axes.set_ylim(rows[-1].bottom + rows[-1].height + 0.4, 0)
    axes.set_yticks([row.bottom + row.height / 2 for row in rows], [row.name for row in rows])
    for row in rows:
        _draw_row(axes, row, longest_ns)
        axes.text(
            1.027,
            row.bottom + row.height / 2,
            row.note,
            transform=axes.get_yaxis_transform(),
            va="center",
            color=WAIT if row.note.startswith("waits") else MUTED,
        )


def _draw_row(axes: Axes, row: LinkRow, longest_ns: int) -> None:
    lane_height = row.height / row.num_lanes
    groups: dict[tuple[int, str], list[tuple[float, float]]] = {}
    num_bars = Counter(bar.colour for bar in row.bars)
    for bar in row.bars:
        few = num_bars[bar.colour] <= _WIDENED_UP_TO
        width_ns = max(bar.end_ns - bar.start_ns, longest_ns * _LEAST_BAR if few else 0)
        span = (bar.start_ns / 1e9, width_ns / 1e9)
        groups.setdefault((bar.lane, bar.colour), []).append(span)
    edge = 0.6 if len(row.bars) <= _EDGES_UP_TO else 0.0
    for (lane, colour), spans in groups.items():
        axes.broken_barh(
            spans,
            (row.bottom + lane * lane_height, lane_height),
            facecolors=colour,
            edgecolors="white",
            linewidth=0 if colour == WAIT else edge,
            zorder=4 if colour == WAIT else 3,
        )
