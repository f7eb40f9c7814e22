"""A lower bound on the time of a step under a budget, cheap enough to ask before every attempt.

At interval k, pressure[k] bytes must be elsewhere. Tensors that are born in the step were written
before k and are read after k, so with W and R the sum of the links' speeds out and back,

    step >= max(ideal before k, pressure / W) + interval k + max(ideal after k, pressure / R)

Bytes of persistent tensors may have been written in the step before, so they are taken off. Where
no idle period crosses a site, the parts of the step before and after it add up.

And in each step no fewer bytes are read than the fewest that idle periods which end in the step
must have, if what is over the budget is to be away everywhere. Taken byte by byte, the period that
ends last is the best to take where bytes are missing (Belady); what is idle across the end of the
step counts as away there for nothing. What one tier cannot hold goes over the links of the others.
"""

import heapq
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from teraplan.simulation.lifetimes import Lifetimes
from teraplan.simulation.memory_curve import Curve, sum_columns
from teraplan.simulation.placed_step import held_bytes, work_bytes
from teraplan.values.hardware import Hardware, Link, Tier
from teraplan.values.step_trace import TensorKind


def step_bound_ns(
    periods: Lifetimes,
    hardware: Hardware,
    pressure: Curve,
    rooms: Mapping[Tier, int] | None = None,
) -> int:
    """A time in ns that no valid plan can beat.

    Args:
        periods: what can be elsewhere.
        hardware: the machine.
        pressure: the bytes over the budget per interval.
        rooms: the most bytes in each other tier; None is no limit.
    """
    ideal_ns = periods.trace.duration_ns
    links = list(links_of(hardware).values())
    if not links or not pressure.any():
        return ideal_ns
    out, back = _fastest(links)
    if hardware.device_port is not None:
        out, back = (
            min(a, b) for a, b in zip((out, back), _fastest([hardware.device_port]), strict=True)
        )
    born = _newborn(periods, pressure)
    to_write, to_read = born[0] * (1e9 / out), born[1] * (1e9 / back)
    crowded = 0.0
    for tier, link in links_of(hardware).items():
        # what the other tiers cannot hold goes over this link
        room = None if rooms is None else sum(n for other, n in rooms.items() if other is not tier)
        if room is not None:
            alone = _fastest([link])
            to_write = np.maximum(to_write, (born[0] - room) * (1e9 / alone[0]))
            to_read = np.maximum(to_read, (born[1] - room) * (1e9 / alone[1]))
            crowded = max(crowded, (float(pressure.max()) - room) * 1e9 / alone[1])
    at = periods.site_ns[: periods.num_sites + 1].astype(np.float64)
    total, reached = 0.0, 0
    for first, last in _islands(periods):
        ks = slice(first, last)
        before, after = at[ks] - at[first], at[last] - at[first + 1 : last + 1]
        inside = np.maximum(before, to_write[ks]) + np.maximum(after, to_read[ks])
        inside += at[first + 1 : last + 1] - at[ks]
        total += float(at[first] - at[reached]) + float(inside.max())
        reached = last
    total += float(at[-1] - at[reached])
    repeated = least_read_bytes(periods, pressure) * 1e9 / back
    return max(ideal_ns, int(max(total, repeated, crowded)))


def split_bound_ns(periods: Lifetimes, hardware: Hardware, pressure: Curve) -> int:
    """A time in ns that no valid plan can beat where updates may run on the host's cores, too.

    Neither the device nor the cores can do their part in less. Taken in parts, the updates that
    take the device longest for their time on the host are the best to take (a fractional
    knapsack); the step is no shorter than where both take as long. And what is over the budget is
    read back in the step, but for what the cores take over: in a step of T they take over
    T * most_per_ns bytes at most.
    """
    trace, cores = periods.trace, hardware.host_cores
    assert cores is not None, "updates can run on the host"
    speed = min(cores.update_bytes_per_s, cores.memory_bytes_per_s)
    at = periods.site_ns.tolist()
    jobs = [
        (at[update.end] - at[update.start], work_bytes(trace, update) * 1e9 / speed)
        for update in trace.updates
    ]
    held = [held_bytes(trace, update) for update in trace.updates]
    most_per_ns = max(
        (nbytes / ns if ns else np.inf for nbytes, (_, ns) in zip(held, jobs, strict=True)),
        default=0.0,
    )
    links = list(links_of(hardware).values())
    port = [hardware.device_port] if hardware.device_port is not None else links
    back = min(_fastest(links)[1], _fastest(port)[1]) * 1e-9 if links else np.inf
    read_ns = float(pressure.max(initial=0)) / (back + most_per_ns)
    device_ns, host_ns = float(trace.duration_ns), 0.0
    for own_ns, there_ns in sorted(jobs, key=lambda job: job[1] / max(job[0], 1)):
        if host_ns + there_ns >= device_ns - own_ns:
            part = (device_ns - host_ns) / max(own_ns + there_ns, 1.0)
            device_ns -= min(part, 1.0) * own_ns
            break
        device_ns, host_ns = device_ns - own_ns, host_ns + there_ns
    return int(max(device_ns, read_ns))


