"""A lower bound on the time of a step under a budget, cheap enough to ask before every attempt.

At interval k, pressure[k] bytes must be elsewhere. Tensors that are born in the step were written
before k and are read after k, so with W and R the sum of the links' speeds out and back,

    step >= max(ideal before k, pressure / W) + interval k + max(ideal after k, pressure / R)

Bytes of persistent tensors may have been written in the step before, so they are taken off. Where
no idle period crosses a site, the parts of the step before and after it add up. For persistent
tensors alone: in each step, what is over the budget at k is read once, in no less than bytes / R.
"""

import numpy as np
import numpy.typing as npt

from teraplan.hardware import Hardware
from teraplan.lifetimes import Lifetimes
from teraplan.memory_curve import Curve, sum_ranges


def step_bound_ns(periods: Lifetimes, hardware: Hardware, pressure: Curve) -> int:
    """A time in ns that no valid plan can beat, given the bytes over the budget per interval."""
    ideal_ns = periods.trace.duration_ns
    links = [link for link in (hardware.host_link, hardware.storage_link) if link is not None]
    if not links or not pressure.any():
        return ideal_ns
    out = sum(max(link.out_bytes_per_s, link.out_while_back_bytes_per_s) for link in links)
    back = sum(max(link.back_bytes_per_s, link.back_while_out_bytes_per_s) for link in links)
    born = _newborn(periods, pressure)
    to_write, to_read = born[0] * (1e9 / out), born[1] * (1e9 / back)
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
    repeated = float(pressure.max()) * 1e9 / back
    return max(ideal_ns, int(max(total, repeated)))


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
    return np.array([tensors[i].persistent for i in periods.tensor_ids.tolist()], dtype=bool)


def _bytes_of(periods: Lifetimes, among: npt.NDArray[np.bool_]) -> Curve:
    columns = (periods.start[among], periods.end[among], periods.nbytes[among])
    return sum_ranges(periods.num_sites, zip(*(c.tolist() for c in columns), strict=True))


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
