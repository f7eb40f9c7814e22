"""One step as a row of things to draw, the same for a plan's prediction and for a run.

Times are nanoseconds from the start of the step. Series have one value for each interval.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from teraplan.errors import FileFormatError
from teraplan.simulation.memory_curve import Curve, device_curve, fixed_curve
from teraplan.simulation.placed_step import PlacedStep
from teraplan.simulation.simulate import HostUpdateRecord, Simulation
from teraplan.values.plan import Plan
from teraplan.values.run_record import RunRecord, StallRecord, TransferRecord
from teraplan.values.step_trace import StepTrace


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphCall:
    """A stretch of the step in which one graph runs in one phase."""

    graph: str
    call: int
    backward: bool
    start_ns: int
    end_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawing:
    """What a timeline or a picture of one step shows."""

    name: str
    """ "planned" or "actual, step 7"."""
    duration_ns: int
    site_start_ns: tuple[int, ...]
    calls: tuple[GraphCall, ...]
    managed_bytes: tuple[int, ...]
    fixed_bytes: tuple[int, ...]
    """State and workspace."""
    unlimited_bytes: tuple[int, ...]
    """Everything that would be on the device with nothing moved."""
    transfers: tuple[TransferRecord, ...]
    stalls: tuple[StallRecord, ...]
    host_updates: tuple[HostUpdateRecord, ...] = ()

    @property
    def device_bytes(self) -> tuple[int, ...]:
        """All that is on the device in each interval."""
        pairs = zip(self.managed_bytes, self.fixed_bytes, strict=True)
        return tuple(managed + fixed for managed, fixed in pairs)


def graph_calls(
    trace: StepTrace, site_start_ns: Sequence[int], duration_ns: int
) -> tuple[GraphCall, ...]:
    """Stretches of consecutive sites of the same graph, call and phase."""
    found: list[GraphCall] = []
    first = 0
    for index in range(1, len(trace.sites) + 1):
        here = trace.sites[first]
        if index < len(trace.sites):
            there = trace.sites[index]
            if (there.graph, there.call, there.backward) == (here.graph, here.call, here.backward):
                continue
        found.append(
            GraphCall(
                graph=here.graph,
                call=here.call,
                backward=here.backward,
                start_ns=site_start_ns[first],
                end_ns=site_start_ns[index] if index < len(trace.sites) else duration_ns,
            )
        )
        first = index
    return tuple(found)


def draw_plan(plan: Plan, simulation: Simulation) -> Drawing:
    """The step as it is predicted under `plan`."""
    trace, placed = plan.step, PlacedStep.of(plan.step, plan.host_updates)
    starts, step_ns = simulation.site_start_ns, simulation.step_ns
    return Drawing(
        name="planned",
        duration_ns=step_ns,
        site_start_ns=starts,
        calls=graph_calls(trace, starts, step_ns),
        managed_bytes=simulation.managed_bytes,
        fixed_bytes=_ints(fixed_curve(placed.trace)),
        unlimited_bytes=_ints(device_curve(plan.trace)),
        transfers=simulation.transfers,
        stalls=simulation.stalls,
        host_updates=simulation.host_updates,
    )


def draw_run(plan: Plan, run: RunRecord) -> Drawing:
    """The step as it ran; phases, state and workspace come from the trace of `plan`.

    Raises:
        FileFormatError: if the run has other sites than the plan.
    """
    trace = plan.step
    lengths = {len(trace.sites), len(run.site_start_ns), len(run.managed_bytes)}
    if len(lengths) > 1:
        raise FileFormatError(
            f"step {run.step} has times of {len(run.site_start_ns)} sites and memory of "
            f"{len(run.managed_bytes)}, but its plan has {len(trace.sites)} sites; "
            "the run and the plan in this file do not belong together"
        )
    return Drawing(
        name=f"actual, step {run.step}",
        duration_ns=run.duration_ns,
        site_start_ns=run.site_start_ns,
        calls=graph_calls(trace, run.site_start_ns, run.duration_ns),
        managed_bytes=run.managed_bytes,
        fixed_bytes=_ints(fixed_curve(trace)),
        unlimited_bytes=_ints(device_curve(plan.trace)),
        transfers=run.transfers,
        stalls=run.stalls,
    )


def _ints(curve: Curve) -> tuple[int, ...]:
    return tuple(curve.tolist())
