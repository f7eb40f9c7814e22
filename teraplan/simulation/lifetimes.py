"""The inactive periods of a step as columns: what can be elsewhere, when, and for how long.

sites      0   1   2   3   4   5   6   7
tensor 0       [===idle====][##][=idle=]        two rows: (0, 1, 4), (0, 5, 7)
weight 1   ==]     [########]          [=====   one row that wraps: (1, 6, 10)
"""

from dataclasses import dataclass
from typing import final

import numpy as np
import numpy.typing as npt

from teraplan.simulation.memory_curve import Curve, device_curve, managed_curve, touched_curve
from teraplan.values.step_trace import StepTrace

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


@final
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Lifetimes:
    """The inactive periods of a trace, in order of (start, end, tensor); arrays of shape (p,)."""

    trace: StepTrace
    tensor_ids: Ints
    start: Ints
    """First idle interval."""
    end: Ints
    """The site at which it is touched again; from the number of sites on, in the next step."""
    nbytes: Ints
    idle_ns: Ints
    """Computation during the period."""
    site_ns: Ints
    """When each site is reached without waits, in two steps, and their end; (2 * sites + 1,)."""

    @classmethod
    def of(cls, trace: StepTrace) -> "Lifetimes":
        """The inactive periods of `trace` of tensors that have any bytes."""
        tensors = trace.tensors
        rows = [row for row in trace.periods() if tensors[row[0]].nbytes > 0]
        rows.sort(key=lambda row: (row[1], row[2], row[0]))
        columns = np.array(rows, dtype=np.int64).reshape(-1, 3)
        tensor_ids, start, end = (columns[:, i].copy() for i in range(3))
        sizes = np.fromiter((t.nbytes for t in tensors), np.int64, len(tensors))
        site_ns = site_times(trace)
        return cls(
            trace=trace,
            tensor_ids=tensor_ids,
            start=start,
            end=end,
            nbytes=sizes[tensor_ids],
            idle_ns=site_ns[end] - site_ns[start],
            site_ns=site_ns,
        )

    def __len__(self) -> int:
        return len(self.start)

    @property
    def num_sites(self) -> int:
        """Number of sites of the step."""
        return len(self.trace.sites)

    def idle_at(self, site: int) -> Ints:
        """Rows of the periods that cover interval `site`, ascending."""
        here = (self.start <= site) & (site < self.end)
        later = site + self.num_sites
        return np.flatnonzero(here | ((self.start <= later) & (later < self.end)))

    def device_curve(self) -> Curve:
        """Bytes on the device per interval if nothing moves."""
        return device_curve(self.trace)

    def idle_curve(self) -> Curve:
        """Bytes per interval of tensors that are alive and idle: the most that can be elsewhere."""
        return managed_curve(self.trace) - touched_curve(self.trace)


def site_times(trace: StepTrace) -> Ints:
    """When each site is reached without waits, for two steps and their end, in ns."""
    sites = trace.sites
    durations = np.fromiter((site.duration_ns for site in sites), np.int64, len(sites))
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(np.tile(durations, 2))])
