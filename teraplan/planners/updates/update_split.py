"""Which updates the host's cores do: a model of the step says how many, simulation decides.

Let y be the part of the updates' bytes that is on the host. In one step

    the device computes           C + (1 - y) D
    the host's cores update       y H
    host memory carries           y (W + G + P) / M
    out to the other tiers        y G and what is over the budget, max(0, X - y S)
    back from them                y P and the same

with C the computation beside these updates, D theirs on the device, H theirs on the host, and bytes
W that updates read and write, G of gradients, P of parameters, S of state, X over the budget. Each
is a line in y, or the higher of two, and the step is no shorter than the highest: the least of that
is a linear program in one variable, solved at the crossings of its lines.

Whether host and device really overlap depends on when gradients are there and when parameters are
needed. So updates go to the host in the order in which their gradients are ready: those of the last
layers, whose parameters are needed last in the next step. Several numbers of them around the
model's answer are planned and simulated, and so is none; the fastest is the plan.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import combinations

import numpy as np

from teraplan.errors import InfeasibleBudgetError
from teraplan.planners.base import Planner, Problem
from teraplan.simulation.lifetimes import site_times
from teraplan.simulation.placed_step import PlacedStep, host_work, last_use, without_updates
from teraplan.simulation.simulator import Simulator
from teraplan.units import format_nbytes, format_ns
from teraplan.values.hardware import Hardware, Link
from teraplan.values.plan import HostUpdate, Migration
from teraplan.values.step_trace import StepTrace

_PARTS = (0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 2.0)
"""Of the model's answer, how much may be tried; from the answer on downwards or upwards."""
_MARGIN = 1.5
"""Factor on the time of a copy in: how much earlier than needed it starts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """A time in ns that grows with the part on the host: at_none + slope * part."""

    at_none: float
    slope: float

    def at(self, part: float) -> float:
        """The time where this part is on the host."""
        return self.at_none + self.slope * part


def best_part(lines: Sequence[Line]) -> float:
    """The part, 0 to 1, at which the highest of the lines is lowest; the least of equals."""
    places = [0.0, 1.0]
    for one, other in combinations(lines, 2):
        if one.slope != other.slope:
            places.append((other.at_none - one.at_none) / (one.slope - other.slope))
    inside = sorted(part for part in places if 0.0 <= part <= 1.0)
    return min(inside, key=lambda part: max(line.at(part) for line in lines))


def step_lines(
    trace: StepTrace, hardware: Hardware, numbers: Sequence[int], over_bytes: int
) -> list[Line]:
    """The model's lines for the updates `numbers`, with so many bytes over the device budget."""
    cores, link = hardware.host_cores, hardware.host_link
    assert cores is not None, "updates can run on the host"
    assert link is not None, "the host can be reached"
    updates = [trace.updates[n] for n in numbers]
    work = [host_work(trace, _somewhere(n)) for n in numbers]
    total_work = sum(w.work_bytes for w in work)
    out, back = sum(w.gradient_bytes for w in work), sum(w.parameter_bytes for w in work)
    state = sum(trace.tensors[i].nbytes for update in updates for i in update.states)
    rest_ns = without_updates(trace, updates).duration_ns
    device_ns = trace.duration_ns - rest_ns
    lines = [
        Line(at_none=rest_ns + device_ns, slope=-device_ns),
        Line(at_none=0.0, slope=total_work * 1e9 / cores.update_bytes_per_s),
        Line(at_none=0.0, slope=(total_work + out + back) * 1e9 / cores.memory_bytes_per_s),
    ]
    for nbytes, own, all_speeds in (
        (out, link.out_while_back_bytes_per_s, _together(hardware, out=True)),
        (back, link.back_while_out_bytes_per_s, _together(hardware, out=False)),
    ):
        lines.append(Line(at_none=0.0, slope=nbytes * 1e9 / own))
        lines.append(
            Line(at_none=over_bytes * 1e9 / all_speeds, slope=(nbytes - state) * 1e9 / all_speeds)
        )
    return lines


def _somewhere(number: int) -> HostUpdate:
    """An update on the host of which only the bytes count."""
    return HostUpdate(update=number, flush=0, gone=0, back=0, needed=0)


def _together(hardware: Hardware, *, out: bool) -> float:
    """Bytes per second over all links in one direction, with the other busy too."""
    links = [link for link in (hardware.host_link, hardware.storage_link) if link is not None]

    def speed(link: Link) -> int:
        return link.out_while_back_bytes_per_s if out else link.back_while_out_bytes_per_s

    total = sum(speed(link) for link in links)
    port = hardware.device_port
    return float(total if port is None else min(total, speed(port)))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Split:
    """A simulated plan with some updates on the host."""

    step_ns: int
    migrations: tuple[Migration, ...]
    host_updates: tuple[HostUpdate, ...]
    site_ns: tuple[float, ...]
    """When sites are reached in two such steps."""


