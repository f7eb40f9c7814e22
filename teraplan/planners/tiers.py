"""Which tier each chosen tensor goes to, within the budgets of the tiers."""

from enum import Enum
from typing import final

import numpy as np

from teraplan.hardware import Tier
from teraplan.lifetimes import Ints
from teraplan.planners.base import Problem
from teraplan.planners.placement import Moves, transfer_ns
from teraplan.planners.room import Room


class Spread(Enum):
    """How to choose between tiers that have room."""

    SHORT_IDLE_FAST = "short idle fast"
    """The shortest idle periods over the fastest link."""
    BALANCED = "balanced"
    """In order of time, whichever link would be done first."""
    BY_LOAD = "by load"
    """The shortest idle periods first, each over the link that is less busy where it needs it."""
    SLOW_FIRST = "slow first"
    """Host memory only for what storage cannot hold."""


def assign(problem: Problem, rows: Ints, spread: Spread, *, may_split: bool = True) -> Moves | None:
    """Tiers for the periods `rows`, None if some tensor finds no room.

    A tensor that has not changed since it went to a tier is not written there again: its copy is
    kept, which takes space in between. One for which neither tier has room is split between them,
    if both together have and it `may_split`.
    """
    state = _Assignment(problem, rows)
    tiers: dict[int, Tier] = {}
    host_bytes = [0] * len(rows)
    for i in state.order(spread):
        tier = state.choose(i, spread)
        if tier is None:
            tier, host_bytes[i] = Tier.STORAGE, state.split(i) if may_split else 0
            if not host_bytes[i]:
                return None
        tiers[i] = tier
    chosen = tuple(tiers[i] for i in range(len(rows)))
    clean = _clean(problem, rows, chosen, state, host_bytes)
    return Moves(rows=rows, tiers=chosen, host_bytes=tuple(host_bytes), clean=clean)


_BUCKETS = 48
"""Parts of the step in which loads are counted."""


@final
class _Assignment:
    """Space and load of the tiers while periods are assigned; mutable."""

    def __init__(self, problem: Problem, rows: Ints) -> None:
        self._problem = problem
        self._rows = rows
        periods = problem.lifetimes
        self.rooms = {  # of a tier that is ample for everything at once no account is kept
            tier: Room(np.full(periods.num_sites, size, dtype=np.int64))
            for tier, size in problem.tier_bytes.items()
        }
        total = int(periods.nbytes[rows].sum())
        self.ample = {tier for tier, size in problem.tier_bytes.items() if size >= total}
        self._fastest_first = list(problem.tier_bytes)
        self._link_free = dict.fromkeys(self.rooms, 0.0)
        self._step_ns = max(float(periods.site_ns[periods.num_sites]), 1.0)
        self._loads = {tier: np.zeros((2, _BUCKETS)) for tier in self.rooms}
        self._of_tensor: dict[int, Tier] = {}
        if Tier.HOST in self.rooms:
            self._of_tensor.update(dict.fromkeys(problem.host_copies, Tier.HOST))

    def order(self, spread: Spread) -> list[int]:
        """In which order periods choose."""
        idle = self._problem.lifetimes.idle_ns[self._rows]
        by_idle = spread in (Spread.SHORT_IDLE_FAST, Spread.BY_LOAD)
        order = np.argsort(idle, kind="stable") if by_idle else np.arange(len(self._rows))
        return [int(i) for i in order]

    def choose(self, i: int, spread: Spread) -> Tier | None:
        """The tier of one period, whose space and load it takes; None if no tier has room."""
        periods, row = self._problem.lifetimes, int(self._rows[i])
        nbytes = int(periods.nbytes[row])
        start, end = self._problem.tier_span(row)
        for tier in self._preferred(row, spread):
            if tier is Tier.HOST and int(periods.tensor_ids[row]) in self._problem.host_copies:
                self._take(row, tier)
                return tier
            if tier in self.ample or self.rooms[tier].least(start, end) >= nbytes:
                if tier not in self.ample:
                    self.rooms[tier].add(start, end, -nbytes)
                self._take(row, tier)
                return tier
        return None

    def split(self, i: int) -> int:
        """Takes room of both tiers for one period; bytes of it in host memory, 0 if neither has."""
        periods, row = self._problem.lifetimes, int(self._rows[i])
        tensor_id, nbytes = int(periods.tensor_ids[row]), int(periods.nbytes[row])
        if tensor_id in self._problem.only_tier or not self._problem.may_split():
            return 0
        span = self._problem.tier_span(row)
        room = {tier: self.rooms[tier].least(*span) for tier in self.rooms}
        host_bytes = self._problem.cut(tensor_id, max(room[Tier.HOST], 0))
        if not host_bytes or nbytes - host_bytes > room[Tier.STORAGE]:
            return 0
        self.rooms[Tier.HOST].add(*span, -host_bytes)
        self.rooms[Tier.STORAGE].add(*span, host_bytes - nbytes)
        self._take(row, Tier.STORAGE)
        return host_bytes

    def _preferred(self, row: int, spread: Spread) -> list[Tier]:
        tensor_id = int(self._problem.lifetimes.tensor_ids[row])
        if spread is Spread.SHORT_IDLE_FAST:
            order = self._fastest_first
        elif spread is Spread.SLOW_FIRST:
            order = self._fastest_first[::-1]
        elif spread is Spread.BALANCED:
            order = sorted(self._fastest_first, key=lambda tier: self._done(row, tier))
        else:
            order = sorted(self._fastest_first, key=lambda tier: self._load(row, tier))
        only = self._problem.only_tier.get(tensor_id)
        if only is not None:
            return [only] if only in self.rooms else []
        before = self._of_tensor.get(tensor_id)
        if before is not None and order[0] is not before:
            order = [before, *(tier for tier in order if tier is not before)]
        return order

    def _done(self, row: int, tier: Tier) -> float:
        """When the copy out would be done, in order of time."""
        periods, link = self._problem.lifetimes, self._problem.links[tier]
        begin = max(self._link_free[tier], float(periods.site_ns[periods.start[row]]))
        return begin + transfer_ns(link, int(periods.nbytes[row]), link.out_bytes_per_s)

    def _transfers(self, row: int, tier: Tier) -> tuple[tuple[int, float], tuple[int, float]]:
        """Bucket and time of the copies out and in."""
        periods, link = self._problem.lifetimes, self._problem.links[tier]
        nbytes = int(periods.nbytes[row])
        out = transfer_ns(link, nbytes, link.out_while_back_bytes_per_s)
        back = transfer_ns(link, nbytes, link.back_while_out_bytes_per_s)
        sites = (periods.start[row], periods.end[row])
        first, last = (
            int(float(periods.site_ns[site]) / self._step_ns * _BUCKETS) for site in sites
        )
        return (first % _BUCKETS, out), ((last - 1) % _BUCKETS, back)

    def _load(self, row: int, tier: Tier) -> float:
        """How busy the tier is near both transfers and in all of the step, with this one."""
        total = 0.0
        for side, (bucket, duration) in enumerate(self._transfers(row, tier)):
            loads = self._loads[tier][side]
            near = loads[bucket] + loads[bucket - 1] + loads[(bucket + 1) % _BUCKETS] + duration
            total += near * _BUCKETS / 3 + loads.sum() + duration
        return total

    def _take(self, row: int, tier: Tier) -> None:
        self._link_free[tier] = self._done(row, tier)
        self._of_tensor[int(self._problem.lifetimes.tensor_ids[row])] = tier
        for side, (bucket, duration) in enumerate(self._transfers(row, tier)):
            self._loads[tier][side, bucket] += duration


