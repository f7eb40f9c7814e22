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
from typing import final

import numpy as np

from teraplan.bounds.bound import links_of, step_bound_ns
from teraplan.bounds.checkpoints import Group, Parts, Span, groups_of, parts_of
from teraplan.errors import ConfigError
from teraplan.simulation.channels import slots_of, speeds
from teraplan.simulation.lifetimes import Lifetimes
from teraplan.simulation.memory_curve import Curve
from teraplan.values.hardware import Hardware, Tier
from teraplan.values.run_record import Direction

CHECKPOINTS = 20
"""Checkpoints of a step of many sites."""
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
    parts = parts_of(periods, pressure, checkpoints)
    program = _Relaxation(parts, hardware, whole)
    for group in groups_of(periods, parts.sites, apart=whole):
        program.add_group(group)
    program.limit(pressure, rooms)
    return max(step_bound_ns(periods, hardware, pressure, rooms), program.least_ns())


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

    def __init__(self, parts: Parts, hardware: Hardware, whole: bool) -> None:
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

    def add_group(self, group: Group) -> None:
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

    def _with_latency(self, group: Group, tier: Tier) -> tuple[float, float]:
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
        self, spans: Sequence[Span], tier: Tier, direction: Direction
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
            from scipy.optimize import milp
            from scipy.sparse import coo_array
        except ImportError as error:
            raise ConfigError("this bound needs scipy: pip install 'teraplan[bound]'") from error

        program = self._program
        cost = np.zeros(len(program.lower))
        cost[self.lengths] = 1.0
        rows, columns, factors = program.entries
        shape = (len(program.most), len(program.lower))
        matrix = coo_array((factors, (rows, columns)), shape=shape).tocsc()
        solved = milp(
            cost,
            constraints=(matrix, -np.inf, np.array(program.most)),
            bounds=(program.lower, program.upper),
            integrality=np.array(program.whole, dtype=int),
        )
        assert solved.status == 0, solved.message
        least_ms = solved.mip_dual_bound if any(program.whole) else solved.fun
        return int(least_ms * 1e6 * (1 - _TOLERANCE))
