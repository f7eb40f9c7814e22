"""A tighter lower bound on the time of a step: a linear program over parts of the step.

    sites     0 . . . c0 . . . . . c1 . . . . c2 . . .      checkpoints: where pressure is highest
    parts     ...2 ]  [     0      ] [    1    ] [   2 ...   from one checkpoint to the next
    group g        [============ idle ===========]          may go out in parts 2, 0; back in 1, 2

Idle periods that cover the same checkpoints are one group. In part t, o[g, t] bytes of it go out
and i[g, t] come back; s[g, j] of its bytes are away at checkpoint j. With L[t] the time of a part:

    minimize    sum L
    such that   L[t] >= computation in part t
                s[g, j] <= bytes out before j,    s[g, j] <= bytes back after j
                sum over g of s[g, j] >= pressure at j
                bytes of each link and direction in part t <= what it carries in L[t]

What a link carries depends on what else is busy: a part's time is divided among all combinations of
busy links and directions, each with its speeds. A tensor that has not changed needs no second copy
out; each tier holds no more than there is room. Parts go round: the step is one of many. A link's
latency counts as bytes, those that it carries in that time at its slowest.

Every plan that repeats gives a solution, so the least sum bounds its step from below. What the
program does not know: whole tensors, queues, what happens between checkpoints.

For steps of few sites each site is a checkpoint, its interval and the two waits at the next site
are parts of their own, and tensors can be made to move whole, as a mixed-integer program: then only
the order within queues is missing.
"""

from collections import defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import final

import numpy as np
import numpy.typing as npt

from teraplan.bound import links_of, step_bound_ns
from teraplan.channels import slots_of, speeds
from teraplan.errors import ConfigError
from teraplan.hardware import Hardware, Tier
from teraplan.lifetimes import Floats, Ints, Lifetimes
from teraplan.memory_curve import Curve
from teraplan.run_record import Direction

CHECKPOINTS = 24
"""Checkpoints of a step of many sites."""
FEW_SITES = 40
"""Sites up to which each of them is a checkpoint, with parts of its own."""
_TOLERANCE = 1e-6
"""Of the solver, as a part of the step."""


def relaxed_bound_ns(
    periods: Lifetimes,
    hardware: Hardware,
    pressure: Curve,
    rooms: Mapping[Tier, int],
    *,
    checkpoints: int = CHECKPOINTS,
    whole: bool = False,
) -> int:
    """A time in ns that no valid plan can beat, step after step.

    Args:
        periods: what can be elsewhere.
        hardware: the machine.
        pressure: the bytes over the budget per interval.
        rooms: the most bytes in each other tier.
        checkpoints: of a step of many sites; more are tighter, and take longer.
        whole: whether tensors move whole, which only small steps allow in reasonable time.

    Raises:
        ConfigError: if scipy, which has the solver, is not installed.
    """
    ideal_ns = periods.trace.duration_ns
    if not pressure.any() or not links_of(hardware):
        return ideal_ns
    parts = _parts(periods, pressure, checkpoints)
    program = _Relaxation(parts, hardware, whole)
    for group in _groups(periods, parts.sites, apart=whole):
        program.add_group(group)
    program.limit(pressure, rooms)
    return max(step_bound_ns(periods, hardware, pressure, rooms), program.least_ns())


