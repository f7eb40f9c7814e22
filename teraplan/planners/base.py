"""What a planner is given, and what it returns.

A planner is a function from a `Problem` to the migrations of a plan. It may assume that the problem
passed `require_feasible`: the device budget is at least the least one, and the other tiers together
can hold what has to be elsewhere. The registry adds the prediction and lets nothing out that the
independent checker refuses.
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from teraplan.errors import InfeasibleBudgetError
from teraplan.simulation.lifetimes import Ints, Lifetimes
from teraplan.simulation.memory_curve import Curve, LeastBudget, least_budget, peak
from teraplan.simulation.placed_step import HostWork
from teraplan.simulation.simulator import Simulator
from teraplan.units import MIB, format_nbytes
from teraplan.values.hardware import Budgets, Hardware, Link, Tier
from teraplan.values.plan import Migration
from teraplan.values.step_trace import StepTrace

PAGE_BYTES = 4096
LEAST_PART_BYTES = 4 * MIB
"""A tensor is split into parts of at least so many bytes: of smaller ones most is latency."""
_MOST_BYTES = 1 << 61
"""More of any tier counts as this much, more than any trace has, so that sums fit 64 bits."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Problem:
    """A step to be planned, and what there is to plan with."""

    trace: StepTrace
    hardware: Hardware
    budgets: Budgets
    lifetimes: Lifetimes
    device: Curve
    """Bytes on the device per interval if nothing moves."""
    idle: Curve
    """Of those, bytes that could be elsewhere."""
    limit_bytes: int
    """The most bytes on the device: the lower of budget and capacity."""
    tier_bytes: dict[Tier, int]
    """The most bytes in each other tier that the machine has, fastest way back first; host memory
    where both fill the device's port."""
    links: dict[Tier, Link]
    least: LeastBudget
    only_tier: Mapping[int, Tier] = field(default_factory=dict[int, Tier])
    """Tensors that may move to this tier alone."""
    deadline: float | None = None
    """When to stop searching, on the clock of `time.monotonic`; None: when the search is done."""
    host_copies: frozenset[int] = frozenset()
    """Tensors of which the host always has a copy that is as good: they are clean there."""
    host_work: tuple[HostWork, ...] = ()
    """What the host does beside, over the same link."""
    may_be_hosted: tuple[int, ...] = ()
    """Numbers of updates that may run on the host."""
    pieces: Mapping[int, tuple[int, ...]] = field(default_factory=dict[int, tuple[int, ...]])
    """Bytes of the tensors of which one that is listed here consists (`coarse`)."""
    splits: bool = True
    """Whether tensors may be split between tiers."""
    draft: bool = False
    """Whether the plan only has to tell what to expect of a thorough one, at a part of its cost."""
    spare_sites: int = 0
    """By how many sites a tensor takes space in another tier before and after its idle period."""

    @classmethod
    def of(cls, trace: StepTrace, hardware: Hardware, budgets: Budgets) -> "Problem":
        """The problem of planning `trace` within `budgets`."""
        lifetimes = Lifetimes.of(trace)
        links = {
            tier: link
            for tier, link in (
                (Tier.HOST, hardware.host_link),
                (Tier.STORAGE, hardware.storage_link),
            )
            if link is not None
        }
        host_bytes = max(0, hardware.host_room_bytes(budgets.host_bytes))
        room = {
            Tier.HOST: min(host_bytes, _MOST_BYTES),
            Tier.STORAGE: min(budgets.storage_bytes, hardware.storage_capacity_bytes, _MOST_BYTES),
        }
        port = hardware.device_port
        fastest = math.inf if port is None else port.back_bytes_per_s
        by_speed = sorted(links, key=lambda tier: -min(links[tier].back_bytes_per_s, fastest))
        return cls(
            trace=trace,
            hardware=hardware,
            budgets=budgets,
            lifetimes=lifetimes,
            device=lifetimes.device_curve(),
            idle=lifetimes.idle_curve(),
            limit_bytes=min(budgets.device_bytes, hardware.device_capacity_bytes, _MOST_BYTES),
            tier_bytes={tier: room[tier] for tier in by_speed},
            links=links,
            least=least_budget(trace),
            may_be_hosted=tuple(range(len(trace.updates))),
        )

    def within(self, limit_bytes: int) -> "Problem":
        """The same with another limit of the device."""
        return replace(self, limit_bytes=limit_bytes)

    def simulator(self) -> Simulator:
        """The simulator of this step on this machine."""
        return Simulator(self.trace, self.hardware, self.host_work)

    def pressure(self, limit_bytes: int | None = None) -> Curve:
        """Bytes over the limit per interval, at most what can be elsewhere there."""
        limit = self.limit_bytes if limit_bytes is None else limit_bytes
        return np.clip(self.device - limit, 0, self.idle)

    def enough_bytes(self) -> int:
        """The least device budget as far as sums of bytes tell; with less there is no plan.

        It has room for what is touched, and for what the other tiers have no room for.
        """
        return max(self.least.nbytes, peak(self.device) - self.room_bytes())

    def room_bytes(self) -> int:
        """The most that can be elsewhere at once; a tier with less than any tensor holds none."""
        smallest = min(self.lifetimes.nbytes.tolist(), default=0)
        splits = self.may_split()
        return sum(size for size in self.tier_bytes.values() if splits or size >= smallest)

    def rooms(self) -> str:
        """The room in the other tiers in words."""
        rooms = [f"{format_nbytes(n)} in {tier}" for tier, n in self.tier_bytes.items()]
        return " and ".join(rooms) or "nothing, since the hardware has no link to another tier"

    def links_ns(self, migrations: Sequence[Migration]) -> int:
        """How long links are busy with these, each copy alone on its link."""
        busy_ns = 0
        for m in migrations:
            for tier, nbytes in m.parts(self.trace.tensors[m.tensor_id].nbytes):
                link = self.links[tier]
                speeds = [link.back_bytes_per_s]
                speeds += [] if m.clean else [link.out_bytes_per_s]
                busy_ns += sum(link.latency_ns + nbytes * 10**9 // speed for speed in speeds)
        return busy_ns

    @property
    def is_late(self) -> bool:
        """Whether the time to search is over."""
        return is_late(self.deadline)

    def tiers_of(self, tensor_id: int) -> tuple[Tier, ...]:
        """The other tiers that a tensor may move to as a whole."""
        only = self.only_tier.get(tensor_id)
        return tuple(tier for tier in self.tier_bytes if only is None or only is tier)

    def may_split(self) -> bool:
        """Whether any tensor can be split between tiers."""
        largest = int(self.lifetimes.nbytes.max(initial=0))
        return self.splits and len(self.links) > 1 and largest >= 2 * LEAST_PART_BYTES

    def may_be_split(self, tensor_id: int) -> bool:
        """Whether this tensor may be: no rule names its tier, and the host has no copy anyway."""
        return tensor_id not in self.only_tier and tensor_id not in self.host_copies

    def cut(self, tensor_id: int, host_bytes: int) -> int:
        """The most bytes, up to `host_bytes`, of which a tensor can have its first in host memory.

        None or all of it; else a whole number of pages, and neither part is small.
        """
        before = 0
        for nbytes in self.pieces.get(tensor_id, (self.trace.tensors[tensor_id].nbytes,)):
            if before + nbytes > host_bytes:
                part = (host_bytes - before) // PAGE_BYTES * PAGE_BYTES
                part = min(part, (nbytes - LEAST_PART_BYTES) // PAGE_BYTES * PAGE_BYTES)
                return before + part if part >= LEAST_PART_BYTES else before
            before += nbytes
        return before

    def tier_spans(self, rows: Ints) -> list[tuple[int, int]]:
        """From where to where tensors take space in another tier in the idle periods `rows`.

        At most one step; may begin before site 0, which is then in the step before.
        """
        periods, spare = self.lifetimes, self.spare_sites
        first = periods.start[rows] - spare
        last = np.minimum(periods.end[rows] + spare, first + periods.num_sites)
        return list(zip(first.tolist(), last.tolist(), strict=True))


Planner = Callable[[Problem], tuple[Migration, ...]]


def is_late(deadline: float | None) -> bool:
    """Whether a deadline on the clock of `time.monotonic` is past; None never is."""
    return deadline is not None and time.monotonic() > deadline


def no_placement(problem: Problem) -> InfeasibleBudgetError:
    """The error for budgets that are not refuted by sums, but for which no plan was found.

    `make_plan` adds which device budget works.
    """
    need = int(problem.pressure().max(initial=0))
    return InfeasibleBudgetError(
        f"found no plan that keeps {format_nbytes(need)} in {problem.rooms()}: tensors are moved "
        "whole, or in two parts that are not small, and these do not fit together"
    )
