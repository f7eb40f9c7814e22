"""A step with fewer sites and fewer tensors, whose plans are plans of the step itself.

    sites      0  1  2  3  4  5  6  7  8  9
    slots      [-- 0 --][- 1 -][---- 2 ----]
    tensor a      [##]              [##]         idle in interval 3 .. 7
    coarse        [=======][    ][=========]     idle in slot 1 alone

Neighbouring sites become one slot; tensors that are idle over the same slots become one group. A
tensor that is touched anywhere in a slot counts as touched in all of it, so a coarse migration is
away in whole slots; what has to be away in a slot is the most that any of its sites needs. So the
plan of the coarse step, with each group's migration given to each of its members, keeps the same
limits in the step itself. Where a slot asks for more than can be away in all of it, it is cut
finer.
"""

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from teraplan.planners.base import Problem
from teraplan.simulation.lifetimes import Floats, Ints
from teraplan.simulation.memory_curve import Curve, managed_curve, sum_columns
from teraplan.simulation.placed_step import HostWork
from teraplan.values.hardware import Tier
from teraplan.values.plan import Migration
from teraplan.values.step_trace import StepTrace, Tensor

_SLOTS, _SLOTS_OF_CALL, _MOST_SLOTS = 300, 24, 2400
"""Slots that are asked for: at least, for each call of a graph, at most."""
_LARGEST_PART = 100
"""A group has at most this part of the bytes that a plan can place freely."""

Windows = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Coarse:
    """A coarse problem and the way back."""

    problem: Problem
    cuts: Ints
    """First site of each slot, and the number of sites; shape (slots + 1,)."""
    members: tuple[tuple[int, ...], ...]
    """Tensors of the step in each tensor of the coarse one."""
    fine: StepTrace

    def expand(self, migrations: tuple[Migration, ...]) -> tuple[Migration, ...]:
        """The migrations of the step itself; members of a group leave and come in their order."""
        cuts, num_slots, num_sites = self.cuts.tolist(), len(self.cuts) - 1, len(self.fine.sites)
        periods: dict[int, dict[int, tuple[int, int]]] = {}
        result: list[Migration] = []

        def site(slot: int) -> int:
            return int(cuts[slot % num_slots]) + slot // num_slots * num_sites

        for m in migrations:
            # a period is told by the slot at which the tensor is touched again
            needed = m.needed % num_slots
            gone, back = site(m.gone), site(m.back)
            for tensor_id, tier, host_bytes in self._parts(m):
                if tensor_id not in periods:
                    periods[tensor_id] = _periods_by_end(
                        self.fine.tensors[tensor_id], cuts, num_sites
                    )
                start, end = periods[tensor_id][needed]
                leaves_late = m.leave > _slot_after(cuts, start)
                result.append(
                    Migration(
                        tensor_id=tensor_id,
                        leave=site(m.leave) if leaves_late else start,
                        gone=gone,
                        back=back,
                        needed=end,
                        tier=tier,
                        host_bytes=host_bytes,
                        clean=m.clean,
                    )
                )
        return tuple(sorted(result, key=lambda m: (m.leave, m.needed, m.tensor_id)))

    def _parts(self, m: Migration) -> Iterator[tuple[int, Tier, int]]:
        """Each member of a group with its tier and its bytes in host memory beside.

        Of a group that is split, the first members are in host memory, and one may be split.
        """
        left = m.host_bytes
        for tensor_id in self.members[m.tensor_id]:
            nbytes = self.fine.tensors[tensor_id].nbytes
            if left == 0 or left < nbytes:
                yield tensor_id, m.tier, left
                left = 0
            else:
                yield tensor_id, Tier.HOST, 0
                left -= nbytes


def _periods_by_end(tensor: Tensor, cuts: list[int], num_sites: int) -> dict[int, tuple[int, int]]:
    """Idle periods (start, end) by the slot in which the tensor is touched again."""
    found: dict[int, tuple[int, int]] = {}
    windows = tensor.windows
    for (_, start), (end, _) in pairwise(windows):
        if _slot_after(cuts, start) < _slot_of(cuts, end):
            found[_slot_of(cuts, end)] = (start, end)
    if tensor.persistent:
        found[_slot_of(cuts, windows[0][0])] = (windows[-1][1], windows[0][0] + num_sites)
    return found