def split_updates(
    problem: Problem, planner: Planner, migrations: tuple[Migration, ...]
) -> tuple[tuple[Migration, ...], tuple[HostUpdate, ...]]:
    """The fastest plan found, with the updates that the host does in it.

    Args:
        problem: the step and the machine.
        planner: plans what is left for the device.
        migrations: the plan with all updates on the device, which is the answer if no other is
            faster.
    """
    trace, hardware = problem.trace, problem.hardware
    numbers = sorted(problem.may_be_hosted, key=lambda n: _readiness(trace, n))
    if not numbers or hardware.host_cores is None or hardware.host_link is None:
        return migrations, ()
    over_bytes = int(problem.pressure().max(initial=0))
    part = best_part(step_lines(trace, hardware, numbers, over_bytes))
    plain = _simulated(problem, migrations, ())
    best = _climb(problem, planner, numbers, _counts(trace, numbers, part))
    if best is not None and best.host_updates:
        chosen = [h.update for h in best.host_updates]
        placed = place_updates(problem, chosen, best.site_ns)
        again = None
        if _sites(placed) != _sites(best.host_updates):
            again = _planned(problem, planner, placed)
        best = again if again is not None and again.step_ns < best.step_ns else best
    if best is None or best.step_ns >= plain.step_ns:
        return migrations, ()
    return best.migrations, best.host_updates


def _sites(host_updates: Sequence[HostUpdate]) -> list[tuple[int, int, int, int, int]]:
    """All that a plan depends on: the same updates at the same sites give the same plan."""
    return [(h.update, h.flush, h.gone, h.back, h.needed) for h in host_updates]


def _climb(
    problem: Problem, planner: Planner, numbers: Sequence[int], counts: Sequence[int]
) -> Split | None:
    """The best of these counts, from the middle one downwards, or upwards if that is no better."""
    found: dict[int, Split | None] = {}

    def cost(count: int) -> float:
        if count not in found and not problem.is_late:
            found[count] = _first_plan(problem, planner, numbers[:count])
        split = found.get(count)
        return np.inf if split is None else float(split.step_ns)

    at = len(counts) // 2
    for way in (-1, 1):
        moved = False
        while counts and 0 <= at + way < len(counts) and cost(counts[at + way]) < cost(counts[at]):
            at, moved = at + way, True
        if moved:
            break
    if not counts or cost(counts[at]) == np.inf:
        return None
    return found[counts[at]]


def _first_plan(problem: Problem, planner: Planner, numbers: Sequence[int]) -> Split | None:
    """A plan with these updates on the host, placed by the times of a step without waits."""
    times = _times(problem, numbers)
    found = _planned(problem, planner, place_updates(problem, numbers, times))
    if found is not None:
        return found
    return _planned(problem, planner, place_updates(problem, numbers, times, frugal=True))


def _readiness(trace: StepTrace, number: int) -> tuple[int, int, int]:
    update = trace.updates[number]
    first = min(trace.tensors[i].windows[0][0] for i in update.parameters)
    return last_use(trace, update, update.gradients), -first, number


def _counts(trace: StepTrace, numbers: Sequence[int], part: float) -> list[int]:
    """How many of the updates to try, ascending, that of the model in the middle."""
    sizes = [host_work(trace, _somewhere(n)).work_bytes for n in numbers]
    reached = np.cumsum(sizes, dtype=np.float64)
    wanted = [part * factor * reached[-1] for factor in _PARTS]
    counts = [min(int(np.searchsorted(reached, w)) + 1, len(numbers)) for w in wanted]
    return counts if part > 0.0 else []


def _times(problem: Problem, numbers: Sequence[int]) -> tuple[float, ...]:
    """When sites of two steps are reached without waits and without these updates."""
    trace = problem.trace
    left = without_updates(trace, [trace.updates[n] for n in numbers])
    return tuple(site_times(left).astype(np.float64).tolist())


def _simulated(
    problem: Problem, migrations: tuple[Migration, ...], host_updates: tuple[HostUpdate, ...]
) -> Split:
    placed = PlacedStep.of(problem.trace, host_updates)
    timing = Simulator(placed.trace, problem.hardware, placed.work).run(migrations)
    once = timing.site_ns.astype(np.float64)
    return Split(
        step_ns=timing.step_ns,
        migrations=migrations,
        host_updates=host_updates,
        site_ns=tuple(np.concatenate([once, once[1:] + once[-1]]).tolist()),
    )