def _clean(
    problem: Problem,
    rows: Ints,
    tiers: tuple[Tier, ...],
    state: _Assignment,
    host_bytes: list[int],
) -> tuple[bool, ...]:
    """Whether each move finds its copy kept from an earlier one; takes the room for keeping it.

    None is kept of what was split for want of room.
    """
    periods, tensors = problem.lifetimes, problem.trace.tensors
    of_tensor: dict[int, list[int]] = {}
    for i, row in enumerate(rows.tolist()):
        of_tensor.setdefault(int(periods.tensor_ids[row]), []).append(i)
    clean = [
        tier is Tier.HOST and tensor_id in problem.host_copies
        for tier, tensor_id in zip(tiers, periods.tensor_ids[rows].tolist(), strict=True)
    ]
    for tensor_id, moves in of_tensor.items():
        tensor = tensors[tensor_id]
        if len(moves) < 2:
            continue
        spans = [(int(periods.start[rows[i]]), int(periods.end[rows[i]])) for i in moves]
        changes = [tensor.windows[number] for number in tensor.changes]
        for position, i in enumerate(moves):
            if clean[i] or host_bytes[i] or host_bytes[moves[position - 1]]:
                continue
            if position == 0 and not (tensor.persistent and changes):
                continue  # of all that go round, one must write
            shift = periods.num_sites if position == 0 else 0
            since, until = spans[position - 1][1] - shift, spans[position][0]
            tier = tiers[i]
            if tier is not tiers[moves[position - 1]] or _changed(changes, since, until, shift):
                continue
            since, until = since + problem.spare_sites, until - problem.spare_sites
            if tier not in state.ample and since < until:
                room, size = state.rooms[tier], tensor.nbytes
                since, until = since + shift, until + shift
                if room.least(since, until) < size:
                    continue
                room.add(since, until, -size)
            clean[i] = True
    return tuple(clean)


def _changed(changes: list[tuple[int, int]], since: int, until: int, num_sites: int) -> bool:
    """Whether a window in which the tensor changes lies between, also one of the step before."""
    return any(
        since <= start - shift and end - shift <= until
        for start, end in changes
        for shift in (0, num_sites)
    )
