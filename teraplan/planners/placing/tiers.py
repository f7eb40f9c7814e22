"""Which tier each chosen tensor goes to, within the budgets of the tiers."""

from collections.abc import Sequence
from enum import Enum
from functools import partial
from typing import final

import numpy as np

from teraplan.planners.base import Problem
from teraplan.planners.placing.copies import kept_copies
from teraplan.planners.placing.placement import Moves, transfers_ns
from teraplan.planners.placing.room import Room
from teraplan.simulation.lifetimes import Ints
from teraplan.values.hardware import Tier


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
    """Space and load of the tiers while periods are assigned; mutable.

    Periods are told by their place among `rows`, tiers by their place in `tiers`.
    """

    def __init__(self, problem: Problem, rows: Ints) -> None:
        self._problem = problem
        periods = problem.lifetimes
        self.tiers = list(problem.tier_bytes)
        """Fastest way back first."""
        self.rooms = [  # of a tier that is ample for everything at once no account is kept
            Room(np.full(periods.num_sites, size, dtype=np.int64))
            for size in problem.tier_bytes.values()
        ]
        nbytes = periods.nbytes[rows]
        self.ample = [size >= int(nbytes.sum()) for size in problem.tier_bytes.values()]
        self._nbytes: list[int] = nbytes.tolist()
        self._ids: list[int] = periods.tensor_ids[rows].tolist()
        self._spans = problem.tier_spans(rows)
        self._idle_ns = periods.idle_ns[rows]
        ends_ns = [periods.site_ns[sites[rows]] for sites in (periods.start, periods.end)]
        self._start_ns: list[float] = ends_ns[0].astype(np.float64).tolist()
        self._link_free = [0.0 for _ in self.tiers]
        step_ns = max(float(periods.site_ns[periods.num_sites]), 1.0)
        first, last = ((ns / step_ns * _BUCKETS).astype(np.int64) for ns in ends_ns)
        self._buckets: list[list[int]] = [
            (first % _BUCKETS).tolist(),
            ((last - 1) % _BUCKETS).tolist(),
        ]
        """Of the copies out and in."""
        links = [problem.links[tier] for tier in self.tiers]
        self._out_ns: list[list[float]] = [
            transfers_ns(x, nbytes, x.out_bytes_per_s).tolist() for x in links
        ]
        self._busy_ns: list[tuple[list[float], list[float]]] = [
            (
                transfers_ns(link, nbytes, link.out_while_back_bytes_per_s).tolist(),
                transfers_ns(link, nbytes, link.back_while_out_bytes_per_s).tolist(),
            )
            for link in links
        ]
        """Times of copies out and in while the link is busy both ways, by tier."""
        self._loads = [([0.0] * _BUCKETS, [0.0] * _BUCKETS) for _ in links]
        self._all_loads = [[0.0, 0.0] for _ in links]
        self._of_tensor: dict[int, int] = {}
        if Tier.HOST in self.tiers:
            host = self.tiers.index(Tier.HOST)
            self._of_tensor.update(dict.fromkeys(problem.host_copies, host))

    def order(self, spread: Spread) -> list[int]:
        """In which order periods choose."""
        if spread in (Spread.SHORT_IDLE_FAST, Spread.BY_LOAD):
            by_idle: list[int] = np.argsort(self._idle_ns, kind="stable").tolist()
            return by_idle
        return list(range(len(self._ids)))

    def choose(self, i: int, spread: Spread) -> Tier | None:
        """The tier of one period, whose space and load it takes; None if no tier has room."""
        nbytes, (start, end) = self._nbytes[i], self._spans[i]
        for tier in self._preferred(i, spread):
            copied = self.tiers[tier] is Tier.HOST and self._ids[i] in self._problem.host_copies
            if not copied and not self.ample[tier]:
                if self.rooms[tier].least(start, end) < nbytes:
                    continue
                self.rooms[tier].add(start, end, -nbytes)
            self._take(i, tier)
            return self.tiers[tier]
        return None

    def split(self, i: int) -> int:
        """Takes room of both tiers for one period; bytes of it in host memory, 0 if neither has."""
        tensor_id, nbytes, span = self._ids[i], self._nbytes[i], self._spans[i]
        if tensor_id in self._problem.only_tier or not self._problem.may_split():
            return 0
        host, storage = (self.tiers.index(tier) for tier in (Tier.HOST, Tier.STORAGE))
        host_bytes = self._problem.cut(tensor_id, max(self.rooms[host].least(*span), 0))
        if not host_bytes or nbytes - host_bytes > self.rooms[storage].least(*span):
            return 0
        self.rooms[host].add(*span, -host_bytes)
        self.rooms[storage].add(*span, host_bytes - nbytes)
        self._take(i, storage)
        return host_bytes

    def _preferred(self, i: int, spread: Spread) -> Sequence[int]:
        only = self._problem.only_tier.get(self._ids[i])
        if only is not None:
            return [tier for tier, name in enumerate(self.tiers) if name is only]
        order = list(range(len(self.tiers)))
        if spread is Spread.SLOW_FIRST:
            order.reverse()
        elif spread is Spread.BALANCED:
            order.sort(key=partial(self._done, i))
        elif spread is Spread.BY_LOAD:
            order.sort(key=partial(self._load, i))
        before = self._of_tensor.get(self._ids[i])
        if before is not None:
            order.remove(before)
            order.insert(0, before)
        return order

    def _done(self, i: int, tier: int) -> float:
        """When the copy out would be done, in order of time."""
        return max(self._link_free[tier], self._start_ns[i]) + self._out_ns[tier][i]

    def _load(self, i: int, tier: int) -> float:
        """How busy the tier is near both transfers and in all of the step, with this one."""
        total = 0.0
        for side in (0, 1):
            loads, bucket = self._loads[tier][side], self._buckets[side][i]
            duration = self._busy_ns[tier][side][i]
            # the bucket after the last one is the first
            near = loads[bucket] + loads[bucket - 1] + loads[bucket + 1 - _BUCKETS] + duration
            total += near * _BUCKETS / 3 + self._all_loads[tier][side] + duration
        return total

    def _take(self, i: int, tier: int) -> None:
        self._link_free[tier] = self._done(i, tier)
        self._of_tensor[self._ids[i]] = tier
        for side in (0, 1):
            duration = self._busy_ns[tier][side][i]
            self._loads[tier][side][self._buckets[side][i]] += duration
            self._all_loads[tier][side] += duration


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
    ids: list[int] = periods.tensor_ids[rows].tolist()
    starts: list[int] = periods.start[rows].tolist()
    ends: list[int] = periods.end[rows].tolist()
    of_tensor: dict[int, list[int]] = {}
    for i, tensor_id in enumerate(ids):
        of_tensor.setdefault(tensor_id, []).append(i)
    copies = problem.host_copies
    clean = [t is Tier.HOST and i in copies for t, i in zip(tiers, ids, strict=True)]
    for tensor_id, moves in of_tensor.items():
        tensor = tensors[tensor_id]
        spans = [(starts[i], ends[i]) for i in moves]
        # what was split is in no place where another migration could find it
        places = [(tiers[i], i if host_bytes[i] else None) for i in moves]
        for position, since, until in kept_copies(tensor, spans, places, periods.num_sites):
            i = moves[position]
            if clean[i]:
                continue
            since, until = since + problem.spare_sites, until - problem.spare_sites
            tier = state.tiers.index(tiers[i])
            if not state.ample[tier] and since < until:
                room, size = state.rooms[tier], tensor.nbytes
                if room.least(since, until) < size:
                    continue
                room.add(since, until, -size)
            clean[i] = True
    return tuple(clean)
