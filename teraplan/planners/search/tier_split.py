"""Splits tensors between host and storage where one link is waited for while the other has time.

    host      [t0 ][   t1    ]                     host      [t0 ][  t1   ]
    storage                         ...   ->       storage        [t1]
    compute   ====|== waits ==|====                compute   ====|= waits =|====

A wait is for the last copy in a row of copies that kept its link busy. Had a part of their bytes
gone over the other link, it would have been shorter. How large the part is follows from a model:
with both links busy they carry a' and b' bytes in a ns where one alone carries a. Of what the one
does in a time I, b' I a / (a' + b') bytes go over the other, and both are done at the same time; no
more of it is moved than takes the wait away. Where a' + b' is no more than a, as behind a port that
one link fills, nothing is split.

All waits are treated at once, the longest first, and each takes of the other link's idle time. The
result is simulated; if it is no better, so is its more important half, and so on. As tensors are
split after sites have been chosen, sites are then chosen anew for the copies as they are.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import final

import numpy as np

from teraplan.planners.base import Problem
from teraplan.planners.placing.placement import EAGER, JUST_IN_TIME, RELAXED, Moves, place
from teraplan.planners.placing.room import Room
from teraplan.simulation.channels import slots_of, speeds
from teraplan.simulation.lifetimes import Floats
from teraplan.simulation.memory_curve import Curve, tier_curve
from teraplan.simulation.simulator import Simulator, Timing, Transfer, Wait
from teraplan.values.hardware import Tier
from teraplan.values.plan import Migration
from teraplan.values.run_record import Direction

_WORK, _MOST = 20_000, 24
"""Idle periods times simulations of one search, and the most simulations."""
_PARTS = (1.0, 0.5, 0.2)
"""Of the proposed splits, how many are tried, from the most important on."""
_BINS = 4096
"""Parts of the step in which idle time of links is counted."""
_LEAST_GAIN = 0.02
"""By how much two links must carry more than one for a split to be worth it."""
_LONGEST_ROW = 32
"""How many copies before a wait are looked at."""
_MOST_LOOKS = 20_000
"""How many copies are looked at in all: beside the longest waits the rest matters little."""
_GAPLESS_NS = 4
"""Copies of one link that are no farther apart follow each other: times are rounded."""

Plan = tuple[Migration, ...]


def split_between_tiers(
    problem: Problem, simulator: Simulator, migrations: Plan, enough_ns: int
) -> Plan:
    """A plan whose step is no longer than that of `migrations`, with tensors split between tiers.

    Args:
        problem: the step and the machine.
        simulator: of both.
        migrations: a plan that holds.
        enough_ns: a lower bound on the step, at which the search stops.
    """
    if not migrations or not splits_can_help(problem, simulator):
        return migrations
    return _Splitter(problem, simulator, enough_ns).run(migrations)


def splits_can_help(problem: Problem, simulator: Simulator) -> bool:
    """True if both links together carry more than one of them alone, in any direction."""
    return problem.may_split() and any(
        pair.gain >= _LEAST_GAIN for pair in _pairs(problem, simulator).values()
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Pair:
    """One direction of a link that is waited for, and the other link's in bytes per ns."""

    own_alone: float
    own: float
    """With the other busy."""
    other: float
    """With this one busy."""

    @property
    def gain(self) -> float:
        """By how much both carry more than this one alone, as a part of that."""
        return (self.own + self.other) / self.own_alone - 1.0

    def moved_bytes(self, idle_ns: float, wait_ns: float) -> float:
        """What goes over the other link, given its idle time meanwhile and the wait to shorten."""
        both_ns = self.own_alone * idle_ns / (self.own + self.other)
        return self.other * min(both_ns, wait_ns / self.gain)

    def saved_ns(self, nbytes: float) -> float:
        """By how much sooner this link is done if so many bytes go over the other."""
        return nbytes / self.other * self.gain


