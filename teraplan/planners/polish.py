"""The last step for small problems: changes one migration or two at a time while that helps.

A plan for a handful of tensors can be near the best in all but one site. So each migration's sites
are moved one by one, its tier is changed, it is dropped, or another idle period is moved too; what
keeps the budgets and shortens the simulated step stays. Dropping one and adding another is one
change. The number of simulations is bounded, so the result depends on the problem alone.
"""

from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations, product
from typing import final

from teraplan.hardware import Tier
from teraplan.memory_curve import managed_curve, tier_curve
from teraplan.plan import Migration
from teraplan.planners.base import Problem
from teraplan.simulator import Simulator

Plan = tuple[Migration, ...]


@final
class _Polish:
    def __init__(
        self, problem: Problem, simulator: Simulator, simulations: int, split: bool
    ) -> None:
        self._problem, self._split = problem, split
        self._simulator = simulator
        self._left = simulations
        self._looks = _LOOKS * simulations
        self._fixed = problem.device - managed_curve(problem.trace)
        self._seen: set[Plan] = set()

    def run(self, migrations: Plan, enough_ns: int) -> Plan:
        best, best_ns = migrations, self._simulator.run(migrations).step_ns
        improved = True
        while improved and best_ns > enough_ns:
            improved = False
            for other in self._neighbours(best):
                if self._left <= 0 or self._looks <= 0:
                    return best
                self._looks -= 1
                if other in self._seen or not self._holds(other):
                    continue
                self._seen.add(other)
                self._left -= 1
                ns = self._simulator.run(other).step_ns
                if ns < best_ns:
                    best, best_ns, improved = other, ns, True
                    break
        return best

    def _holds(self, plan: Plan) -> bool:
        problem = self._problem
        managed = managed_curve(problem.trace, plan)
        if (self._fixed + managed > problem.limit_bytes).any():
            return False
        others = tuple(m for m in plan if m.tensor_id not in problem.host_copies)
        return all(
            (
                tier_curve(
                    problem.trace,
                    others if tier is Tier.HOST else plan,
                    tier,
                    problem.spare_sites,
                )
                <= size
            ).all()
            for tier, size in problem.tier_bytes.items()
        )

    def _neighbours(self, plan: Plan) -> Iterator[Plan]:
        clean_tensors = {m.tensor_id for m in plan if m.clean}
        for i, m in enumerate(plan):
            rest = plan[:i], plan[i + 1 :]
            for changed in self._changes(m, m.tensor_id in clean_tensors):
                yield (*rest[0], changed, *rest[1])
        free = [i for i, m in enumerate(plan) if m.tensor_id not in clean_tensors]
        yield from self._others(plan, free)
        for i, j in combinations(range(len(plan)), 2):
            pairs = (
                tuple(self._changes(plan[k], plan[k].tensor_id in clean_tensors)) for k in (i, j)
            )
            for one, two in product(*pairs):
                yield (*plan[:i], one, *plan[i + 1 : j], two, *plan[j + 1 :])

    def _changes(self, m: Migration, bound_to_tier: bool) -> Iterator[Migration]:
        for gone in range(m.leave, m.back):
            if gone != m.gone:
                yield replace(m, gone=gone)
        for back in range(m.gone + 1, m.needed + 1):
            if back != m.back:
                yield replace(m, back=back)
        for gone, back in _ways(m.leave, m.needed):
            if gone != m.gone and back != m.back:
                yield replace(m, gone=gone, back=back)
        if not bound_to_tier and m.tensor_id not in self._problem.only_tier:
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

    def _others(self, plan: Plan, free: list[int]) -> Iterator[Plan]:
        """Plans with one period less, one more, or one for another."""
        periods = self._problem.lifetimes
        away = {(m.tensor_id, m.leave) for m in plan}
        added: list[Migration] = []
        for row in range(len(periods)):
            tensor_id, start, end = (
                int(column[row]) for column in (periods.tensor_ids, periods.start, periods.end)
            )
            if (tensor_id, start) in away:
                continue
            only = self._problem.only_tier.get(tensor_id)
            for tier in self._problem.tier_bytes:
                if only is None or only is tier:
                    added += [
                        Migration(
                            tensor_id=tensor_id,
                            leave=start,
                            gone=gone,
                            back=back,
                            needed=end,
                            tier=tier,
                        )
                        for gone, back in _ways(start, end)
                    ]
        for i in free:
            yield (*plan[:i], *plan[i + 1 :])
        for new in added:
            yield (*plan, new)
        for i in free:
            for new in added:
                yield (*plan[:i], *plan[i + 1 :], new)


_SHORT = 6
"""Sites of an idle period up to which every way to spend it elsewhere is tried."""


def _ways(start: int, end: int) -> list[tuple[int, int]]:
    """Places (gone, back) in an idle period: all, or its ends and its thirds."""
    if end - start <= _SHORT:
        return [(a, b) for a in range(start, end) for b in range(a + 1, end + 1)]
    places = sorted({start, start + (end - start) // 3, end - (end - start) // 3, end})
    return list(combinations(places, 2))


def polish(
    problem: Problem,
    simulator: Simulator,
    migrations: Plan,
    enough_ns: int,
    *,
    split: bool,
) -> Plan:
    """A plan that is no slower than `migrations`; stops at `enough_ns`.

    Args:
        problem: the step and the machine.
        simulator: of both.
        migrations: a plan that holds.
        enough_ns: a lower bound on the step.
        split: whether tensors may be split between tiers.
    """
    simulations = min(_SIMULATIONS, _WORK // (len(problem.lifetimes) + 1))
    found = _Polish(problem, simulator, simulations, split).run(migrations, enough_ns)
    return tuple(sorted(found, key=lambda m: m.leave))


_SIMULATIONS, _WORK, _LOOKS = 300, 9_000, 6
