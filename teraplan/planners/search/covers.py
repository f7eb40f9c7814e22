"""The best of all ways to have enough bytes away everywhere, for steps of few idle periods.

    sites             1   2   3   4   5        states, each with the time of its step
    over the budget   #   #       #
    a is idle         [===========]            {}  ->  a 1..2  ->  a 1..3  ->  a 1..3, b 4..5
    b is idle             [===========]                        ->  a 1..2, b 2..3  ->  ...

Beside how early copies come, a plan is known by where each tensor is away, and that needs to be no
more than what is over the budget. The search begins with nothing moved. At the first site where
bytes are still over the budget, one more period can be spent elsewhere there, in each tier, or one
that is already elsewhere can last until there: these are the next states. Each is simulated, and
the one with the shortest step goes on. What moves more takes no less time; so the first state that
is nowhere over the budget is the fastest. That is not quite so where a copy that comes early lets
another one pass, and not where a copy is made early so that a tensor can be dropped later: that,
and sites within the memory that is left, is for `polish`.
"""

import heapq
from collections.abc import Iterator
from dataclasses import replace
from typing import final

import numpy as np

from teraplan.planners.base import Planner, Problem
from teraplan.planners.baselines.simple import SIMPLE, plan_or_none
from teraplan.planners.baselines.teraio import PUBLISHED
from teraplan.planners.search.polish import polish
from teraplan.planners.search.small_step import Plan, SmallStep, StepTimes
from teraplan.simulation.memory_curve import Curve
from teraplan.simulation.simulator import LONGEST_NS
from teraplan.values.plan import Migration

_MOST_PERIODS = 10
"""Idle periods up to which the search mostly ends before its simulations are used up."""

_OTHER_STARTS: tuple[Planner, ...] = (*SIMPLE.values(), PUBLISHED["teraio"])
_MOST_FOR_THEM = 14
"""Idle periods up to which plans near those of these policies are looked for, too."""

_State = tuple[Migration | None, ...]
"""What is done with each idle period, in the order of `Lifetimes`."""


def plan_small_step(
    problem: Problem, times: StepTimes, found: Plan | None, enough_ns: int
) -> Plan | None:
    """A plan of whole tensors that is no slower than `found`; near the best if periods are few.

    Args:
        problem: the step and the machine.
        times: of plans for it.
        found: a plan that holds, None if none has been found.
        enough_ns: a lower bound on the step.
    """
    found_ns = None if found is None else times.step_ns(found)
    few = len(problem.lifetimes) <= _MOST_PERIODS
    if found_ns is None or (few and found_ns > enough_ns):
        found = best_cover(SmallStep(problem, times), found_ns) or found
    if found is None:
        found = best_cover(SmallStep(problem, times), briefly=True)
    if found is None:
        return None
    return _best_polished(problem, times, found, enough_ns)


def _best_polished(problem: Problem, times: StepTimes, found: Plan, enough_ns: int) -> Plan:
    """The best plan near `found`, or near one of quite another kind."""
    best = polish(SmallStep(problem, times), found, enough_ns, split=False)
    few = len(problem.lifetimes) <= _MOST_FOR_THEM
    for planner in _OTHER_STARTS if few and not problem.draft else ():
        if problem.is_late or times.step_ns(best) <= enough_ns:
            break
        start = plan_or_none(planner, problem)
        if start is not None:
            step = SmallStep(problem, times)
            other = polish(step, start, enough_ns, split=False)
            best = min(best, other, key=times.step_ns)
    return best


def best_cover(
    step: SmallStep, below_ns: int | None = None, *, briefly: bool = False
) -> Plan | None:
    """The fastest plan that moves only what is over the budget, in whole tensors.

    None if it does not take less than `below_ns`, or is not found with the simulations of `step`.

    Args:
        step: to be planned.
        below_ns: what another plan takes.
        briefly: copies take room in other tiers for no longer than their tensors are away, which
            is slower: several can have the same room one after the other. The first plan that is
            found will do.
    """
    search = _Search(step, briefly)
    start: _State = (None,) * len(step.problem.lifetimes)
    seen: set[_State] = {start}
    queue: list[tuple[int, int, int, _State, Plan]] = [(0, 0, 0, start, ())]
    while queue and not step.spent():
        *_, state, plan = heapq.heappop(queue)
        over = search.bytes_over(state)
        if not over.any():
            return plan
        for other in search.after(state, int(np.flatnonzero(over)[0])):
            held = None if other in seen else step.settled(tuple(m for m in other if m is not None))
            seen.add(other)
            if held is None:
                continue
            ns = step.step_ns(held, LONGEST_NS if below_ns is None else below_ns)
            if below_ns is None or ns < below_ns:
                left = int(search.bytes_over(other).sum())
                cost = (left, ns) if briefly else (ns, left)  # any plan, or the fastest
                heapq.heappush(queue, (*cost, len(seen), other, held))
    return None


@final
class _Search:
    """What can be done about a step, state by state."""

    def __init__(self, step: SmallStep, briefly: bool) -> None:
        self._problem, self._briefly = step.problem, briefly
        self._pressure = step.problem.pressure()

    def bytes_over(self, state: _State) -> Curve:
        """Bytes over the budget in each interval."""
        left = self._pressure.copy()
        tensors = self._problem.trace.tensors
        for m in state:
            if m is not None:
                left[np.arange(m.gone, m.back) % len(left)] -= tensors[m.tensor_id].nbytes
        return np.maximum(left, 0)

    def after(self, state: _State, site: int) -> Iterator[_State]:
        """States in which one tensor more is away at `site`."""
        periods = self._problem.lifetimes
        for row in periods.idle_at(site).tolist():
            here = site if site >= periods.start[row] else site + periods.num_sites
            for m in self._ways(state[row], row, here):
                yield (*state[:row], m, *state[row + 1 :])

    def _ways(self, m: Migration | None, row: int, here: int) -> Iterator[Migration]:
        if m is not None:
            if not m.gone <= here < m.back:
                yield self._timed(m, min(m.gone, here), max(m.back, here + 1))
            return
        periods, problem = self._problem.lifetimes, self._problem
        tensor_id = int(periods.tensor_ids[row])
        for tier in problem.tiers_of(tensor_id):
            whole = Migration(
                tensor_id=tensor_id,
                leave=int(periods.start[row]),
                gone=here,
                back=here + 1,
                needed=int(periods.end[row]),
                tier=tier,
            )
            yield self._timed(whole, here, here + 1)

    def _timed(self, m: Migration, gone: int, back: int) -> Migration:
        if self._briefly:
            return replace(m, leave=gone, gone=gone, back=back, needed=back)
        return replace(m, gone=gone, back=back)