def _slot_of(cuts: list[int], site: int) -> int:
    """The slot that has the site."""
    return bisect_right(cuts, site) - 1


def _slot_after(cuts: list[int], site: int) -> int:
    """The first slot that starts at the site or later."""
    return bisect_left(cuts, site)


def slots_for(trace: StepTrace) -> int:
    """How many slots a coarse copy of a step should have."""
    calls = 1 + max((site.call for site in trace.sites), default=0)
    return max(_SLOTS, min(_MOST_SLOTS, _SLOTS_OF_CALL * calls))


def coarsen(problem: Problem, num_slots: int) -> Coarse:
    """The problem with about so many slots, more where it would not be feasible otherwise."""
    trace = problem.trace
    cuts = _feasible(problem, _cuts(problem, num_slots))
    coarse, members = _coarse_trace(problem, cuts)
    smaller = replace(
        Problem.of(coarse, problem.hardware, problem.budgets),
        limit_bytes=problem.limit_bytes,
        only_tier={
            group: problem.only_tier[ids[0]]
            for group, ids in enumerate(members)
            if ids[0] in problem.only_tier
        },
        deadline=problem.deadline,
        draft=problem.draft,
        host_copies=frozenset(
            group for group, ids in enumerate(members) if ids[0] in problem.host_copies
        ),
        host_work=tuple(_coarse_work(work, cuts) for work in problem.host_work),
        pieces={
            group: tuple(trace.tensors[i].nbytes for i in ids)
            for group, ids in enumerate(members)
            if len(ids) > 1
        },
        splits=problem.splits,
        spare_sites=1,
    )
    return Coarse(problem=smaller, cuts=cuts, members=members, fine=trace)


