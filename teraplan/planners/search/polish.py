"""The last step for small problems: changes one migration or two at a time while that helps.

A plan for a handful of tensors can be near the best in all but one site. So each migration's sites
are moved one by one, its tier is changed, it is dropped, or another idle period is moved too; what
keeps the budgets and shortens the simulated step stays. Dropping one and adding another is one
change. After each, all copies are kept that something can rely on: a tensor that goes out early for
no other reason can be dropped later. The number of simulations is bounded, so the result depends on
the problem alone.
"""

from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations, permutations, product
from typing import final

import numpy as np

from teraplan.planners.placing.victims import ORDERS, choose
from teraplan.planners.search.small_step import Plan, SmallStep
from teraplan.simulation.memory_curve import Curve
from teraplan.values.hardware import Tier
from teraplan.values.plan import Migration


@final
class _Polish:
    def __init__(self, step: SmallStep, split: bool) -> None:
        self._step, self._split = step, split
        self._problem = step.problem
        self._looks = _LOOKS * step.simulations_left
        self._seen: set[Plan] = set()

    def run(self, migrations: Plan, enough_ns: int) -> Plan:
        best, best_ns = migrations, self._step.step_ns(migrations)
        improved = True
        while improved and best_ns > enough_ns:
            improved = False
            for raw in self._neighbours(best):
                if self._step.spent() or self._looks <= 0:
                    return best
                self._looks -= 1
                other = self._new(raw)
                if other is None:
                    continue
                ns = self._step.step_ns(other, best_ns)
                if ns < best_ns:
                    best, best_ns, improved = other, ns, True
                    break
        return best

    def _new(self, raw: Plan) -> Plan | None:
        """The plan with the copies that it keeps; None if it does not hold or was there before."""
        plan = self._step.settled(raw) if self._step.fits(raw) else None
        if plan is None or plan in self._seen:
            return None
        self._seen.add(plan)
        return plan

    def _neighbours(self, plan: Plan) -> Iterator[Plan]:
        yield plan  # a policy may not have kept all copies
        for i, m in enumerate(plan):
            for changed in self._changes(m):
                yield (*plan[:i], changed, *plan[i + 1 :])
        yield from self._others(plan)
        yield from self._refilled(plan)
        yield from _relieved(plan)
        for i, j in combinations(range(len(plan)), 2):
            for one, two in product(tuple(self._changes(plan[i])), tuple(self._changes(plan[j]))):
                yield (*plan[:i], one, *plan[i + 1 : j], two, *plan[j + 1 :])

    def _changes(self, m: Migration) -> Iterator[Migration]:
        yield from _at_other_sites(m)
        if m.tensor_id not in self._problem.only_tier:
            yield from self._elsewhere(m)

    def _elsewhere(self, m: Migration) -> Iterator[Migration]:
        """The same in another tier, or with another part of it in host memory."""
        for tier in self._problem.tier_bytes:
            if tier is not m.tier or m.host_bytes:
                yield replace(m, tier=tier, host_bytes=0)
        for host_bytes in self._shares(m.tensor_id):
            if host_bytes != m.host_bytes:
                yield replace(m, tier=Tier.STORAGE, host_bytes=host_bytes)

    def _shares(self, tensor_id: int) -> list[int]:
        """Bytes in host memory with which both parts take as long on their way out, or back."""
        host, storage = (self._problem.links.get(tier) for tier in (Tier.HOST, Tier.STORAGE))
        nbytes = self._problem.trace.tensors[tensor_id].nbytes
        if not self._split or not host or not storage or tensor_id in self._problem.host_copies:
            return []
        parts = (
            host.out_bytes_per_s / (host.out_bytes_per_s + storage.out_bytes_per_s),
            host.back_bytes_per_s / (host.back_bytes_per_s + storage.back_bytes_per_s),
        )
        cuts = {self._problem.cut(tensor_id, int(nbytes * part)) for part in parts}
        return sorted(cuts - {0, nbytes})

    def _others(self, plan: Plan) -> Iterator[Plan]:
        """Plans with one period less, one more, or one for another."""
        added: list[Migration] = []
        for row in self._unused(plan):
            for tier in self._problem.tiers_of(int(self._problem.lifetimes.tensor_ids[row])):
                whole = self._whole(row, tier)
                ways = _ways(whole.leave, whole.needed)
                added += [replace(whole, gone=gone, back=back) for gone, back in ways]
        for i in range(len(plan)):
            yield (*plan[:i], *plan[i + 1 :])
        for new in added:
            yield (*plan, new)
        for i in range(len(plan)):
            for new in added:
                yield (*plan[:i], *plan[i + 1 :], new)

    def _unused(self, plan: Plan) -> list[int]:
        """Rows of the idle periods in which nothing moves."""
        periods = self._problem.lifetimes
        columns = (periods.tensor_ids, periods.start, periods.end)
        return [
            row
            for row, (tensor_id, start, end) in enumerate(
                zip(*(column.tolist() for column in columns), strict=True)
            )
            if not any(  # what moves may leave later than at the start
                m.tensor_id == tensor_id and start <= m.leave and m.needed <= end for m in plan
            )
        ]

    def _whole(self, row: int, tier: Tier) -> Migration:
        """Away for all of an idle period."""
        periods = self._problem.lifetimes
        start, end = int(periods.start[row]), int(periods.end[row])
        tensor_id = int(periods.tensor_ids[row])
        return Migration(
            tensor_id=tensor_id, leave=start, gone=start, back=end, needed=end, tier=tier
        )

    def _refilled(self, plan: Plan) -> Iterator[Plan]:
        """Plans in which one stays where it is, and as many others as it takes go for it."""
        periods = self._problem.lifetimes
        allowed = np.zeros(len(periods), dtype=bool)
        allowed[self._unused(plan)] = True
        for i in range(len(plan)):
            rest = (*plan[:i], *plan[i + 1 :])
            missing = self._step.missing(rest)
            orders = (order(periods, missing) for order in ORDERS)
            chosen = [choose(periods, missing, order, allowed) for order in orders]
            ways = (tuple(rows.tolist()) for rows in chosen if rows is not None)
            for rows, tier in product(dict.fromkeys(ways), self._problem.tier_bytes):
                new = tuple(self._shortly(row, tier, missing) for row in rows)
                if all(tier in self._problem.tiers_of(m.tensor_id) for m in new):
                    yield (*rest, *new)

    def _shortly(self, row: int, tier: Tier, missing: Curve) -> Migration:
        """Away from the first to the last place in its idle period at which bytes are missing."""
        whole = self._whole(row, tier)
        places = np.flatnonzero(missing[np.arange(whole.leave, whole.needed) % len(missing)])
        gone, last = whole.leave + int(places[0]), whole.leave + int(places[-1])
        return replace(whole, gone=gone, back=last + 1)


