"""A simulated step with names, memory and sums, and what of it a plan keeps.

What happens when is `simulator`'s; this adds everything that follows from the plan alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from teraplan.hardware import Hardware, Tier
from teraplan.memory_curve import device_curve, fixed_curve, peak
from teraplan.placed_step import HostWork, PlacedStep
from teraplan.plan import HostUpdate, Migration, Prediction, Recomputation
from teraplan.recomputed_step import recomputed_step
from teraplan.run_record import Direction, StallRecord, TransferRecord
from teraplan.simulator import Simulator, Timing, Transfer
from teraplan.step_trace import StepTrace


@dataclass(frozen=True, slots=True, kw_only=True)
class HostUpdateRecord:
    """The host's cores at work on one update; times from the start of the step."""

    tensor: str
    """Its first parameter."""
    nbytes: int
    """What they read and write."""
    start_ns: int
    end_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulation:
    """A simulated step, in the terms of `RunRecord` so that the two can be compared."""

    step_ns: int
    ideal_ns: int
    site_start_ns: tuple[int, ...]
    """When each site is reached, before its waits."""
    managed_bytes: tuple[int, ...]
    """Bytes of listed tensors on the device in each interval."""
    transfers: tuple[TransferRecord, ...]
    stalls: tuple[StallRecord, ...]
    device_peak_bytes: int
    unlimited_peak_bytes: int
    managed_peak_bytes: int
    host_peak_bytes: int
    storage_peak_bytes: int
    out_bytes: dict[Tier, int]
    back_bytes: dict[Tier, int]
    stall_ns: dict[int, int]
    host_updates: tuple[HostUpdateRecord, ...] = ()


def simulate(
    trace: StepTrace,
    hardware: Hardware,
    migrations: Sequence[Migration],
    host_updates: Sequence[HostUpdate] = (),
) -> Simulation:
    """The step of `trace` under a plan, which must be valid (`check_plan`).

    Raises:
        ConfigError: if a migration goes over a link that the machine does not have, or an update
            runs on a host of unknown speed.
    """
    placed = PlacedStep.of(trace, host_updates)
    timing = Simulator(placed.trace, hardware, placed.work).run(migrations, with_transfers=True)
    return describe(trace, placed, migrations, timing)


def describe(
    trace: StepTrace, placed: PlacedStep, migrations: Sequence[Migration], timing: Timing
) -> Simulation:
    """A simulated step with names, memory and sums."""
    tensors = trace.tensors
    stall_ns: dict[int, int] = {}
    for wait in timing.waits:
        tensor_id = moved_tensor(migrations, placed.work, wait.migration, wait.direction)
        stall_ns[tensor_id] = stall_ns.get(tensor_id, 0) + wait.duration_ns
    managed = placed.managed(migrations)
    out_bytes: dict[Tier, int] = {}
    back_bytes: dict[Tier, int] = {}
    for m in migrations:
        for tier, nbytes in m.parts(tensors[m.tensor_id].nbytes):
            out_bytes[tier] = out_bytes.get(tier, 0) + (0 if m.clean else nbytes)
            back_bytes[tier] = back_bytes.get(tier, 0) + nbytes
    for w in placed.work:
        out_bytes[Tier.HOST] = out_bytes.get(Tier.HOST, 0) + w.gradient_bytes
        back_bytes[Tier.HOST] = back_bytes.get(Tier.HOST, 0) + w.parameter_bytes
    return Simulation(
        step_ns=timing.step_ns,
        ideal_ns=trace.duration_ns,
        site_start_ns=tuple(timing.site_ns[:-1].tolist()),
        managed_bytes=tuple(managed.tolist()),
        transfers=tuple(_record(trace, placed, migrations, t) for t in timing.transfers),
        stalls=tuple(
            StallRecord(
                site=wait.site,
                tensor=tensors[
                    moved_tensor(migrations, placed.work, wait.migration, wait.direction)
                ].name,
                start_ns=wait.start_ns,
                duration_ns=wait.duration_ns,
            )
            for wait in timing.waits
        ),
        device_peak_bytes=peak(fixed_curve(placed.trace) + managed),
        unlimited_peak_bytes=peak(device_curve(trace)),
        managed_peak_bytes=peak(managed),
        host_peak_bytes=peak(placed.occupied(migrations, Tier.HOST)),
        storage_peak_bytes=peak(placed.occupied(migrations, Tier.STORAGE)),
        out_bytes=out_bytes,
        back_bytes=back_bytes,
        stall_ns=stall_ns,
        host_updates=tuple(
            HostUpdateRecord(
                tensor=tensors[placed.work[run.work].parameter].name,
                nbytes=placed.work[run.work].work_bytes,
                start_ns=run.start_ns,
                end_ns=run.end_ns,
            )
            for run in timing.host_runs
        ),
    )


def moved_tensor(
    migrations: Sequence[Migration], work: Sequence[HostWork], index: int, direction: Direction
) -> int:
    """The tensor of a wait or transfer; of an update on the host, the first of the bucket."""
    if index < len(migrations):
        return migrations[index].tensor_id
    bucket = work[index - len(migrations)]
    return bucket.gradient if direction is Direction.OUT else bucket.parameter


def _record(
    trace: StepTrace, placed: PlacedStep, migrations: Sequence[Migration], transfer: Transfer
) -> TransferRecord:
    tensor_id = moved_tensor(migrations, placed.work, transfer.migration, transfer.direction)
    return TransferRecord(
        tensor=trace.tensors[tensor_id].name,
        nbytes=transfer.nbytes,
        direction=transfer.direction,
        tier=transfer.tier,
        store="",
        start_ns=transfer.start_ns,
        end_ns=transfer.end_ns,
    )


def predict(
    trace: StepTrace,
    hardware: Hardware,
    migrations: Sequence[Migration],
    host_updates: Sequence[HostUpdate] = (),
    recomputed: Sequence[Recomputation] = (),
) -> Prediction:
    """The prediction that belongs into a plan with these migrations and other choices."""
    step = recomputed_step(trace, [choice.tensor_id for choice in recomputed])
    return replace(
        prediction_of(simulate(step, hardware, migrations, host_updates)),
        ideal_ns=trace.duration_ns,
        unlimited_peak_bytes=peak(device_curve(trace)),
    )


def prediction_of(simulation: Simulation) -> Prediction:
    """The part of a simulation that a plan keeps."""
    return Prediction(
        step_ns=simulation.step_ns,
        ideal_ns=simulation.ideal_ns,
        device_peak_bytes=simulation.device_peak_bytes,
        unlimited_peak_bytes=simulation.unlimited_peak_bytes,
        managed_peak_bytes=simulation.managed_peak_bytes,
        host_peak_bytes=simulation.host_peak_bytes,
        storage_peak_bytes=simulation.storage_peak_bytes,
        out_bytes=simulation.out_bytes,
        back_bytes=simulation.back_bytes,
        stall_ns=simulation.stall_ns,
    )