@final
class _Idle:
    """Time in which one direction of a link carries nothing; mutable."""

    def __init__(self, busy: Sequence[Transfer], step_ns: int) -> None:
        edges = np.linspace(0.0, max(step_ns, 1), _BINS + 1)
        times = np.array([t for one in busy for t in (one.start_ns, one.end_ns)], dtype=np.float64)
        lengths = np.diff(times)
        lengths[1::2] = 0.0
        total = np.concatenate([np.zeros(min(len(times), 1)), np.cumsum(lengths)])
        carried = np.interp(edges, times, total) if len(times) else np.zeros(_BINS + 1)
        self._free: Floats = np.maximum(np.diff(edges) - np.diff(carried), 0.0)
        self._bin_ns = float(edges[1])

    def within(self, start_ns: float, end_ns: float) -> float:
        """Idle time in ns between two moments."""
        return float(self._free[self._bins(start_ns, end_ns)].sum())

    def take(self, start_ns: float, end_ns: float, ns: float) -> None:
        """Counts so much of it as used, the last first."""
        bins = self._bins(start_ns, end_ns)
        later = np.cumsum(self._free[bins][::-1])[::-1]
        left = np.clip(later - ns, 0.0, self._free[bins])
        self._free[bins] = left

    def _bins(self, start_ns: float, end_ns: float) -> slice:
        return slice(int(start_ns / self._bin_ns), max(int(end_ns / self._bin_ns), 0))


