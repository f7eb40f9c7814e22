"""The planner "teraplan": many ways to place transfers, each simulated and repaired from its waits.

    pressure -> victims (6 orders) -> tiers (4 spreads) -> placement (3 paces) -> simulate
        ^                                                       |                    |
        +---- more bytes away before the sites that wait <------+-- real times <-----+
                                          the best -> split -> copies out later -> simulate

Only what is over the budget is moved. The simulation of the best attempt says where the computation
waits: there, later attempts ask for more free memory, so that copies in can start earlier, take
transfers there as dearer, and place them by the times of sites as they are with the waits. The
search ends when an attempt meets the lower bound (`bound`) or its number of attempts, which depends
on the size of the step alone, is used up. In steps of up to 500 idle periods all orders and all
published policies are compared in any case: of plans that are equally fast the one counts with
which links are busy for the shortest time, as copies cost wear, and time of the processor that
nobody simulates: each byte of them, and each copy. The same input always gives the same plan.

To make more memory never slower, plans for smaller budgets are tried too in steps of up to 500 idle
periods: those at the eighths of the way from the least budget to the unlimited peak that lie below
the budget, if the bound does not rule them out. So a budget at or above such an eighth is never
slower than the eighth itself; beside updates on the host, for several numbers of which plans are
made, two of them are tried. In such steps the plans of all published policies are attempts too, a
step of up to 10 is searched from nothing moved (`covers`), and the best plan of one of up to 60 is
polished (`polish`, `shares`). Tensors are split between tiers in the best plan and two others
(`tier_split`). A step of more than 1,000 is planned on a coarse copy (`coarse`); up to 20,000 it is
compared with simple policies on the step itself, one of about 1,000 with all published ones, and of
2,000 with G10's, which are quick. What has more than 20,000 even as a coarse copy is
planned in three attempts: each takes a second or two there. A draft has none of what is below its
own budget, and is polished only where there is no plan otherwise.
"""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import final

import numpy as np

from teraplan.planners.base import Problem, no_placement
from teraplan.planners.baselines.simple import SIMPLE, plan_or_none
from teraplan.planners.baselines.teraio import PUBLISHED
from teraplan.planners.placing.placement import (
    EAGER,
    JUST_IN_TIME,
    RELAXED,
    Moves,
    Pace,
    place,
    with_reasons,
)
from teraplan.planners.placing.tiers import Spread, assign
from teraplan.planners.placing.victims import Order, Priced, choose
from teraplan.planners.search.coarse import coarsen, hardly_coarser, slots_for
from teraplan.planners.search.covers import plan_small_step
from teraplan.planners.search.finishing import (
    NEAR,
    PLENTY,
    best_of_step_itself,
    bound_ns,
    finished,
    near_bound_ns,
)
from teraplan.planners.search.first_attempts import (
    OTHER_SPREADS,
    SECOND_SPREADS,
    all_spreads,
    first_orders,
    first_spreads,
)
from teraplan.planners.search.polish import polish
from teraplan.planners.search.rungs import rungs
from teraplan.planners.search.shares import divide
from teraplan.planners.search.small_step import SmallStep, StepTimes
from teraplan.planners.search.tier_split import splits_can_help
from teraplan.simulation.lifetimes import Floats
from teraplan.simulation.memory_curve import Curve
from teraplan.simulation.simulator import Simulator, Timing
from teraplan.values.plan import Migration
from teraplan.values.run_record import Direction

_Plan = tuple[Migration, ...]

_PACES = (EAGER, JUST_IN_TIME, RELAXED)
_WEIGHTS = (0.3, 1.0)
"""How much the price of a transfer counts beside the order of the attempt that it repairs."""
_BACKLOG = 4
"""A wait makes transfers dearer for this many times its length before it."""
_MANY = 1000
"""Idle periods from which on the step is planned coarsely."""
_FEW = 60
"""Idle periods up to which plans are changed one migration at a time."""
_WORK, _LEAST, _MOST, _MOST_OF_FEW = 110_000, 3, 60, 200
"""Idle periods times attempts of one search, and the least and the most attempts."""
_LONG = 3000
"""Idle periods up to which splits begin from other plans, too, than the best one."""
_ENOUGH = 12
"""Attempts that must be left for every way to spread tensors over tiers to be tried."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Chosen:
    """What moves, and what follows from how it was chosen."""

    pressure: Curve
    order: Order
    spread: Spread
    moves: Moves | None
    """None if nothing was found that fits."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Attempt:
    """A simulated plan and how it was made."""

    cost: tuple[int, int]
    """Time of the step in ns, then that of the links: less is better."""
    migrations: tuple[Migration, ...]
    timing: Timing
    chosen: _Chosen
    pace: Pace