def links_of(hardware: Hardware) -> dict[Tier, Link]:
    """The links that the machine has, by the tier they lead to."""
    links = {Tier.HOST: hardware.host_link, Tier.STORAGE: hardware.storage_link}
    return {tier: link for tier, link in links.items() if link is not None}


def _fastest(links: Sequence[Link]) -> tuple[int, int]:
    """Bytes per second that the links together can carry out, and back."""
    return (
        sum(max(link.out_bytes_per_s, link.out_while_back_bytes_per_s) for link in links),
        sum(max(link.back_bytes_per_s, link.back_while_out_bytes_per_s) for link in links),
    )


def least_read_bytes(periods: Lifetimes, pressure: Curve) -> int:
    """The fewest bytes that any plan reads in a step in which so many are away per interval."""
    num_sites = periods.num_sites
    start, end, nbytes = periods.start, periods.end, periods.nbytes
    wraps = end > num_sites
    free = sum_columns(num_sites, start[wraps], np.full_like(end[wraps], num_sites), nbytes[wraps])
    missing = np.maximum(pressure - free, 0)
    # what wraps is read at its end in this step; before that it is away from the beginning
    first = np.where(wraps, np.maximum(start - num_sites, 0), start)
    last = np.where(wraps, end - num_sites, end)
    order = np.argsort(first, kind="stable")
    begins, ends, sizes = first[order].tolist(), last[order].tolist(), nbytes[order].tolist()
    heap: list[tuple[int, int]] = []
    change = [0] * (num_sites + 1)
    covered, read, row = 0, 0, 0
    for site, wanted in enumerate(missing.tolist()):
        covered -= change[site]
        while row < len(begins) and begins[row] <= site:
            heapq.heappush(heap, (-ends[row], sizes[row]))
            row += 1
        while covered < wanted and heap and -heap[0][0] > site:
            until, size = heapq.heappop(heap)
            taken = min(size, wanted - covered)
            if taken < size:
                heapq.heappush(heap, (until, size - taken))
            covered += taken
            read += taken
            change[min(-until, num_sites)] += taken
    return read


def _newborn(periods: Lifetimes, pressure: Curve) -> tuple[Curve, Curve]:
    """Bytes per interval that must have been written since their island began, and must be read.

    A tensor in its second or a later idle period may have been written in an earlier island.
    """
    tensors = periods.trace.tensors
    ids, first_row = np.unique(periods.tensor_ids, return_index=True)
    assert len(ids) <= len(tensors), "rows name tensors of the trace"
    later = np.ones(len(periods), dtype=bool)
    later[first_row] = False
    lasting = _lasting(periods)
    return (
        np.maximum(pressure - _bytes_of(periods, lasting | later), 0),
        np.maximum(pressure - _bytes_of(periods, lasting), 0),
    )


def _lasting(periods: Lifetimes) -> npt.NDArray[np.bool_]:
    tensors = periods.trace.tensors
    lasting = [t.persistent or t.kind is TensorKind.PARAMETER for t in tensors]
    return np.array([lasting[i] for i in periods.tensor_ids.tolist()], dtype=bool)


def _bytes_of(periods: Lifetimes, among: npt.NDArray[np.bool_]) -> Curve:
    columns = (periods.start[among], periods.end[among], periods.nbytes[among])
    return sum_columns(periods.num_sites, *columns)


def _islands(periods: Lifetimes) -> list[tuple[int, int]]:
    """Stretches [first, last) covered by periods that do not outlive the step, joined."""
    found: list[tuple[int, int]] = []
    born = ~_lasting(periods)
    for start, end in zip(periods.start[born].tolist(), periods.end[born].tolist(), strict=True):
        if found and start < found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        else:
            found.append((start, end))
    return found