def _planned(
    problem: Problem, planner: Planner, host_updates: tuple[HostUpdate, ...]
) -> Split | None:
    """The plan with these updates on the host, None if there is none."""
    left = left_for_device(problem, host_updates)
    if left is None or left.limit_bytes < left.enough_bytes():
        return None
    try:
        return _simulated(problem, planner(left), host_updates)
    except InfeasibleBudgetError:
        return None


def left_for_device(problem: Problem, host_updates: Sequence[HostUpdate]) -> Problem | None:
    """What is left to plan with these updates on the host, None if they have no room there."""
    placed = PlacedStep.of(problem.trace, host_updates)
    budgets, hardware = problem.budgets, problem.hardware
    room = min(budgets.host_bytes, hardware.host_capacity_bytes) - placed.host_bytes
    if placed.host_bytes and hardware.host_room_bytes(room) < 0:
        return None
    sites = tuple(
        site if nbytes == 0 else replace(site, workspace_bytes=site.workspace_bytes + nbytes)
        for site, nbytes in zip(placed.trace.sites, placed.moving.tolist(), strict=True)
    )
    trace = replace(placed.trace, sites=sites)
    return replace(
        Problem.of(trace, hardware, replace(budgets, host_bytes=room)),
        limit_bytes=problem.limit_bytes,
        only_tier=problem.only_tier,
        splits=problem.splits,
        deadline=problem.deadline,
        draft=problem.draft,
        host_copies=placed.copies,
        host_work=placed.work,
    )


def place_updates(
    problem: Problem, numbers: Sequence[int], times: Sequence[float], *, frugal: bool = False
) -> tuple[HostUpdate, ...]:
    """Sites for these updates, by when the links and the cores should be done with each.

    Args:
        problem: the step and the machine.
        numbers: of updates, in the order in which their gradients are ready.
        times: when sites of two steps are reached, in ns; (2 * sites + 1,).
        frugal: wait for each copy, so that no bytes of the device are taken meanwhile.
    """
    trace, hardware = problem.trace, problem.hardware
    cores, link = hardware.host_cores, hardware.host_link
    assert cores is not None, "updates can run on the host"
    assert link is not None, "the host can be reached"
    num_sites = len(trace.sites)
    both = link.out_while_back_bytes_per_s + link.back_while_out_bytes_per_s
    share = min(1.0, cores.memory_bytes_per_s / (cores.update_bytes_per_s + both))
    link_free = cores_free = 0.0
    placed: list[HostUpdate] = []
    done_ns: list[float] = []
    for number in numbers:
        update = trace.updates[number]
        work = host_work(trace, _somewhere(number))
        flush = last_use(trace, update, update.gradients)
        sent_ns = max(link_free, times[flush]) + link.latency_ns
        link_free = sent_ns = sent_ns + work.gradient_bytes * 1e9 / link.out_while_back_bytes_per_s
        begin_ns = max(cores_free, sent_ns, times[max(update.ready, flush)])
        cores_free = begin_ns + work.work_bytes * 1e9 / (cores.update_bytes_per_s * share)
        done_ns.append(cores_free)
        gone = flush if frugal else min(max(bisect_left(times, sent_ns), flush), num_sites)
        first = min(trace.tensors[i].windows[0][0] for i in update.parameters)
        needed = first + num_sites
        used = last_use(trace, update, update.parameters)
        placed.append(
            HostUpdate(
                update=number,
                flush=flush,
                gone=gone,
                back=min(max(gone, update.ready, used), needed),
                needed=needed,
                reason=f"{format_nbytes(work.work_bytes)} of memory traffic, "
                f"done {format_ns(round(max(times[needed] - cores_free, 0)))} before it is needed",
            )
        )
    return _copies_in(trace, link, placed, done_ns, times, frugal)


def _copies_in(
    trace: StepTrace,
    link: Link,
    placed: Sequence[HostUpdate],
    done_ns: Sequence[float],
    times: Sequence[float],
    frugal: bool,
) -> tuple[HostUpdate, ...]:
    """The same updates with parameters that come back as late as the link allows."""
    result = list(placed)
    busy_from = times[-1]
    for i in sorted(range(len(placed)), key=lambda i: (-placed[i].needed, -i)):
        h = placed[i]
        nbytes = host_work(trace, h).parameter_bytes
        copy_ns = link.latency_ns + nbytes * 1e9 / link.back_while_out_bytes_per_s
        begin_ns = busy_from = min(busy_from, times[h.needed]) - copy_ns * _MARGIN
        wanted = max(bisect_right(times, max(begin_ns, done_ns[i])) - 1, h.back)
        result[i] = replace(h, back=h.needed if frugal else min(wanted, h.needed))
    return tuple(result)
