"""The baseline: TERAIO's Algorithm 1 (arXiv 2506.06472, section 3.2) in terms of our migrations.

    while max(M') > capacity:
        of each idle period: earliest end of a copy out, latest start of a copy in, by the bandwidth
        that is free; best score = benefit / cost of those whose copy out ends before the copy in
        plan it: storage first, host memory where storage does not admit it; book the bandwidth

The score can be read in three ways. As printed: B / s, the time of pressured intervals, since
B = s * time. As its prose says: the reduction of pressure, which is capped at what is over, per
time of both transfers. As in G10's code, from which it descends: the area s * time between the
half-way points of both transfers. All periods are scored anew in every round, in array operations.

The paper runs over capacity if no period is left: kernels then wait for copies. A plan of ours may
not, so what remains is repaired, in this order: copies out are waited for earlier and copies in
start later where pressure is left; then further periods leave and come back while the computation
waits, those with the farthest next use first.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import final

import numpy as np
import numpy.typing as npt

from teraplan.planners.base import Planner, Problem, no_placement
from teraplan.planners.placing.placement import with_reasons
from teraplan.planners.placing.room import Room
from teraplan.planners.placing.victims import choose, farthest_use
from teraplan.simulation.lifetimes import Floats, Ints, Lifetimes
from teraplan.values.hardware import Tier
from teraplan.values.plan import Migration

_AT_ONCE = 1_000_000
"""Numbers of byte-ns that are worked out at once, of some sizes at all sites."""
_TIERS = (Tier.STORAGE, Tier.HOST)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Slot:
    """Where a period was put: it is away in intervals gone .. back-1."""

    row: int
    tier: Tier
    gone: int
    back: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Fits:
    """Where each period fits into the free bandwidth of one tier; arrays of shape (periods,)."""

    tier: Tier
    viable: npt.NDArray[np.bool_]
    gone: Ints
    back: Ints
    half_gone: Ints
    """Site at which half of the bytes have gone out."""
    half_back: Ints


Score = Callable[["_State", _Fits], Floats]


def paper_ratio(state: "_State", fits: _Fits) -> Floats:
    """B / s as printed: ns of intervals over capacity while it is away."""
    total = _prefix(np.where(state.over.free > 0, state.ns, 0.0))
    return _between(total, fits.gone, fits.back)


def prose(state: "_State", fits: _Fits) -> Floats:
    """Byte-ns of pressure that it takes away, per ns of its two transfers."""
    nbytes, link = state.periods.nbytes, state.problem.links[fits.tier]
    benefit = np.zeros(len(nbytes))
    over, rows = np.maximum(state.over.free, 0), np.flatnonzero(fits.viable)
    sizes, size_of = np.unique(nbytes[rows], return_inverse=True)
    at_once = max(_AT_ONCE // len(over), 1)
    for first in range(0, len(sizes), at_once):
        some = sizes[first : first + at_once, None]
        total = _prefix(np.minimum(over, some) * state.ns)
        here = (first <= size_of) & (size_of < first + at_once)
        these, number = rows[here], size_of[here] - first
        start, end = (total[number, at[these]] for at in (fits.gone, fits.back))
        benefit[these] = end - start
    return benefit / (nbytes * 1e9 / link.out_bytes_per_s + nbytes * 1e9 / link.back_bytes_per_s)


def g10_area(state: "_State", fits: _Fits) -> Floats:
    """Bytes times ns of intervals over capacity between the half-way points of its transfers."""
    total = _prefix(np.where(state.over.free > 0, state.ns, 0.0))
    return _between(total, fits.half_gone, fits.half_back) * state.periods.nbytes


def _prefix(values: Floats) -> Floats:
    """Sums of a repeating curve before each site of two steps; shape (..., 2 * sites + 1)."""
    twice = np.concatenate([np.zeros((*values.shape[:-1], 1)), values, values], axis=-1)
    return np.cumsum(twice, axis=-1, out=twice)


def _between(total: Floats, start: Ints, end: Ints) -> Floats:
    ordered = np.maximum(end, start)
    return total[np.minimum(ordered, len(total) - 1)] - total[np.minimum(start, len(total) - 1)]


@final
class _State:
    """Pressure, free bandwidth and free space while periods are being planned; mutable."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.periods: Lifetimes = problem.lifetimes
        num_sites = self.periods.num_sites
        self.ns: Floats = np.diff(self.periods.site_ns[: num_sites + 1]).astype(np.float64)
        self.over = Room(problem.device - problem.limit_bytes)
        self.links = {t: problem.links[t] for t in _TIERS if t in problem.links}
        self.out = {t: self.ns * (k.out_bytes_per_s * 1e-9) for t, k in self.links.items()}
        self.back = {t: self.ns * (k.back_bytes_per_s * 1e-9) for t, k in self.links.items()}
        sizes = problem.tier_bytes
        self.spans = problem.tier_spans(np.arange(len(self.periods)))
        self.space = {t: Room(np.full(num_sites, sizes[t], np.int64)) for t in self.links}
        self.open = {t: allowed_in(problem, t) for t in self.links}
        """Periods that are not planned yet and have not been found too large for the tier."""

    def fits(self, tier: Tier) -> _Fits:
        """Where each period fits into the bandwidth of `tier` that is free now."""
        start, end, nbytes = self.periods.start, self.periods.end, self.periods.nbytes
        out, back = _prefix(self.out[tier]), _prefix(self.back[tier])
        # a few bytes beside so many that could go in two steps may be nothing to a float
        gone = np.maximum(np.searchsorted(out, out[start] + nbytes), start)
        begin = np.minimum(np.searchsorted(back, back[end] - nbytes, side="right") - 1, end)
        return _Fits(
            tier=tier,
            viable=self.open[tier] & (gone < begin) & (begin >= start) & (gone <= end),
            gone=gone,
            back=begin,
            half_gone=np.searchsorted(out, out[start] + nbytes / 2),
            half_back=np.searchsorted(back, back[end] - nbytes / 2, side="right") - 1,
        )

    def has_space(self, row: int, tier: Tier) -> bool:
        """Whether the tier can hold the tensor during the period."""
        start, end = self.spans[row]
        return self.space[tier].least(start, end) >= int(self.periods.nbytes[row])

    def hold(self, row: int, tier: Tier) -> None:
        """Takes the space for that."""
        start, end = self.spans[row]
        self.space[tier].add(start, end, -int(self.periods.nbytes[row]))

    def take(self, slot: _Slot) -> None:
        """Books bandwidth, space and the bytes that are away."""
        start, end = int(self.periods.start[slot.row]), int(self.periods.end[slot.row])
        nbytes = int(self.periods.nbytes[slot.row])
        self.over.add(slot.gone, slot.back, -nbytes)
        self.hold(slot.row, slot.tier)
        _book(self.out[slot.tier], range(start, slot.gone), nbytes)
        _book(self.back[slot.tier], range(end - 1, slot.back - 1, -1), nbytes)
        for rows in self.open.values():
            rows[slot.row] = False