def _feasible(problem: Problem, cuts: Ints) -> Ints:
    """The cuts, and more of them where a slot asks for more than can be away in all of it."""
    while True:
        most = np.maximum.reduceat(problem.device, cuts[:-1])
        over = most - problem.limit_bytes > _idle_in_slots(problem, cuts)
        if not over.any():
            return cuts
        wide = over & (np.diff(cuts) > 1)
        assert wide.any(), "a site by itself asks for no more than can be away there"
        first, last = cuts[:-1][wide], cuts[1:][wide]
        parts = [first + (last - first) * i // 4 for i in (1, 2, 3)]
        cuts = np.unique(np.concatenate([cuts, *parts]))


def _idle_in_slots(problem: Problem, cuts: Ints) -> Curve:
    """Bytes that are idle in all of a slot; shape (slots,)."""
    start, end = _in_slots(problem, cuts)
    return sum_columns(len(cuts) - 1, start, end, problem.lifetimes.nbytes)


def _in_slots(problem: Problem, cuts: Ints) -> tuple[Ints, Ints]:
    """The first slot in all of which each idle period lasts, and the slot in which it ends.

    The latter is not after the former where it lasts in all of none.
    """
    periods = problem.lifetimes
    start = np.searchsorted(cuts, periods.start, side="left")
    steps, sites = np.divmod(periods.end, periods.num_sites)
    end = steps * (len(cuts) - 1) + np.searchsorted(cuts, sites, side="right") - 1
    return start, end


def hardly_coarser(problem: Problem, num_slots: int) -> bool:
    """Whether `coarsen` would leave a third of the sites and half of the idle periods, or more."""
    cuts = _feasible(problem, _cuts(problem, num_slots))
    if 3 * len(cuts) < problem.lifetimes.num_sites:
        return False
    start, end = _in_slots(problem, cuts)
    different = np.unique((start * 2 * len(cuts) + end)[end > start])
    return 2 * len(different) >= len(problem.lifetimes)


def _cuts(problem: Problem, num_slots: int) -> Ints:
    """Cuts with about equal parts of the time and of the bytes that start or end being idle."""
    lifetimes, num_sites = problem.lifetimes, problem.lifetimes.num_sites
    duration = np.diff(lifetimes.site_ns[: num_sites + 1]).astype(np.float64)
    moved = np.zeros(num_sites)
    for column in (lifetimes.start, lifetimes.end):
        np.add.at(moved, column % num_sites, lifetimes.nbytes.astype(np.float64))
    weight: Floats = duration / max(duration.sum(), 1.0) + moved / max(moved.sum(), 1.0)
    total = np.cumsum(weight)
    wanted = np.arange(1, num_slots) * (total[-1] / num_slots)
    inner = np.searchsorted(total, wanted)
    return np.unique(np.concatenate([[0], inner, [num_sites]])).astype(np.int64)


def _coarse_trace(problem: Problem, cuts: Ints) -> tuple[StepTrace, tuple[tuple[int, ...], ...]]:
    trace, device = problem.trace, problem.device
    largest = max((problem.limit_bytes - problem.least.nbytes) // _LARGEST_PART, 1)
    starts = cuts.tolist()
    groups: dict[tuple[Windows, tuple[int, ...], object], list[int]] = defaultdict(list)
    for tensor_id, tensor in enumerate(trace.tensors):
        if tensor.nbytes == 0:
            continue  # never moves, and is not even there if the host updates it
        windows, changes = _coarse_windows(tensor, starts)
        only = problem.only_tier.get(tensor_id)
        copied = tensor_id in problem.host_copies
        key = (windows, changes, (tensor.persistent, tensor.kind, only, copied))
        groups[key].append(tensor_id)
    tensors: list[Tensor] = []
    members: list[tuple[int, ...]] = []
    for (windows, changes, _), ids in groups.items():
        for part in _parts(ids, [trace.tensors[i].nbytes for i in ids], largest):
            nbytes = sum(trace.tensors[i].nbytes for i in part)
            first = trace.tensors[part[0]]
            tensors.append(replace(first, nbytes=nbytes, windows=windows, changed_in=changes))
            members.append(part)
    durations = np.fromiter((site.duration_ns for site in trace.sites), np.int64, len(trace.sites))
    slot_ns = np.add.reduceat(durations, cuts[:-1]).tolist()
    first_sites = tuple(trace.sites[i] for i in starts[:-1])
    bare = replace(trace, sites=first_sites, tensors=tuple(tensors), updates=())
    most = np.maximum.reduceat(device, cuts[:-1])
    workspace = most - managed_curve(bare) - trace.state_bytes
    sites = tuple(
        replace(site, tensor_id=None, duration_ns=ns, workspace_bytes=nbytes)
        for site, ns, nbytes in zip(first_sites, slot_ns, workspace.tolist(), strict=True)
    )
    return replace(bare, sites=sites), tuple(members)


def _coarse_work(work: HostWork, cuts: Ints) -> HostWork:
    """The same with slots in the place of sites, somewhat later and shorter."""
    starts: list[int] = cuts.tolist()
    num_slots, num_sites = len(cuts) - 1, starts[-1]

    def slot(site: int, after: bool) -> int:
        steps, rest = divmod(site, num_sites)
        here = _slot_after(starts, rest) if after else _slot_of(starts, rest)
        return steps * num_slots + here

    needed = slot(work.needed, after=False)
    back = min(slot(work.back, after=True), needed)
    gone = min(slot(work.gone, after=True), back)
    return replace(
        work,
        flush=min(slot(work.flush, after=True), gone),
        ready=min(slot(work.ready, after=True), back),
        gone=gone,
        back=back,
        needed=needed,
    )


def _parts(ids: list[int], sizes: list[int], largest: int) -> list[tuple[int, ...]]:
    """The ids in runs of at most `largest` bytes together, or of one tensor."""
    parts: list[tuple[int, ...]] = []
    run: list[int] = []
    nbytes = 0
    for tensor_id, size in zip(ids, sizes, strict=True):
        if run and nbytes + size > largest:
            parts.append(tuple(run))
            run, nbytes = [], 0
        run.append(tensor_id)
        nbytes += size
    parts.append(tuple(run))
    return parts


def _coarse_windows(tensor: Tensor, cuts: list[int]) -> tuple[Windows, tuple[int, ...]]:
    windows: list[list[int]] = []
    changes: list[int] = []
    changed = set(tensor.changes)
    for number, (start, end) in enumerate(tensor.windows):
        first, last = _slot_of(cuts, start), _slot_after(cuts, end)
        if windows and first <= windows[-1][1]:
            windows[-1][1] = max(last, windows[-1][1])
        else:
            windows.append([first, last])
        if number in changed and (not changes or changes[-1] != len(windows) - 1):
            changes.append(len(windows) - 1)
    return tuple((start, end) for start, end in windows), tuple(changes)