def _at_other_sites(m: Migration) -> Iterator[Migration]:
    """The same, away for longer or shorter, or written later."""
    for gone in range(m.leave, m.back):
        if gone != m.gone:
            yield replace(m, gone=gone)
    for back in range(m.gone + 1, m.needed + 1):
        if back != m.back:
            yield replace(m, back=back)
    for gone, back in _ways(m.leave, m.needed):
        if gone != m.gone and back != m.back:
            yield replace(m, gone=gone, back=back)
    for leave in range(m.leave + 1, m.gone + 1):
        yield replace(m, leave=leave)


def _relieved(plan: Plan) -> Iterator[Plan]:
    """Plans in which one stays where it is, and another makes room by being away for longer."""
    for i, j in permutations(range(len(plan)), 2):
        m = plan[j]
        for longer in (replace(m, gone=m.leave), replace(m, back=m.needed)):
            if longer != m:
                yield tuple(longer if k == j else one for k, one in enumerate(plan) if k != i)


_LOOKS = 6
"""Plans that are looked at for each that may be simulated."""
_SHORT = 6
"""Sites of an idle period up to which every way to spend it elsewhere is tried."""


def _ways(start: int, end: int) -> list[tuple[int, int]]:
    """Places (gone, back) in an idle period: all, or its ends and its thirds."""
    if end - start <= _SHORT:
        return [(a, b) for a in range(start, end) for b in range(a + 1, end + 1)]
    places = sorted({start, start + (end - start) // 3, end - (end - start) // 3, end})
    return list(combinations(places, 2))


def polish(step: SmallStep, migrations: Plan, enough_ns: int, *, split: bool) -> Plan:
    """A plan that is no slower than `migrations`; stops at `enough_ns`.

    Args:
        step: what is planned.
        migrations: a plan that holds.
        enough_ns: a lower bound on the step.
        split: whether tensors may be split between tiers.
    """
    found = _Polish(step, split).run(migrations, enough_ns)
    return tuple(sorted(found, key=lambda m: m.leave))
