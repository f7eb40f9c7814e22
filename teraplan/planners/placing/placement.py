"""When chosen tensors leave and come back: sites for transfers, within the memory that is left.

    leave            gone              back              needed
      |== going out ===|                 |=== coming in ====|
      as soon as idle  no later than     as early as memory  at the next use
                       memory allows     and the link allow

Waiting at `gone` and `needed` is what a plan costs. `gone` can be later, and `back` earlier, only
where memory is free: the copies out get it first, as they come first, and hold it until the link
should be done with them; then the copies in, in the order in which they are needed, which is also
the order in which they go over the link; what is still free then goes to the copies out.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import final

import numpy as np

from teraplan.planners.base import Problem
from teraplan.planners.placing.room import Room, free_of
from teraplan.simulation.lifetimes import Floats, Ints
from teraplan.simulation.memory_curve import sum_columns
from teraplan.units import format_nbytes, format_ns
from teraplan.values.hardware import Link, Tier
from teraplan.values.plan import Migration


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Moves:
    """Chosen periods with their tiers; arrays of shape (moves,)."""

    rows: Ints
    """Rows of `Lifetimes`, ascending, so in order of start."""
    tiers: tuple[Tier, ...]
    host_bytes: tuple[int, ...]
    """What of each is in host memory beside, as in `Migration`."""
    clean: tuple[bool, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """How early copies in start."""

    just_in_time: bool
    """As late as the link allows, rather than as early as memory allows."""
    margin: float = 1.0
    """Factor on the time of a transfer."""


EAGER = Pace(just_in_time=False)
JUST_IN_TIME = Pace(just_in_time=True, margin=1.1)
RELAXED = Pace(just_in_time=True, margin=2.0)


def place(problem: Problem, moves: Moves, arrive: Floats, pace: Pace) -> tuple[Migration, ...]:
    """Migrations for `moves`, valid for the device limit.

    Args:
        problem: the step and the machine.
        moves: what to move; covers the pressure.
        arrive: when each site of two steps is reached, as known so far; (2 * sites + 1,).
        pace: when to start copies in.
    """
    periods = problem.lifetimes
    placing = _Placing(problem, moves, arrive.tolist())
    columns = (c[moves.rows] for c in (periods.start, periods.end, periods.nbytes))
    room = free_of(problem.limit_bytes, problem.device - sum_columns(periods.num_sites, *columns))
    gone = placing.copies_out(room)
    back = placing.copies_in(room, gone, pace)
    late = [gone[i] - placing.start[i] for i in range(len(gone))]
    for i in sorted(range(len(gone)), key=late.__getitem__):
        if late[i] > 0:
            later = room.latest_end(gone[i], back[i] - 1, placing.nbytes[i])
            room.add(gone[i], later, -placing.nbytes[i])
            gone[i] = later
    return tuple(
        Migration(
            tensor_id=tensor_id,
            leave=placing.start[i],
            gone=gone[i],
            back=back[i],
            needed=placing.end[i],
            tier=moves.tiers[i],
            host_bytes=moves.host_bytes[i],
            clean=moves.clean[i],
        )
        for i, tensor_id in enumerate(periods.tensor_ids[moves.rows].tolist())
    )


def transfers_ns(link: Link, nbytes: Ints, speed: int) -> Floats:
    """Times of transfers at `speed` bytes per second."""
    return np.asarray(link.latency_ns + nbytes * 1e9 / speed, dtype=np.float64)


@final
class _Placing:
    """What the places of some moves follow from; moves are told by their position."""

    def __init__(self, problem: Problem, moves: Moves, arrive: list[float]) -> None:
        periods = problem.lifetimes
        self._problem, self._moves, self._arrive = problem, moves, arrive
        self.start: list[int] = periods.start[moves.rows].tolist()
        self.end: list[int] = periods.end[moves.rows].tolist()
        self.nbytes: list[int] = periods.nbytes[moves.rows].tolist()

    def copies_out(self, room: Room) -> list[int]:
        """`gone` of each move; takes the room for the time until then."""
        arrive, clean, gone = self._arrive, self._moves.clean, self.start.copy()
        parts = self._parts(lambda link: link.out_bytes_per_s)
        link_free = [0.0 for _ in self._problem.links]
        for i, start in enumerate(self.start):
            if clean[i]:
                continue
            done = 0.0
            for tier, duration in parts[i]:
                ended = max(link_free[tier], arrive[start]) + duration
                link_free[tier] = ended
                done = max(done, ended)
            wanted = min(bisect_left(arrive, done), self.end[i] - 1)
            gone[i] = room.latest_end(start, wanted, self.nbytes[i])
            room.add(start, gone[i], -self.nbytes[i])
        return gone

    def copies_in(self, room: Room, gone: list[int], pace: Pace) -> list[int]:
        """`back` of each move; takes the room from then on."""
        arrive, back = self._arrive, self.end.copy()
        order = sorted(range(len(back)), key=self.end.__getitem__)
        latest = self._latest_sites(order, pace.margin) if pace.just_in_time else []
        parts = self._parts(lambda link: link.back_bytes_per_s)
        link_free = [0.0 for _ in self._problem.links]
        for i in order:
            needed, nbytes = self.end[i], self.nbytes[i]
            if pace.just_in_time:
                lowest = latest[i]
            else:
                first_free = min(link_free[tier] for tier, _ in parts[i])
                lowest = bisect_right(arrive, first_free) - 1
            lowest = min(max(lowest, gone[i] + 1), needed)
            back[i] = room.earliest_start(needed, lowest, nbytes)
            room.add(back[i], needed, -nbytes)
            for tier, duration in parts[i]:
                link_free[tier] = max(link_free[tier], arrive[back[i]]) + duration
        return back

    def _latest_sites(self, order: list[int], margin: float) -> list[int]:
        """Where each copy in can start at the latest so that it and all later ones are in time."""
        arrive, latest = self._arrive, self.end.copy()
        parts = self._parts(lambda x: min(x.back_bytes_per_s, x.back_while_out_bytes_per_s))
        busy_from = [arrive[-1] for _ in self._problem.links]
        for i in reversed(order):
            begin = arrive[-1]
            for tier, duration in parts[i]:
                busy_from[tier] = min(busy_from[tier], arrive[self.end[i]]) - duration * margin
                begin = min(begin, busy_from[tier])
            latest[i] = max(bisect_right(arrive, begin) - 1, 0)
        return latest

    def _parts(self, speed: Callable[[Link], int]) -> list[tuple[tuple[int, float], ...]]:
        """For each move, the links that it goes over, by number, and the times that they take."""
        problem, moves = self._problem, self._moves
        host_bytes = np.array(moves.host_bytes, dtype=np.int64)
        nbytes = problem.lifetimes.nbytes[moves.rows]
        number = {tier: i for i, tier in enumerate(problem.links)}
        tiers = np.array([number[tier] for tier in moves.tiers], dtype=np.int64)
        rest_ns = np.zeros(len(nbytes))
        for tier, link in problem.links.items():
            here = tiers == number[tier]
            rest_ns[here] = transfers_ns(link, (nbytes - host_bytes)[here], speed(link))
        parts: list[tuple[tuple[int, float], ...]] = [
            ((tier, ns),) for tier, ns in zip(tiers.tolist(), rest_ns.tolist(), strict=True)
        ]
        for i in np.flatnonzero(host_bytes).tolist():
            host = problem.links[Tier.HOST]
            host_ns = float(transfers_ns(host, host_bytes[i], speed(host)))
            parts[i] = ((number[Tier.HOST], host_ns), *parts[i])
        return parts


def with_reasons(problem: Problem, migrations: tuple[Migration, ...]) -> tuple[Migration, ...]:
    """The same migrations, each with why it is there, in words and numbers."""
    periods, pressure = problem.lifetimes, problem.pressure()
    doubled = np.concatenate([pressure, pressure])
    leave = np.array([m.leave for m in migrations], dtype=np.int64)
    needed = np.array([m.needed for m in migrations], dtype=np.int64)
    sites = _highest(doubled, leave, needed)
    rows = zip(
        migrations,
        (periods.site_ns[needed] - periods.site_ns[leave]).tolist(),
        doubled[sites].tolist(),
        (sites % max(periods.num_sites, 1)).tolist(),
        strict=True,
    )
    result: list[Migration] = []
    for m, idle_ns, over, site in rows:
        where = f", {format_nbytes(over)} over budget at site {site}" if over else ""
        still = ", copy still there" if m.clean else ""
        result.append(replace(m, reason=f"idle {format_ns(idle_ns)}{where}{still}"))
    return tuple(result)


def _highest(values: Ints, first: Ints, last: Ints) -> Ints:
    """For each range first .. last-1, where the highest value is: the first of the highest.

    A table of the highest of every 1, 2, 4, ... values: each range is the union of two of them.
    """
    level = np.frexp(np.maximum(last - first, 1))[1] - 1
    result = first.copy()
    table = np.arange(len(values))
    for height in range(int(level.max(initial=0)) + 1):
        here = np.flatnonzero(level == height)
        left, right = table[first[here]], table[np.maximum(last[here] - (1 << height), first[here])]
        result[here] = np.where(values[right] > values[left], right, left)
        width = 1 << height
        if len(table) <= width:
            break
        other = table[width:]
        base = table[: len(other)]
        table = np.where(values[other] > values[base], other, base)
    return result
