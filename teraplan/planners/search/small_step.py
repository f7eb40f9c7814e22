"""A step of few idle periods, for which many plans can be looked at one by one."""

from dataclasses import replace
from typing import final

import numpy as np

from teraplan.planners.base import Problem
from teraplan.planners.placing.copies import with_kept_copies
from teraplan.simulation.memory_curve import Curve, sum_ranges, tier_curve
from teraplan.simulation.simulator import LONGEST_NS, Simulator
from teraplan.values.hardware import Tier
from teraplan.values.plan import Migration

Plan = tuple[Migration, ...]

_SIMULATIONS, _WORK = 300, 9_000
"""Simulations of one search, and simulations times idle periods."""
_FEW = 14
"""Idle periods up to which it may take four times as many: they are quick there, and find most."""


@final
class StepTimes:
    """Times of one step under plans, each of which is simulated once; mutable."""

    def __init__(self, simulator: Simulator) -> None:
        self._simulator = simulator
        self._known: dict[Plan, tuple[int, int]] = {}
        """By plan, its time and below which time that is exact."""

    def step_ns(self, plan: Plan, below_ns: int = LONGEST_NS) -> int:
        """Time of the step under a plan; if that is `below_ns` or more, some such time."""
        known = self._known.get(plan)
        if known is None or not (known[0] < known[1] or known[0] >= below_ns):
            known = self._known[plan] = self._simulator.step_ns(plan, below_ns), below_ns
        return known[0]


@final
class SmallStep:
    """What a search knows of plans for one problem; mutable: its simulations are counted."""

    def __init__(self, problem: Problem, times: StepTimes) -> None:
        self.problem = problem
        self._times = times
        num_periods = len(problem.lifetimes)
        most = min(_SIMULATIONS, _WORK // (num_periods + 1))
        self.simulations_left = 4 * most if num_periods <= _FEW else most
        self._over = problem.device - problem.limit_bytes

    def spent(self) -> bool:
        """Whether no simulations are left, or no time."""
        return self.problem.is_late or self.simulations_left <= 0

    def step_ns(self, plan: Plan, below_ns: int = LONGEST_NS) -> int:
        """Time of the step under a plan; if that is `below_ns` or more, some such time."""
        self.simulations_left -= 1
        return self._times.step_ns(plan, below_ns)

    def fits(self, plan: Plan) -> bool:
        """Whether it keeps the device budget."""
        return not self.missing(plan).any()

    def missing(self, plan: Plan) -> Curve:
        """Bytes that are still over the device budget in each interval."""
        tensors = self.problem.trace.tensors
        away = ((m.gone, m.back, tensors[m.tensor_id].nbytes) for m in plan)
        left: Curve = np.maximum(self._over - sum_ranges(len(self._over), away), 0)
        return left

    def settled(self, plan: Plan) -> Plan | None:
        """The plan with all copies kept that can be relied on; None if the tiers lack the room.

        Where there is no room for all of them, no others than `plan` has kept already.
        """
        kept = with_kept_copies(self.problem, plan)
        if self._has_room(kept):
            return kept
        copies = self.problem.host_copies
        fewer = tuple(
            replace(new, clean=new.clean and (old.clean or old.tensor_id in copies))
            for new, old in zip(kept, plan, strict=True)
        )
        return fewer if fewer != kept and self._has_room(fewer) else None

    def _has_room(self, plan: Plan) -> bool:
        problem = self.problem
        others = tuple(m for m in plan if m.tensor_id not in problem.host_copies)
        total = sum(problem.trace.tensors[m.tensor_id].nbytes for m in plan)
        return all(
            size >= total
            or (
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
