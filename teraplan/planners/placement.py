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
from dataclasses import dataclass, replace

import numpy as np

from teraplan.hardware import Link, Tier
from teraplan.lifetimes import Floats, Ints
from teraplan.memory_curve import sum_ranges
from teraplan.plan import Migration
from teraplan.planners.base import Problem
from teraplan.planners.room import Room, free_of
from teraplan.units import format_nbytes, format_ns


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
    start, end = periods.start[moves.rows], periods.end[moves.rows]
    nbytes = periods.nbytes[moves.rows]
    moved = zip(start.tolist(), end.tolist(), nbytes.tolist(), strict=True)
    room = free_of(problem.limit_bytes, problem.device - sum_ranges(periods.num_sites, moved))
    times = arrive.tolist()
    gone = _copies_out(problem, moves, times, room)
    back = _copies_in(problem, moves, times, room, gone, pace)
    for i in np.argsort(gone - start, kind="stable").tolist():
        if gone[i] > start[i]:
            later = room.latest_end(int(gone[i]), int(back[i]) - 1, int(nbytes[i]))
            room.add(int(gone[i]), later, -int(nbytes[i]))
            gone[i] = later
    return tuple(
        Migration(
            tensor_id=int(periods.tensor_ids[row]),
            leave=int(start[i]),
            gone=int(gone[i]),
            back=int(back[i]),
            needed=int(end[i]),
            tier=moves.tiers[i],
            host_bytes=moves.host_bytes[i],
            clean=moves.clean[i],
        )
        for i, row in enumerate(moves.rows.tolist())
    )


def transfer_ns(link: Link, nbytes: int, speed: int) -> float:
    """Time of one transfer at `speed` bytes per second."""
    return link.latency_ns + nbytes * 1e9 / speed


def _copies_out(problem: Problem, moves: Moves, arrive: list[float], room: Room) -> Ints:
    """`gone` of each move; takes the room for the time until then."""
    periods = problem.lifetimes
    gone = periods.start[moves.rows].copy()
    link_free = dict.fromkeys(problem.links, 0.0)
    for i, row in enumerate(moves.rows.tolist()):
        if moves.clean[i]:
            continue
        start, nbytes = int(periods.start[row]), int(periods.nbytes[row])
        for tier, part in _parts(problem, moves, i):
            link = problem.links[tier]
            begin = max(link_free[tier], arrive[start])
            link_free[tier] = begin + transfer_ns(link, part, link.out_bytes_per_s)
        done = max(link_free[tier] for tier, _ in _parts(problem, moves, i))
        wanted = bisect_left(arrive, done)
        gone[i] = room.latest_end(start, min(wanted, int(periods.end[row]) - 1), nbytes)
        room.add(start, int(gone[i]), -nbytes)
    return gone


def _copies_in(
    problem: Problem, moves: Moves, arrive: list[float], room: Room, gone: Ints, pace: Pace
) -> Ints:
    """`back` of each move; takes the room from then on."""
    periods = problem.lifetimes
    end, nbytes = periods.end[moves.rows], periods.nbytes[moves.rows]
    order = np.lexsort((moves.rows, end)).tolist()
    latest = _latest_sites(problem, moves, arrive, order, pace.margin)
    back = end.copy()
    link_free = dict.fromkeys(problem.links, 0.0)
    for i in order:
        parts, needed, size = _parts(problem, moves, i), int(end[i]), nbytes[i]
        lowest = int(gone[i]) + 1
        if pace.just_in_time:
            lowest = max(lowest, int(latest[i]))
        else:
            first_free = min(link_free[tier] for tier, _ in parts)
            lowest = max(lowest, bisect_right(arrive, first_free) - 1)
        back[i] = room.earliest_start(needed, min(lowest, needed), int(size))
        room.add(int(back[i]), needed, -int(size))
        for tier, part in parts:
            link = problem.links[tier]
            begin = max(link_free[tier], arrive[back[i]])
            link_free[tier] = begin + transfer_ns(link, part, link.back_bytes_per_s)
    return back


def _latest_sites(
    problem: Problem, moves: Moves, arrive: list[float], order: list[int], margin: float
) -> Ints:
    """The last site at which each copy in can start so that it and all later ones are in time."""
    periods = problem.lifetimes
    latest = np.zeros(len(order), dtype=np.int64)
    busy_from = dict.fromkeys(problem.links, arrive[-1])
    for i in reversed(order):
        parts, needed_ns = _parts(problem, moves, i), arrive[periods.end[moves.rows[i]]]
        for tier, part in parts:
            link = problem.links[tier]
            speed = min(link.back_bytes_per_s, link.back_while_out_bytes_per_s)
            duration = transfer_ns(link, part, speed) * margin
            busy_from[tier] = min(busy_from[tier], needed_ns) - duration
        begin = min(busy_from[tier] for tier, _ in parts)
        latest[i] = max(bisect_right(arrive, begin) - 1, 0)
    return latest


def _parts(problem: Problem, moves: Moves, i: int) -> tuple[tuple[Tier, int], ...]:
    """Tiers and bytes of a move, as of `Migration.parts`."""
    nbytes, host_bytes = int(problem.lifetimes.nbytes[moves.rows[i]]), moves.host_bytes[i]
    if not host_bytes:
        return ((moves.tiers[i], nbytes),)
    return ((Tier.HOST, host_bytes), (moves.tiers[i], nbytes - host_bytes))


def with_reasons(problem: Problem, migrations: tuple[Migration, ...]) -> tuple[Migration, ...]:
    """The same migrations, each with why it is there, in words and numbers."""
    periods, pressure = problem.lifetimes, problem.pressure()
    num_sites = periods.num_sites
    doubled = np.concatenate([pressure, pressure])
    result: list[Migration] = []
    peaks = _highest(doubled, [m.leave for m in migrations], [m.needed for m in migrations])
    for m, site in zip(migrations, peaks, strict=True):
        idle_ns = int(periods.site_ns[m.needed] - periods.site_ns[m.leave])
        over = int(doubled[site])
        where = f"{format_nbytes(over)} over budget at site {site % num_sites}"
        reason = f"idle {format_ns(idle_ns)}, {where}" if over else f"idle {format_ns(idle_ns)}"
        result.append(replace(m, reason=reason + (", copy still there" if m.clean else "")))
    return tuple(result)


def _highest(values: Ints, starts: list[int], ends: list[int]) -> list[int]:
    """For each range start .. end-1, where the highest value is: the first of the highest.

    A table of the highest of every 1, 2, 4, ... values: each range is the union of two of them.
    """
    first, last = np.array(starts, dtype=np.int64), np.array(ends, dtype=np.int64)
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
    return [int(site) for site in result]
