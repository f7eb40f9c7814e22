"""Bytes per interval: on the device with nothing moved or under a plan, and in the other tiers.

All curves are int64 arrays with one entry per interval (`step_trace`), so a step of n sites gives
shape (n,). A range that reaches past the last site continues at the start: the step repeats.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from teraplan.units import format_nbytes
from teraplan.values.hardware import Tier
from teraplan.values.plan import Migration
from teraplan.values.step_trace import StepTrace

Curve = npt.NDArray[np.int64]


def sum_ranges(num_sites: int, ranges: Iterable[tuple[int, int, int]]) -> Curve:
    """The sum of `nbytes` over all (start, end, nbytes) with interval k in start .. end-1.

    Sites count modulo `num_sites`; a range is at most one step long.
    """
    rows = np.array(list(ranges), dtype=np.int64).reshape(-1, 3)
    return sum_columns(num_sites, rows[:, 0], rows[:, 1], rows[:, 2])


def sum_columns(num_sites: int, start: Curve, end: Curve, nbytes: Curve) -> Curve:
    """The same for ranges in columns."""
    steps = np.zeros(num_sites + 1, dtype=np.int64)
    if num_sites == 0:
        return steps[:0]
    some = end > start
    first, last = start[some] % num_sites, (end[some] - 1) % num_sites + 1
    np.add.at(steps, first, nbytes[some])
    np.subtract.at(steps, last, nbytes[some])
    around = nbytes[some][last <= first].sum()
    steps[0] += around
    return np.cumsum(steps[:-1])


def fixed_curve(trace: StepTrace) -> Curve:
    """State and workspace: what no plan can move."""
    sites = trace.sites
    workspace = np.fromiter((site.workspace_bytes for site in sites), np.int64, len(sites))
    return workspace + trace.state_bytes


def touched_curve(trace: StepTrace) -> Curve:
    """Listed tensors that the computation touches: on the device under every plan."""
    return sum_ranges(
        len(trace.sites),
        ((start, end, tensor.nbytes) for tensor in trace.tensors for start, end in tensor.windows),
    )


def managed_curve(trace: StepTrace, migrations: Iterable[Migration] = ()) -> Curve:
    """Listed tensors that are on the device under a plan; with no migrations, if nothing moves."""
    num_sites = len(trace.sites)
    alive = sum_ranges(
        num_sites,
        (
            (0, num_sites, tensor.nbytes)
            if tensor.persistent
            else (tensor.windows[0][0], tensor.windows[-1][1], tensor.nbytes)
            for tensor in trace.tensors
            if tensor.windows
        ),
    )
    tensors = trace.tensors
    away = sum_ranges(
        num_sites, ((m.gone, m.back, tensors[m.tensor_id].nbytes) for m in migrations)
    )
    return alive - away


def device_curve(trace: StepTrace, migrations: Iterable[Migration] = ()) -> Curve:
    """Everything on the device under a plan: state, workspace and resident tensors."""
    return fixed_curve(trace) + managed_curve(trace, migrations)


def pressure_curve(
    trace: StepTrace, budget_bytes: int, migrations: Iterable[Migration] = ()
) -> Curve:
    """Bytes over `budget_bytes`, 0 where the step fits."""
    return np.maximum(device_curve(trace, migrations) - budget_bytes, 0)


def tier_curve(
    trace: StepTrace, migrations: Iterable[Migration], tier: Tier, spare_sites: int = 0
) -> Curve:
    """Bytes that a plan occupies in `tier`, which is not the device.

    A copy takes its space from the site where it starts out until it is back, and up to the end of
    the last later migration of the same tensor that relies on it (`clean`), which for a persistent
    tensor can be in the next step. With `spare_sites` it takes the space so many sooner and longer,
    but for no longer than a step.
    """
    num_sites, tensors = len(trace.sites), trace.tensors
    held: dict[int, list[tuple[int, int, int]]] = {}
    """For each tensor, where its copies begin and end, and their bytes."""
    early: dict[int, int] = {}
    """For each tensor, the end of clean migrations that come before any that writes."""
    for m in sorted(migrations, key=lambda m: (m.tensor_id, m.leave)):
        nbytes = dict(m.parts(tensors[m.tensor_id].nbytes)).get(tier)
        if nbytes is None:
            continue
        ranges = held.setdefault(m.tensor_id, [])
        if not m.clean:
            ranges.append((m.leave, m.needed, nbytes))
        elif ranges:
            ranges[-1] = (ranges[-1][0], m.needed, ranges[-1][2])
        else:
            early[m.tensor_id] = m.needed
    for tensor_id, end in early.items():
        ranges = held[tensor_id] or [(end, end, 0)]
        ranges[-1] = (ranges[-1][0], end + num_sites, ranges[-1][2])
    return sum_ranges(
        num_sites,
        (
            (
                start - spare_sites,
                min(end + spare_sites, start - spare_sites + num_sites),
                nbytes,
            )
            for ranges in held.values()
            for start, end, nbytes in ranges
            if end > start
        ),
    )


def peak(curve: Curve) -> int:
    """The largest entry of a curve, 0 if it has none."""
    return int(curve.max()) if curve.size else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class LeastBudget:
    """The smallest device budget for which a plan exists, and why it cannot be smaller."""

    nbytes: int
    site: int
    """The interval that needs it."""
    fixed_bytes: int
    """State and workspace there."""
    tensors: tuple[int, ...]
    """Ids of the tensors that the computation touches there."""

    def describe(self, trace: StepTrace) -> str:
        """E.g. "site 41 (g0, backward): 1.00 GiB state and workspace, 96.00 MiB gelu_3"."""
        if not trace.sites:
            return f"{format_nbytes(self.nbytes)} state"
        site = trace.sites[self.site]
        way = "backward" if site.backward else "forward"
        largest = sorted(self.tensors, key=lambda i: -trace.tensors[i].nbytes)
        parts = [f"{format_nbytes(self.fixed_bytes)} state and workspace"]
        parts += [
            f"{format_nbytes(trace.tensors[i].nbytes)} {trace.tensors[i].name}" for i in largest[:3]
        ]
        if len(largest) > 3:
            rest = sum(trace.tensors[i].nbytes for i in largest[3:])
            parts.append(f"{format_nbytes(rest)} in {len(largest) - 3} more tensors")
        return f"site {self.site} ({site.graph}, {way}): {', '.join(parts)}"


def least_budget(trace: StepTrace) -> LeastBudget:
    """The least device budget: everything is elsewhere except where it is touched.

    A plan for it exists where the other tiers have the room: every tensor leaves and is waited for
    at the start of each idle period, and comes back and is waited for at its end.
    """
    if not trace.sites:
        return LeastBudget(nbytes=trace.state_bytes, site=0, fixed_bytes=0, tensors=())
    fixed = fixed_curve(trace)
    curve = fixed + touched_curve(trace)
    site = int(curve.argmax())
    touched = tuple(
        tensor_id
        for tensor_id, tensor in enumerate(trace.tensors)
        if any(start <= site < end for start, end in tensor.windows)
    )
    return LeastBudget(
        nbytes=int(curve[site]), site=site, fixed_bytes=int(fixed[site]), tensors=touched
    )