def _book(free: Floats, intervals: range, nbytes: float) -> None:
    for k in intervals:
        part = min(float(free[k % len(free)]), nbytes)
        free[k % len(free)] -= part
        nbytes -= part
        if nbytes <= 0:
            return


def allowed_in(problem: Problem, tier: Tier) -> npt.NDArray[np.bool_]:
    """Which periods are of tensors that may move to `tier`."""
    ids = problem.lifetimes.tensor_ids
    other = [i for i, only in problem.only_tier.items() if only is not tier]
    allowed: npt.NDArray[np.bool_] = ~np.isin(ids, np.array(other, dtype=np.int64))
    return allowed


def plan_as_teraio(problem: Problem, score: Score, *, eager: bool = False) -> tuple[Migration, ...]:
    """The migrations of Algorithm 1, repaired if they end over capacity.

    Args:
        problem: the step and the machine.
        score: reading of the paper's score.
        eager: whether copies in then start as early as memory allows, as in G10.

    Raises:
        InfeasibleBudgetError: if the other tiers have no room for what is left.
    """
    if not problem.pressure().any():
        return ()
    state = _State(problem)
    slots = _wait_for_copies(state, _algorithm_1(state, score))
    slots += _on_demand(state, [slot.row for slot in slots])
    if eager:
        slots = _earlier(state, slots)
    periods = problem.lifetimes
    migrations = tuple(
        Migration(
            tensor_id=int(periods.tensor_ids[slot.row]),
            leave=int(periods.start[slot.row]),
            gone=slot.gone,
            back=slot.back,
            needed=int(periods.end[slot.row]),
            tier=slot.tier,
        )
        for slot in sorted(slots, key=lambda slot: slot.row)
    )
    return with_reasons(problem, migrations)


