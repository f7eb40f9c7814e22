"""A step some of whose updates run on the host: what is left for the device, and the host's part.

    interval          0  1  2  3  4  5  6  7        update of w with g and m in intervals 6, 7
    parameter w       ##    ##          ####   ->   ##    ##
    gradient g              ####        ####   ->         ####..     .. on its way out
    state m                             ####   ->
    time              t  t  t  t  t  t  t  t   ->   t  t  t  t  t  t  0  0

What is left is an ordinary step, which is planned and simulated as any other: the parameter is born
where it is first used, its gradient dies after the backward. Bytes of gradients that are still on
their way out, and of parameters that came early, are counted beside it.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from teraplan.simulation.memory_curve import (
    Curve,
    fixed_curve,
    managed_curve,
    sum_ranges,
    tier_curve,
)
from teraplan.values.hardware import Tier
from teraplan.values.plan import HostUpdate, Migration
from teraplan.values.step_trace import StepTrace, Tensor, Update


@dataclass(frozen=True, slots=True, kw_only=True)
class HostWork:
    """One update on the host in bytes and sites; see `HostUpdate`."""

    flush: int
    ready: int
    gone: int
    back: int
    needed: int
    gradient_bytes: int
    work_bytes: int
    """What the host's cores read and write."""
    parameter_bytes: int
    gradient: int
    """Id of its first gradient, by which the copy out is named."""
    parameter: int
    """Id of its first parameter."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PlacedStep:
    """A step with places for its updates."""

    trace: StepTrace
    """What is left for the device; ids of tensors and sites are those of the step."""
    moving: Curve
    """Bytes per interval of gradients going out and of parameters that came early."""
    work: tuple[HostWork, ...]
    copies: frozenset[int]
    """Parameters of which the host has a copy that is as good as the device's."""
    host_bytes: int
    """What the host holds all the time for its updates."""

    @classmethod
    def of(cls, trace: StepTrace, host_updates: Sequence[HostUpdate]) -> "PlacedStep":
        """The step with these updates on the host."""
        updates = [trace.updates[h.update] for h in host_updates]
        work = tuple(host_work(trace, h) for h in host_updates)
        ranges = [
            moved
            for update, h in zip(updates, host_updates, strict=True)
            for moved in _moving(trace, update, h)
        ]
        return cls(
            trace=without_updates(trace, updates) if updates else trace,
            moving=sum_ranges(len(trace.sites), ranges),
            work=work,
            copies=frozenset(i for update in updates for i in update.parameters),
            host_bytes=sum(held_bytes(trace, update) for update in updates),
        )

    def managed(self, migrations: Iterable[Migration] = ()) -> Curve:
        """Listed tensors on the device under a plan."""
        return managed_curve(self.trace, migrations) + self.moving

    def device(self, migrations: Iterable[Migration] = ()) -> Curve:
        """Everything on the device under a plan."""
        return fixed_curve(self.trace) + self.managed(migrations)

    def occupied(self, migrations: Iterable[Migration], tier: Tier, spare_sites: int = 0) -> Curve:
        """Bytes that a plan occupies in another tier."""
        if tier is not Tier.HOST:
            return tier_curve(self.trace, migrations, tier, spare_sites)
        others = [m for m in migrations if m.tensor_id not in self.copies]
        return tier_curve(self.trace, others, tier, spare_sites) + self.host_bytes


def _bytes_of(trace: StepTrace, ids: Iterable[int]) -> int:
    return sum(trace.tensors[i].nbytes for i in ids)


def held_bytes(trace: StepTrace, update: Update) -> int:
    """What the host holds of an update: gradients, parameters and state."""
    return _bytes_of(trace, update.tensor_ids)


def work_bytes(trace: StepTrace, update: Update) -> int:
    """What an update reads and writes: gradients once, parameters and state twice."""
    twice = _bytes_of(trace, update.parameters) + _bytes_of(trace, update.states)
    return _bytes_of(trace, update.gradients) + 2 * twice


def host_work(trace: StepTrace, placed: HostUpdate) -> HostWork:
    """The bytes and sites of a host update."""
    update = trace.updates[placed.update]
    return HostWork(
        flush=placed.flush,
        ready=update.ready,
        gone=placed.gone,
        back=placed.back,
        needed=placed.needed,
        gradient_bytes=_bytes_of(trace, update.gradients),
        work_bytes=work_bytes(trace, update),
        parameter_bytes=_bytes_of(trace, update.parameters),
        gradient=update.gradients[0],
        parameter=update.parameters[0],
    )


def last_use(trace: StepTrace, update: Update, ids: Iterable[int]) -> int:
    """The site from which on none of these tensors of an update is touched before it."""
    return max(_before(trace.tensors[i], update)[-1][1] for i in ids)


def _before(tensor: Tensor, update: Update) -> tuple[tuple[int, int], ...]:
    """The tensor's windows, cut off where the update begins."""
    return tuple((a, min(b, update.start)) for a, b in tensor.windows if a < update.start)


def _moving(trace: StepTrace, update: Update, h: HostUpdate) -> list[tuple[int, int, int]]:
    """Ranges (start, end, bytes) in which its tensors are on the device beside their windows."""
    tensors = trace.tensors
    out = [(last_use(trace, update, (i,)), h.gone, tensors[i].nbytes) for i in update.gradients]
    first = [tensors[i].windows[0][0] + len(trace.sites) for i in update.parameters]
    sizes = [tensors[i].nbytes for i in update.parameters]
    return out + [(h.back, end, nbytes) for end, nbytes in zip(first, sizes, strict=True)]


def without_updates(trace: StepTrace, updates: Iterable[Update]) -> StepTrace:
    """The step without these updates: what the device still does."""
    tensors, sites = list(trace.tensors), list(trace.sites)
    for update in updates:
        for i in update.states:
            tensors[i] = replace(tensors[i], nbytes=0)
        for i in update.parameters:
            windows = _before(tensors[i], update)
            tensors[i] = replace(tensors[i], windows=windows, persistent=False, changed_in=())
        for i in update.gradients:
            windows = _before(tensors[i], update)
            changes = tuple(n for n in tensors[i].changes if n < len(windows))
            tensors[i] = replace(tensors[i], windows=windows, changed_in=changes)
        for k in range(update.start, update.end):
            sites[k] = replace(sites[k], duration_ns=0, workspace_bytes=0)
    return replace(trace, sites=tuple(sites), tensors=tuple(tensors), updates=())