@dataclass(frozen=True, slots=True, kw_only=True)
class _Span:
    """The checkpoints first .. last that an idle period covers; `last` may be in the next step."""

    first: int
    last: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Group:
    """Bytes whose idle periods cover the same checkpoints, and that do not change between them."""

    nbytes: int
    spans: tuple[_Span, ...]
    largest: int
    """Bytes of its largest tensor."""
    constant: bool
    """Whether one copy lasts for all steps."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Parts:
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


def _parts(periods: Lifetimes, pressure: Curve, num_checkpoints: int) -> _Parts:
    num_sites = periods.num_sites
    at = periods.site_ns.astype(np.float64)
    if num_sites <= FEW_SITES:
        # interval j, then the wait for copies out at site j+1, then that for copies in
        least = np.zeros(3 * num_sites)
        least[::3] = np.diff(at[: num_sites + 1])
        fixed = np.zeros(3 * num_sites, dtype=bool)
        fixed[::3] = True
        return _Parts(
            least_ns=least,
            fixed=fixed,
            sites=np.arange(num_sites),
            per_checkpoint=3,
            out_before=-1,
            back_from=2,
        )
    cuts = _highest_in_each(periods, pressure, num_checkpoints)
    ends = np.concatenate([cuts[1:], cuts[:1] + num_sites])
    return _Parts(
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


def _groups(periods: Lifetimes, sites: Ints, *, apart: bool) -> list[_Group]:
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
    spans_of: dict[tuple[object, ...], tuple[tuple[_Span, ...], bool]] = {}
    for tensor_id, rows in rows_of.items():
        tensor = periods.trace.tensors[tensor_id]
        constant = tensor.persistent and not tensor.changes
        for run in _unchanged_runs(periods, tensor_id, rows):
            spans: list[_Span] = []
            for row in run:  # in order of time, also where the run goes round
                shift = count if spans and first[row] < spans[-1].first else 0
                spans.append(_Span(first=first[row] + shift, last=last[row] + shift))
            if any(span.first <= span.last for span in spans):
                key = (tuple(spans), constant, tensor_id if apart else -1)
                sizes[key].append(tensor.nbytes)
                spans_of[key] = (tuple(spans), constant)
    return [
        _Group(nbytes=sum(all_sizes), largest=max(all_sizes), spans=spans, constant=constant)
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


@final
class _Program:
    """Columns and rows of a program; mutable. Bytes are in MB, times in ms."""

    def __init__(self) -> None:
        self.lower: list[float] = []
        self.upper: list[float] = []
        self.whole: list[bool] = []
        self.most: list[float] = []
        self.entries: tuple[list[int], list[int], list[float]] = ([], [], [])

    def column(self, lower: float, upper: float, *, whole: bool = False) -> int:
        """Number of a new column."""
        self.lower.append(lower)
        self.upper.append(upper)
        self.whole.append(whole)
        return len(self.lower) - 1

    def at_most(self, terms: Iterable[tuple[int, float]], most: float) -> None:
        """The sum of columns times factors is at most `most`."""
        rows, columns, factors = self.entries
        for column, factor in terms:
            rows.append(len(self.most))
            columns.append(column)
            factors.append(factor)
        self.most.append(most)


@final
class _Relaxation:
    """The program of one step; mutable while it is written down."""

    def __init__(self, parts: _Parts, hardware: Hardware, whole: bool) -> None:
        self._parts = parts
        self._whole = whole
        self._links = links_of(hardware)
        self._table = speeds(self._links, hardware.device_port)
        self._program = _Program()
        self.num_parts = len(parts.least_ns)
        self.lengths = [
            self._program.column(ns * 1e-6, ns * 1e-6 if fixed else np.inf)
            for ns, fixed in zip(parts.least_ns.tolist(), parts.fixed.tolist(), strict=True)
        ]
        self._traffic: dict[tuple[int, int], list[int]] = defaultdict(list)
        """Columns of bytes by part and slot of a link."""
        self._away: dict[tuple[int, Tier], list[tuple[int, float]]] = defaultdict(list)
        """Columns and factors of bytes that are away, by checkpoint and tier."""

    def add_group(self, group: _Group) -> None:
        """What can move of the group, per tier."""
        size = group.nbytes * 1e-6
        here: dict[int, list[tuple[int, float]]] = defaultdict(list)
        for tier in self._links:
            out_factor, back_factor = self._with_latency(group, tier)
            outs = deque(self._copies(group.spans, tier, Direction.OUT))
            gone: list[tuple[int, float]] = []
            """What has gone out before the checkpoint at hand."""
            for span in group.spans:
                gone = self._more(gone, outs, None) if group.constant else gone
                backs = deque(reversed(self._copies((span,), tier, Direction.BACK)))
                away: dict[int, tuple[int, float]] = {}
                for checkpoint in range(span.first, span.last + 1):
                    away[checkpoint] = column, factor = self._away_column(size)
                    self._away[checkpoint % len(self._parts.sites), tier].append((column, factor))
                    here[checkpoint].append((column, factor))
                    before = self._part(checkpoint) + self._parts.out_before
                    gone = self._more(gone, outs, before)
                    self._program.at_most([(column, factor * out_factor), *gone], 0.0)
                back: list[tuple[int, float]] = []
                for checkpoint in range(span.last, span.first - 1, -1):
                    column, factor = away[checkpoint]
                    since = self._part(checkpoint) + self._parts.back_from
                    back = self._more(back, backs, since, later=True)
                    self._program.at_most([(column, factor * back_factor), *back], 0.0)
        if len(self._links) > 1:
            for terms in here.values():
                self._program.at_most(terms, size)

    def _more(
        self,
        total: list[tuple[int, float]],
        copies: deque[tuple[int, int]],
        until: int | None,
        *,
        later: bool = False,
    ) -> list[tuple[int, float]]:
        """A sum of copies, as a column, with those added that are in parts before `until`.

        With `later`, copies come from the end, and those in part `until` and later are added; with
        None, all are.
        """
        terms = [(column, factor) for column, factor in total]
        while copies:
            part = copies[0][0]
            if until is not None and (part < until if later else part >= until):
                break
            terms.append((copies.popleft()[1], -1.0))
        if len(terms) == len(total):
            return total
        column = self._program.column(0.0, np.inf)
        self._program.at_most([(column, 1.0), *terms], 0.0)
        return [(column, -1.0)]

    def _with_latency(self, group: _Group, tier: Tier) -> tuple[float, float]:
        """Bytes that a link has to carry, latency included, per byte out and back."""
        slots = slots_of(self._links)
        factors: list[float] = []
        for direction in (Direction.OUT, Direction.BACK):
            slot = slots[tier, direction]
            slowest = min(row[slot] for busy, row in enumerate(self._table) if busy >> slot & 1)
            factors.append(1.0 + self._links[tier].latency_ns * slowest / group.largest)
        return factors[0], factors[1]

    def _away_column(self, size: float) -> tuple[int, float]:
        if self._whole:
            return self._program.column(0.0, 1.0, whole=True), size
        return self._program.column(0.0, size), 1.0

    def _part(self, checkpoint: int) -> int:
        return checkpoint * self._parts.per_checkpoint

    def _copies(
        self, spans: Sequence[_Span], tier: Tier, direction: Direction
    ) -> list[tuple[int, int]]:
        """Parts in which copies can be on their way, and a new column for each."""
        parts, slot = self._parts, slots_of(self._links)[tier, direction]
        found: list[tuple[int, int]] = []
        for span in spans:
            if direction is Direction.OUT:
                # an idle period that ends between two checkpoints lasts into the next part
                rest = 1 if parts.per_checkpoint == 1 else 0
                first = self._part(span.first) + parts.out_before - 1
                last = self._part(span.last) + parts.out_before - 1 + rest
            else:
                first = self._part(span.first) + parts.back_from
                last = self._part(span.last) + parts.back_from
            for part in range(first, last + 1):
                column = self._program.column(0.0, np.inf)
                self._traffic[part % self.num_parts, slot].append(column)
                found.append((part, column))
        return found

    def limit(self, pressure: Curve, rooms: Mapping[Tier, int]) -> None:
        """Bytes that must be away, the most in each tier, and what links carry."""
        program = self._program
        for checkpoint, site in enumerate(self._parts.sites.tolist()):
            if not pressure[site]:
                continue
            away = [self._away[checkpoint, tier] for tier in self._links]
            terms = [(column, -factor) for columns in away for column, factor in columns]
            program.at_most(terms, -float(pressure[site]) * 1e-6)
            for tier, columns in zip(self._links, away, strict=True):
                program.at_most(columns, rooms[tier] * 1e-6)
        table = self._table
        for part, length in enumerate(self.lengths):
            states = [program.column(0.0, np.inf) for _ in table]
            program.at_most([(length, -1.0), *((state, 1.0) for state in states[1:])], 0.0)
            for slot in range(2 * len(self._links)):
                moved = [(column, 1.0) for column in self._traffic[part, slot]]
                carried = [
                    (state, -row[slot])
                    for busy, (state, row) in enumerate(zip(states, table, strict=True))
                    if busy >> slot & 1
                ]
                program.at_most([*moved, *carried], 0.0)

    def least_ns(self) -> int:
        """The least length of the step."""
        try:
            from scipy.optimize import LinearConstraint, milp
            from scipy.sparse import coo_array
        except ImportError as error:
            raise ConfigError("this bound needs scipy: pip install 'teraplan[bound]'") from error

        program = self._program
        cost = np.zeros(len(program.lower))
        cost[self.lengths] = 1.0
        rows, columns, factors = program.entries
        shape = (len(program.most), len(program.lower))
        solved = milp(
            cost,
            constraints=LinearConstraint(
                coo_array((factors, (rows, columns)), shape=shape).tocsc(),
                ub=np.array(program.most),
            ),
            bounds=(program.lower, program.upper),
            integrality=np.array(program.whole, dtype=int),
        )
        assert solved.status == 0, solved.message
        least_ms = solved.mip_dual_bound if any(program.whole) else solved.fun
        return int(least_ms * 1e6 * (1 - _TOLERANCE))