def _algorithm_1(state: _State, score: Score) -> list[_Slot]:
    slots: list[_Slot] = []
    while state.over.free.max() > 0:
        slot = _best(state, score)
        if slot is None:
            break
        if state.has_space(slot.row, slot.tier):
            state.take(slot)
            slots.append(slot)
        else:
            state.open[slot.tier][slot.row] = False
    return slots


def _best(state: _State, score: Score) -> _Slot | None:
    """The period with the highest score, the first of equals; host only where storage is full."""
    best: _Slot | None = None
    highest = 0.0
    admitted = np.zeros(len(state.periods), dtype=bool)
    for tier in state.links:
        fits = state.fits(tier)
        values = np.where(fits.viable & ~admitted, score(state, fits), 0.0)
        admitted |= fits.viable
        row = int(values.argmax()) if len(values) else 0
        if len(values) and values[row] > highest:
            highest = float(values[row])
            gone, back = int(fits.gone[row]), int(fits.back[row])
            best = _Slot(row=row, tier=tier, gone=gone, back=back)
    return best


def _wait_for_copies(state: _State, slots: list[_Slot]) -> list[_Slot]:
    """The same slots, with `gone` earlier and `back` later where that takes pressure away."""
    size = len(state.over.free)
    result: list[_Slot] = []
    for slot in sorted(slots, key=lambda slot: slot.row):
        start, end = int(state.periods.start[slot.row]), int(state.periods.end[slot.row])
        nbytes = int(state.periods.nbytes[slot.row])
        before = np.take(state.over.free, np.arange(start, slot.gone) % size) > 0
        after = np.take(state.over.free, np.arange(slot.back, end) % size) > 0
        gone = start + int(before.argmax()) if before.any() else slot.gone
        back = end - int(after[::-1].argmax()) if after.any() else slot.back
        state.over.add(gone, slot.gone, -nbytes)
        state.over.add(slot.back, back, -nbytes)
        result.append(replace(slot, gone=gone, back=back))
    return result


def _earlier(state: _State, slots: list[_Slot]) -> list[_Slot]:
    """G10's last pass: in order of their start, copies in start as early as memory allows."""
    room = Room(-state.over.free)
    result: list[_Slot] = []
    for slot in sorted(slots, key=lambda slot: (slot.back, slot.row)):
        nbytes = int(state.periods.nbytes[slot.row])
        back = room.earliest_start(slot.back, slot.gone + 1, nbytes)
        room.add(back, slot.back, -nbytes)
        result.append(replace(slot, back=back))
    return result


def _on_demand(state: _State, planned: list[int]) -> list[_Slot]:
    """Further periods, away for all of their length, until nothing is over capacity."""
    periods = state.periods
    pressure = np.maximum(state.over.free, 0)
    if not pressure.any():
        return []
    allowed = np.ones(len(periods), dtype=bool)
    allowed[planned] = False
    rows = choose(periods, pressure, farthest_use(periods, pressure), allowed)
    if rows is None:
        raise no_placement(state.problem)
    slots: list[_Slot] = []
    for row in rows.tolist():
        usable = (t for t in state.links if allowed_in(state.problem, t)[row])
        tier = next((t for t in usable if state.has_space(row, t)), None)
        if tier is None:
            raise no_placement(state.problem)
        start, end = int(periods.start[row]), int(periods.end[row])
        state.hold(row, tier)
        slots.append(_Slot(row=row, tier=tier, gone=start, back=end))
    return slots


BY_AREA: Mapping[str, Planner] = MappingProxyType(
    {
        "teraio-area": partial(plan_as_teraio, score=g10_area),
        "g10": partial(plan_as_teraio, score=g10_area, eager=True),
    }
)
PUBLISHED: Mapping[str, Planner] = MappingProxyType(
    {
        "teraio": partial(plan_as_teraio, score=paper_ratio),
        "teraio-prose": partial(plan_as_teraio, score=prose),
        **BY_AREA,
    }
)
"""By the names of their policies."""
