"""Which tier each chosen tensor goes to, within the budgets of the tiers."""

from enum import Enum

import numpy as np

from teraplan.hardware import Tier
from teraplan.lifetimes import Ints
from teraplan.planners.base import Problem
from teraplan.planners.placement import Moves, transfer_ns
from teraplan.planners.room import Room
from teraplan.step_trace import TensorKind


class Spread(Enum):
    """How to choose between tiers that have room."""

    SHORT_IDLE_FAST = "short idle fast"
    """The shortest idle periods over the fastest link."""
    BALANCED = "balanced"
    """In order of time, whichever link would be done first."""
    SLOW_FIRST = "slow first"
    """Host memory only for what storage cannot hold."""


def assign(problem: Problem, rows: Ints, spread: Spread) -> Moves | None:
    """Tiers for the periods `rows`, None if some tensor finds no room.

    An activation that already went to a tier is not written there again: its copy is kept, which
    takes space in between.
    """
    periods = problem.lifetimes
    rooms = {  # of a tier that is ample for everything at once no account is kept
        tier: Room(np.full(periods.num_sites, size, dtype=np.int64))
        for tier, size in problem.tier_bytes.items()
    }
    total = int(periods.nbytes[rows].sum())
    ample = {tier for tier, size in problem.tier_bytes.items() if size >= total}
    fastest_first = list(problem.tier_bytes)
    by_idle = spread is Spread.SHORT_IDLE_FAST
    order = np.argsort(periods.idle_ns[rows], kind="stable") if by_idle else np.arange(len(rows))
    link_free = dict.fromkeys(rooms, 0.0)
    tiers: dict[int, Tier] = {}
    for i in order.tolist():
        start, end = int(periods.start[rows[i]]), int(periods.end[rows[i]])
        nbytes = int(periods.nbytes[rows[i]])
        done = {
            tier: max(link_free[tier], float(periods.site_ns[start]))
            + transfer_ns(link, nbytes, link.out_bytes_per_s)
            for tier, link in problem.links.items()
        }
        preferred = fastest_first if spread is not Spread.SLOW_FIRST else fastest_first[::-1]
        if spread is Spread.BALANCED:
            preferred = sorted(fastest_first, key=done.__getitem__)
        for tier in preferred:
            if tier in ample or rooms[tier].least(start, end) >= nbytes:
                if tier not in ample:
                    rooms[tier].add(start, end, -nbytes)
                link_free[tier] = done[tier]
                tiers[i] = tier
                break
        else:
            return None
    chosen = tuple(tiers[i] for i in range(len(rows)))
    return Moves(rows=rows, tiers=chosen, clean=_clean(problem, rows, chosen, rooms, ample))


def _clean(
    problem: Problem,
    rows: Ints,
    tiers: tuple[Tier, ...],
    rooms: dict[Tier, Room],
    ample: set[Tier],
) -> tuple[bool, ...]:
    """Whether each move finds its copy kept from an earlier one; takes the room for keeping it."""
    periods, tensors = problem.lifetimes, problem.trace.tensors
    kept_until: dict[tuple[int, Tier], int] = {}
    clean: list[bool] = []
    for row, tier in zip(rows.tolist(), tiers, strict=True):
        tensor_id, nbytes = int(periods.tensor_ids[row]), int(periods.nbytes[row])
        start = int(periods.start[row])
        tensor = tensors[tensor_id]
        since = kept_until.get((tensor_id, tier))
        kept = since is not None and tensor.kind is TensorKind.ACTIVATION and not tensor.persistent
        if kept and since is not None and since < start and tier not in ample:
            kept = rooms[tier].least(since, start) >= nbytes
            if kept:
                rooms[tier].add(since, start, -nbytes)
        clean.append(kept)
        kept_until[tensor_id, tier] = int(periods.end[row])
    return tuple(clean)