@dataclass(frozen=True, slots=True)
class _Solved:
    """The best plan for one budget."""

    cost: tuple[int, int]
    migrations: tuple[Migration, ...]


def plan_by_stalls(problem: Problem) -> tuple[Migration, ...]:
    """The migrations of the fastest plan found.

    Raises:
        InfeasibleBudgetError: if the chosen tensors fit in no way into the other tiers.
    """
    if not problem.pressure().any():
        return ()
    many, plenty = (len(problem.lifetimes) > limit for limit in (_MANY, PLENTY))
    num_slots = slots_for(problem.trace)
    if many and not (plenty and hardly_coarser(problem, num_slots)):
        coarse = coarsen(problem, num_slots)
        simulator = coarse.problem.simulator()
        found = _searched(coarse.problem, simulator)
        if found is not None:
            starts = _other_starts(coarse.problem, simulator)
            plans = finished(coarse.problem, simulator, found.migrations, starts)
            return with_reasons(problem, best_of_step_itself(problem, map(coarse.expand, plans)))
        # whole slots need more of the other tiers than the step does, and these are nearly full
    plan = _search_all(problem)
    if NEAR < len(problem.lifetimes) <= _MANY:
        plan = best_of_step_itself(problem, iter([plan]))
    return with_reasons(problem, plan)


def _search_all(problem: Problem) -> tuple[Migration, ...]:
    """The best of this budget and of the rungs below it."""
    simulator = problem.simulator()
    times = StepTimes(simulator)
    best = _solve(problem, simulator, times)
    for rung in rungs(problem):
        lower = problem.within(rung)
        if best is not None and bound_ns(lower) >= best.cost[0]:
            break
        best = _better(best, _solve(lower, simulator, times))
    if best is None:
        raise no_placement(problem)
    return best.migrations


def _better(one: _Solved | None, other: _Solved | None) -> _Solved | None:
    there = (solved for solved in (one, other) if solved is not None)
    return min(there, key=lambda solved: solved.cost, default=None)


def _solve(problem: Problem, simulator: Simulator, times: StepTimes) -> _Solved | None:
    """The best for one budget; where the step is small, by all that it can be changed to."""
    attempt = _searched(problem, simulator)
    plans: list[_Plan] = []
    if attempt is not None:
        starts = _other_starts(problem, simulator)
        plans += finished(problem, simulator, attempt.migrations, starts)
    if len(problem.lifetimes) <= _FEW and not (problem.draft and plans):
        whole = None if attempt is None else attempt.migrations
        found = plan_small_step(problem, times, whole, bound_ns(problem))
        if found is not None and found != whole:
            plans.append(finished(problem, simulator, found)[0])
        if plans and problem.may_split():
            best = min(plans, key=times.step_ns)
            best = polish(SmallStep(problem, times), best, bound_ns(problem), split=True)
            plans.append(divide(SmallStep(problem, times), best, bound_ns(problem)))
    costs = [(times.step_ns(plan), problem.links_ns(plan)) for plan in plans]
    return min(map(_Solved, costs, plans), key=lambda s: s.cost, default=None)


def _searched(problem: Problem, simulator: Simulator) -> _Attempt | None:
    """The best attempt of a search among all spreads, or of one with a certain one.

    A search decides by its first attempts. Behind a port that one link fills, what goes over both
    is no faster, and each copy that is waited for gets a part of it: to use the other where the
    first has no room is better in the end. Else it may be to use both alike.
    """
    found = _Search(problem, simulator, all_spreads(problem)).run()
    is_short = len(problem.lifetimes) <= NEAR and len(problem.links) > 1
    if found is None or not is_short or found.cost[0] <= near_bound_ns(problem):
        return found
    spread, most = SECOND_SPREADS[problem.hardware.device_port is not None]
    other = _Search(problem, simulator, (spread,), most).run()
    return found if other is None or found.cost <= other.cost else other