@final
class _Splitter:
    """The search for one plan; mutable."""

    def __init__(self, problem: Problem, simulator: Simulator, enough_ns: int) -> None:
        self._problem = problem
        self._simulator = simulator
        self._enough_ns = enough_ns
        self._left = min(_MOST, _WORK // (len(problem.lifetimes) + 1))
        self._pairs = _pairs(problem, simulator)

    def run(self, migrations: Plan) -> Plan:
        """The best plan found."""
        if self._left <= 0:
            return migrations
        best = migrations, self._simulator.run(migrations, with_transfers=True)
        while not self._done(best[1]):
            found = self._divided(*best)
            if found is None:
                break
            best = self._placed_anew(*found)
        return best[0]

    def _done(self, timing: Timing) -> bool:
        return self._problem.is_late or self._left <= 0 or timing.step_ns <= self._enough_ns

    def _divided(self, migrations: Plan, timing: Timing) -> tuple[Plan, Timing] | None:
        """A faster plan with other splits, None if none was found."""
        wanted = _Proposals(self._problem, self._pairs, migrations, timing).made()
        tried = 0
        for part in _PARTS:
            count = max(round(part * len(wanted)), 1)
            if not wanted or count == tried or self._done(timing):
                break
            tried = count
            changed = list(migrations)
            for indices, host_bytes in wanted[:count]:
                for index in indices:
                    changed[index] = with_share(self._problem, changed[index], host_bytes)
            found = self._simulated(tuple(changed))
            if found is not None and found[1].step_ns < timing.step_ns:
                return found
        return None

    def _placed_anew(self, migrations: Plan, timing: Timing) -> tuple[Plan, Timing]:
        """The same splits with the best sites found for them."""
        best = migrations, timing
        once = timing.site_ns.astype(np.float64)
        arrive = np.concatenate([once, once[1:] + once[-1]])
        moves = _moves_of(self._problem, migrations)
        for pace in (EAGER, JUST_IN_TIME, RELAXED):
            if moves is None or self._done(best[1]):
                break
            found = self._simulated(place(self._problem, moves, arrive, pace))
            if found is not None and found[1].step_ns < best[1].step_ns:
                best = found
        return best

    def _simulated(self, migrations: Plan) -> tuple[Plan, Timing] | None:
        """The plan with its times, None if the other tiers cannot hold it."""
        problem = self._problem
        for tier, size in problem.tier_bytes.items():
            if (_taken(problem, migrations, tier) > size).any():
                return None
        self._left -= 1
        return migrations, self._simulator.run(migrations, with_transfers=True)


def _pairs(problem: Problem, simulator: Simulator) -> dict[tuple[Tier, Direction], _Pair]:
    """Of a machine with both links."""
    slots = slots_of(simulator.links)
    table = speeds(simulator.links, problem.hardware.device_port)
    pairs: dict[tuple[Tier, Direction], _Pair] = {}
    for (tier, direction), slot in slots.items():
        other = slots[_other(tier), direction]
        alone, both = table[1 << slot], table[1 << slot | 1 << other]
        pairs[tier, direction] = _Pair(own_alone=alone[slot], own=both[slot], other=both[other])
    return pairs


def _other(tier: Tier) -> Tier:
    return Tier.HOST if tier is Tier.STORAGE else Tier.STORAGE


def _taken(problem: Problem, migrations: Plan, tier: Tier) -> Curve:
    """Bytes of a tier in each interval."""
    if tier is Tier.HOST:
        migrations = tuple(m for m in migrations if m.tensor_id not in problem.host_copies)
    return tier_curve(problem.trace, migrations, tier, problem.spare_sites)


def with_share(problem: Problem, m: Migration, host_bytes: int) -> Migration:
    """The migration with so many of its bytes in host memory."""
    if host_bytes == problem.trace.tensors[m.tensor_id].nbytes:
        return replace(m, tier=Tier.HOST, host_bytes=0)
    return replace(m, tier=Tier.STORAGE, host_bytes=host_bytes)


def share_of(problem: Problem, m: Migration) -> int:
    """How many of its bytes a migration has in host memory."""
    return dict(m.parts(problem.trace.tensors[m.tensor_id].nbytes)).get(Tier.HOST, 0)


def _moves_of(problem: Problem, migrations: Plan) -> Moves | None:
    """What the migrations move, None if one of them is not in a period as a whole."""
    periods = problem.lifetimes
    rows_of = {
        period: row
        for row, period in enumerate(
            zip(
                periods.tensor_ids.tolist(),
                periods.start.tolist(),
                periods.end.tolist(),
                strict=True,
            )
        )
    }
    chosen: dict[int, Migration] = {}
    for m in migrations:
        row = rows_of.get((m.tensor_id, m.leave, m.needed))
        if row is None:
            return None
        chosen[row] = m
    rows = sorted(chosen)
    return Moves(
        rows=np.array(rows, dtype=np.int64),
        tiers=tuple(chosen[row].tier for row in rows),
        host_bytes=tuple(chosen[row].host_bytes for row in rows),
        clean=tuple(chosen[row].clean for row in rows),
    )


@final
class _Proposals:
    """Which shares of host memory would shorten the waits of a simulated plan; mutable."""

    def __init__(
        self,
        problem: Problem,
        pairs: dict[tuple[Tier, Direction], _Pair],
        migrations: Plan,
        timing: Timing,
    ) -> None:
        self._problem, self._pairs = problem, pairs
        self._migrations, self._timing = migrations, timing
        self._queues: dict[tuple[Tier, Direction], list[Transfer]] = {link: [] for link in pairs}
        self._place: dict[tuple[int, Tier, Direction], int] = {}
        """Where in its queue the copy of a migration is that ends last."""
        for transfer in timing.transfers:
            queue = self._queues[transfer.tier, transfer.direction]
            self._place[transfer.migration, transfer.tier, transfer.direction] = len(queue)
            queue.append(transfer)
        self._idle = {link: _Idle(queue, timing.step_ns) for link, queue in self._queues.items()}
        self._rooms = {
            tier: Room(size - _taken(problem, migrations, tier))
            for tier, size in problem.tier_bytes.items()
        }
        self._together = together(migrations)
        self._treated: set[int] = set()
        self._looks_left = _MOST_LOOKS
        self._made: list[tuple[tuple[int, ...], int]] = []

    def made(self) -> list[tuple[tuple[int, ...], int]]:
        """Migrations that are to have so many bytes in host memory, the most important first.

        Those that rely on one copy are together.
        """
        for wait in sorted(self._timing.waits, key=lambda wait: (-wait.duration_ns, wait.site)):
            if self._looks_left <= 0:
                break
            if wait.migration < len(self._migrations):
                self._treat(wait)
        return self._made

    def _treat(self, wait: Wait) -> None:
        """Proposes splits for what a wait is for, and for what its link did just before."""
        end_ns = wait.start_ns + wait.duration_ns
        places = [
            (abs(self._queues[link][place].end_ns - end_ns), link, place)
            for link in self._pairs
            if link[1] is wait.direction
            for place in [self._place.get((wait.migration, *link))]
            if place is not None
        ]
        if not places:
            return  # it began in the step before
        _, link, place = min(places)
        pair, left_ns = self._pairs[link], float(wait.duration_ns)
        if pair.gain < _LEAST_GAIN:
            return
        for transfer in _row(self._queues[link], place):
            if left_ns <= 0.0:
                break
            self._looks_left -= 1
            nbytes = self._move(transfer, pair, left_ns)
            left_ns -= pair.saved_ns(nbytes)

    def _move(self, transfer: Transfer, pair: _Pair, wait_ns: float) -> int:
        """Moves a part of one copy to the other link; its bytes."""
        index = transfer.migration
        if not self._may_split(index):
            return 0
        m, to = self._migrations[index], _other(transfer.tier)
        begin_ns, end_ns = float(self._asked_ns(m, transfer)), float(transfer.end_ns)
        idle = self._idle[to, transfer.direction]
        wanted = pair.moved_bytes(idle.within(begin_ns, end_ns), wait_ns)
        room = min(self._room(other, to) for other in self._together[index])
        moved = int(min(wanted, room, transfer.nbytes))
        share = share_of(self._problem, m)
        host_bytes = share + moved if to is Tier.HOST else share - moved
        host_bytes = self._problem.cut(m.tensor_id, host_bytes)
        moved = abs(host_bytes - share)
        if moved == 0 or moved > room:
            return 0
        idle.take(begin_ns, end_ns, moved / pair.other)
        together = self._together[index]
        self._made.append((together, host_bytes))
        self._treated.update(together)
        for other in together:
            self._rooms[to].add(*self._span(other), -moved)
        return moved

    def _may_split(self, index: int) -> bool:
        if index >= len(self._migrations) or index in self._treated:
            return False
        m = self._migrations[index]
        shares = {share_of(self._problem, self._migrations[i]) for i in self._together[index]}
        return self._problem.may_be_split(m.tensor_id) and len(shares) == 1

    def _asked_ns(self, m: Migration, transfer: Transfer) -> int:
        """When the copy was queued; 0 if that was in the step before."""
        site = m.leave if transfer.direction is Direction.OUT else m.back
        site -= transfer.steps_before * self._problem.lifetimes.num_sites
        return int(self._timing.site_ns[site]) if site > 0 else 0

    def _room(self, index: int, tier: Tier) -> int:
        return self._rooms[tier].least(*self._span(index))

    def _span(self, index: int) -> tuple[int, int]:
        """From where to where a migration takes space; all of the step where copies are kept."""
        num_sites, spare = self._problem.lifetimes.num_sites, self._problem.spare_sites
        m = self._migrations[index]
        if len(self._together[index]) > 1:
            return 0, num_sites
        first = m.leave - spare
        return first, min(m.needed + spare, first + num_sites)


def _row(queue: Sequence[Transfer], place: int) -> Iterator[Transfer]:
    """The copy at `place` and those before it that kept the link busy, the last first."""
    for now in range(place, max(place - _LONGEST_ROW, -1), -1):
        yield queue[now]
        if now and queue[now].start_ns - queue[now - 1].end_ns > _GAPLESS_NS:
            return


def together(migrations: Plan) -> list[tuple[int, ...]]:
    """For each migration those of which one relies on what another has written, itself included."""
    of_tensor: dict[int, list[int]] = defaultdict(list)
    for index, m in enumerate(migrations):
        of_tensor[m.tensor_id].append(index)
    linked = {i for i, indices in of_tensor.items() if any(migrations[k].clean for k in indices)}
    return [
        tuple(of_tensor[m.tensor_id]) if m.tensor_id in linked else (index,)
        for index, m in enumerate(migrations)
    ]
