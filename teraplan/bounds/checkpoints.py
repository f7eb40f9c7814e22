"""A step cut at checkpoints, and its idle periods as groups that cover the same ones.

    sites     0 . . . c0 . . . . . c1 . . . . c2 . . .      checkpoints: where pressure is highest
    parts     ...2 ]  [     0      ] [    1    ] [   2 ...   from one checkpoint to the next
    group     [============ idle ===========]                covers checkpoints 0 and 1

Numbers of checkpoints and parts go on in the next step: c0 again is checkpoint 3 of three.
"""

from collections import defaultdict
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from teraplan.simulation.lifetimes import Floats, Ints, Lifetimes
from teraplan.simulation.memory_curve import Curve

FEW_SITES = 40
"""Sites up to which each of them is a checkpoint, with parts of its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """The checkpoints first .. last that an idle period covers; `last` may be in the next step."""

    first: int
    last: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Bytes whose idle periods cover the same checkpoints, and that do not change between them."""

    nbytes: int
    spans: tuple[Span, ...]
    largest: int
    """Bytes of its largest tensor."""
    constant: bool
    """Whether one copy lasts for all steps."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Parts:
    """How the step is cut."""

    least_ns: Floats
    """Computation in each part."""
    fixed: npt.NDArray[np.bool_]
    """Parts in which nothing can wait."""
    sites: Ints
    """Site of each checkpoint."""
    per_checkpoint: int
    """Parts from one checkpoint to the next."""
    out_before: int
    """Copies out count for checkpoint j if they are in a part before per_checkpoint * j + this."""
    back_from: int
    """Bytes away at checkpoint j come back in part per_checkpoint * j + this or later."""


def parts_of(periods: Lifetimes, pressure: Curve, num_checkpoints: int) -> Parts:
    """The step cut at about so many checkpoints; at every site if it has few.

    `pressure` is the bytes over the budget per interval.
    """
    num_sites = periods.num_sites
    at = periods.site_ns.astype(np.float64)
    if num_sites <= FEW_SITES:
        # interval j, then the wait for copies out at site j+1, then that for copies in
        least = np.zeros(3 * num_sites)
        least[::3] = np.diff(at[: num_sites + 1])
        fixed = np.zeros(3 * num_sites, dtype=bool)
        fixed[::3] = True
        return Parts(
            least_ns=least,
            fixed=fixed,
            sites=np.arange(num_sites),
            per_checkpoint=3,
            out_before=-1,
            back_from=2,
        )
    cuts = _highest_in_each(periods, pressure, num_checkpoints)
    ends = np.concatenate([cuts[1:], cuts[:1] + num_sites])
    return Parts(
        least_ns=at[ends] - at[cuts],
        fixed=np.zeros(len(cuts), dtype=bool),
        sites=cuts,
        per_checkpoint=1,
        out_before=0,
        back_from=0,
    )


def _highest_in_each(periods: Lifetimes, pressure: Curve, count: int) -> Ints:
    """The site of the highest pressure in each of `count` stretches of the step.

    Stretches have about equal parts of the time, and of the bytes that start or end being idle.
    """
    num_sites = periods.num_sites
    weight = np.diff(periods.site_ns[: num_sites + 1]) / max(periods.site_ns[num_sites], 1)
    for column in (periods.start, periods.end):
        moved = np.bincount(column % num_sites, weights=periods.nbytes, minlength=num_sites)
        weight = weight + moved / max(float(moved.sum()), 1.0)
    total = np.cumsum(weight)
    inner = np.searchsorted(total, np.arange(1, count) * (total[-1] / count))
    edges = np.unique(np.concatenate([[0], inner, [num_sites]]))
    return np.array(
        [a + int(pressure[a:b].argmax()) for a, b in pairwise(edges.tolist())],
        dtype=np.int64,
    )


def groups_of(periods: Lifetimes, sites: Ints, *, apart: bool) -> list[Group]:
    """Periods of one tensor between two of its changes, joined with all that look the same.

    Args:
        periods: of the step.
        sites: of the checkpoints.
        apart: keep tensors apart that look the same.
    """
    count = len(sites)
    doubled = np.concatenate([sites, sites + periods.num_sites])
    first = np.searchsorted(doubled, periods.start).tolist()
    last = (np.searchsorted(doubled, periods.end) - 1).tolist()
    rows_of: dict[int, list[int]] = defaultdict(list)
    for row, tensor_id in enumerate(periods.tensor_ids.tolist()):
        rows_of[tensor_id].append(row)
    sizes: dict[tuple[object, ...], list[int]] = defaultdict(list)
    spans_of: dict[tuple[object, ...], tuple[tuple[Span, ...], bool]] = {}
    for tensor_id, rows in rows_of.items():
        tensor = periods.trace.tensors[tensor_id]
        constant = tensor.persistent and not tensor.changes
        for run in _unchanged_runs(periods, tensor_id, rows):
            spans: list[Span] = []
            for row in run:  # in order of time, also where the run goes round
                shift = count if spans and first[row] < spans[-1].first else 0
                spans.append(Span(first=first[row] + shift, last=last[row] + shift))
            if any(span.first <= span.last for span in spans):
                key = (tuple(spans), constant, tensor_id if apart else -1)
                sizes[key].append(tensor.nbytes)
                spans_of[key] = (tuple(spans), constant)
    return [
        Group(nbytes=sum(all_sizes), largest=max(all_sizes), spans=spans, constant=constant)
        for key, all_sizes in sizes.items()
        for spans, constant in (spans_of[key],)
    ]


def _unchanged_runs(periods: Lifetimes, tensor_id: int, rows: list[int]) -> list[list[int]]:
    """Idle periods of a tensor, ascending, in runs with no change between."""
    tensor, num_sites = periods.trace.tensors[tensor_id], periods.num_sites
    changes = [tensor.windows[number] for number in tensor.changes]

    def changed(before: int, after: int) -> bool:
        since, until = int(periods.end[before]), int(periods.start[after])
        if since > until:
            until += num_sites
        return any(
            since <= start + shift and end + shift <= until
            for start, end in changes
            for shift in (0, num_sites)
        )

    runs = [[rows[0]]]
    for row in rows[1:]:
        if changed(runs[-1][-1], row):
            runs.append([row])
        else:
            runs[-1].append(row)
    if tensor.persistent and len(runs) > 1 and not changed(rows[-1], rows[0]):
        runs[0] = runs.pop() + runs[0]
    return runs