def _other_starts(problem: Problem, simulator: Simulator) -> Iterator[_Plan]:
    """Plans of few attempts each, not the best ones, from which splits begin as well."""
    if _FEW < len(problem.lifetimes) <= _LONG and splits_can_help(problem, simulator):
        for spread in OTHER_SPREADS:
            found = _Search(problem, simulator, (spread,), most=_LEAST).run()
            if found is not None and not problem.is_late:
                yield found.migrations


def _num_attempts(num_periods: int) -> int:
    most = _MOST_OF_FEW if num_periods <= NEAR else _MOST
    return max(_LEAST, min(most, _WORK // (num_periods + 1)))


@final
class _Search:
    """The attempts for one budget."""

    def __init__(
        self,
        problem: Problem,
        simulator: Simulator,
        spreads: tuple[Spread, ...],
        most: int = _MOST_OF_FEW,
    ) -> None:
        self._problem = problem
        self._spreads = spreads
        self._simulator = simulator
        self._bound = near_bound_ns(problem)
        self._left = min(most, _num_attempts(len(problem.lifetimes)))
        self._is_long = len(problem.lifetimes) > PLENTY
        self._best: _Attempt | None = None
        self._prices = np.zeros((2, problem.lifetimes.num_sites))
        """How much the computation has waited for copies out and in near each site."""
        self._seen: set[tuple[object, ...]] = set()
        self._is_short = self._compares = len(problem.lifetimes) <= NEAR
        """Compares: attempts go on at the bound: one that is as fast may need links less."""

    def run(self) -> _Attempt | None:
        """The best attempt; None if nothing fits into the other tiers."""
        pressure = self._problem.pressure()
        ideal = self._problem.lifetimes.site_ns.astype(np.float64)
        for order in first_orders(self._problem):
            for spread in first_spreads(self._problem, self._spreads):
                self._try(self._choose(pressure, order, spread), EAGER, ideal)
        rough = self._problem.draft and len(self._problem.lifetimes) > _FEW
        if self._best is None or self._is_long or rough:
            return self._with_real_times()
        if self._best.cost[0] <= self._bound:
            self._try_baseline()
        self._compares = False
        if self._left >= _ENOUGH:
            order = self._best.chosen.order
            for spread in self._spreads:
                self._try(self._choose(pressure, order, spread), EAGER, ideal)
        self._try_baseline()
        for pace in _PACES[1:]:
            self._try(self._best.chosen, pace, ideal)
        self._repair(pressure)
        for part in (16, 8, 4, 2, 1):
            reserve = (self._problem.limit_bytes - self._problem.least.nbytes) // part
            more = self._problem.pressure(self._problem.limit_bytes - reserve)
            best = self._best
            chosen = self._choose(more, best.chosen.order, best.chosen.spread)
            self._try(chosen, best.pace, self._arrive(best))
        return self._best

    def _with_real_times(self) -> _Attempt | None:
        """The best after one attempt more, which places the same by the times with its waits."""
        if self._best is not None:
            self._try(self._best.chosen, EAGER, self._arrive(self._best))
        return self._best

    def _try_baseline(self) -> None:
        """Plans of the policies to compare with as further attempts, where they take no time."""
        for planner in (*SIMPLE.values(), *(PUBLISHED.values() if self._is_short else ())):
            if self._done() or self._best is None:
                return
            migrations = plan_or_none(planner, self._problem)
            if migrations is None:
                continue
            timing = self._simulator.run(migrations)
            cost = timing.step_ns, self._problem.links_ns(migrations)
            if cost < self._best.cost:
                self._best = replace(self._best, cost=cost, migrations=migrations, timing=timing)

    def _repair(self, pressure: Curve) -> None:
        """Asks for memory where the best attempt waits, as long as that helps."""
        extra = np.zeros_like(pressure)
        misses = 0
        while misses < 4 and self._best is not None and not self._done():
            before = self._best
            extra += self._missing(before)
            wanted = np.minimum(pressure + extra, self._problem.idle)
            self._raise_prices(before)
            arrive = self._arrive(before)
            order, spread = before.chosen.order, before.chosen.spread
            more = self._choose(wanted, order, spread)
            plain = before.chosen
            if plain.pressure is not pressure:
                plain = self._choose(pressure, order, spread)
            for pace in _PACES:
                self._try(more, pace, arrive)
                self._try(plain, pace, arrive)
            for weight in _WEIGHTS:
                priced = Priced(order, self._prices.copy(), weight)
                self._try(self._choose(pressure, priced, spread), before.pace, arrive)
                self._try(self._choose(wanted, priced, spread), before.pace, arrive)
            misses = 0 if self._best.cost < before.cost else misses + 1

    def _raise_prices(self, attempt: _Attempt) -> None:
        """Makes transfers dearer where the computation waits for them and just before."""
        site_ns = attempt.timing.site_ns
        for wait in attempt.timing.waits:
            side = int(wait.direction is Direction.BACK)
            early = site_ns[wait.site] - _BACKLOG * wait.duration_ns
            first = min(int(np.searchsorted(site_ns, early)), wait.site)
            self._prices[side, first : wait.site + 1] += wait.duration_ns

    def _missing(self, attempt: _Attempt) -> Curve:
        """Bytes per interval that, had they been free, would have shortened the waits."""
        problem = self._problem
        num_sites = problem.lifetimes.num_sites
        extra = np.zeros(num_sites, dtype=np.int64)
        site_ns = attempt.timing.site_ns
        for wait in attempt.timing.waits:
            if wait.migration >= len(attempt.migrations):
                continue  # an update on the host, whose sites are given
            m = attempt.migrations[wait.migration]
            nbytes = problem.trace.tensors[m.tensor_id].nbytes
            link = problem.links[m.tier]  # of a split one, the part that takes longer as a rule
            if wait.direction is Direction.BACK:
                moved = min(nbytes, wait.duration_ns * link.back_bytes_per_s // 10**9)
                back = min(m.back, num_sites) if m.back <= wait.site else 0
                early = site_ns[back] - wait.duration_ns
                first = max(int(np.searchsorted(site_ns, early, side="right")) - 1, 0)
                extra[first : max(wait.site, first + 1)] += moved
            else:
                moved = min(nbytes, wait.duration_ns * link.out_bytes_per_s // 10**9)
                late = site_ns[wait.site + 1] + wait.duration_ns
                last = min(int(np.searchsorted(site_ns, late)), num_sites)
                extra[wait.site : max(last, wait.site + 1)] += moved
        return extra

    def _arrive(self, attempt: _Attempt) -> Floats:
        """Times of sites in two steps, with the waits of an attempt."""
        once = attempt.timing.site_ns.astype(np.float64)
        return np.concatenate([once, once[1:] + once[-1]])

    def _done(self) -> bool:
        best = self._best
        if self._left <= 0 or best is None:
            return self._left <= 0
        return self._problem.is_late or (not self._compares and best.cost[0] <= self._bound)

    def _choose(self, pressure: Curve, order: Order, spread: Spread) -> _Chosen:
        """What moves; nothing is looked for if the search is over."""
        periods, moves = self._problem.lifetimes, None
        if not self._done():
            rows = choose(periods, pressure, order(periods, pressure))
            moves = None if rows is None else assign(self._problem, rows, spread)
        return _Chosen(pressure=pressure, order=order, spread=spread, moves=moves)

    def _try(self, chosen: _Chosen, pace: Pace, arrive: Floats) -> None:
        """Makes, simulates and perhaps keeps one plan; nothing if the search is over."""
        if self._done():
            return
        self._left -= 1
        moves = chosen.moves
        if moves is None or not self._is_new(moves, pace, arrive):
            return
        migrations = place(self._problem, moves, arrive, pace)
        timing = self._simulator.run(migrations)
        if self._best is not None and timing.step_ns > self._best.cost[0]:
            return
        cost = timing.step_ns, self._problem.links_ns(migrations)
        if self._best is None or cost < self._best.cost:
            self._best = _Attempt(
                cost=cost, migrations=migrations, timing=timing, chosen=chosen, pace=pace
            )

    def _is_new(self, moves: Moves, pace: Pace, arrive: Floats) -> bool:
        key = hashlib.blake2b(moves.rows.tobytes() + arrive.tobytes()).hexdigest()
        if (key, moves.tiers, pace) in self._seen:
            return False
        self._seen.add((key, moves.tiers, pace))
        return True
