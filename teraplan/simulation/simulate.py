"""A simulated step with names, memory and sums, and what of it a plan keeps.

What happens when is `simulator`'s; this adds everything that follows from the plan alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from teraplan.errors import ConfigError
from teraplan.simulation.memory_curve import Curve, device_curve, fixed_curve, peak
from teraplan.simulation.placed_step import HostWork, PlacedStep
from teraplan.simulation.simulator import LONGEST_NS, Simulator, Timing, Transfer
from teraplan.units import format_ns
from teraplan.values.hardware import Hardware, Tier
from teraplan.values.plan import HostUpdate, Migration, Prediction, Recomputation
from teraplan.values.recomputed_step import recomputed_step
from teraplan.values.run_record import Direction, StallRecord, TransferRecord
from teraplan.values.step_trace import StepTrace


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

    prediction: Prediction
    site_start_ns: tuple[int, ...]
    """When each site is reached, before its waits."""
    managed_bytes: tuple[int, ...]
    """Bytes of listed tensors on the device in each interval."""
    transfers: tuple[TransferRecord, ...]
    stalls: tuple[StallRecord, ...]
    host_updates: tuple[HostUpdateRecord, ...] = ()

    @property
    def step_ns(self) -> int:
        """Length of the step."""
        return self.prediction.step_ns


def simulate(
    trace: StepTrace,
    hardware: Hardware,
    migrations: Sequence[Migration],
    host_updates: Sequence[HostUpdate] = (),
) -> Simulation:
    """The step of `trace` under a plan, which must be valid (`check_plan`).

    Raises:
        ConfigError: if a migration goes over a link that the machine does not have, an update runs
            on a host of unknown speed, or the step is too long to be told.
    """
    placed = PlacedStep.of(trace, host_updates)
    timing = Simulator(placed.trace, hardware, placed.work).run(migrations, with_transfers=True)
    return _described(trace, placed, migrations, timing)


def _described(
    trace: StepTrace, placed: PlacedStep, migrations: Sequence[Migration], timing: Timing
) -> Simulation:
    """A simulated step with names, memory and sums."""
    tensors = trace.tensors
    managed = placed.managed(migrations)
    return Simulation(
        prediction=_prediction(trace, placed, migrations, timing, managed),
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


def _prediction(
    trace: StepTrace,
    placed: PlacedStep,
    migrations: Sequence[Migration],
    timing: Timing,
    managed: Curve,
) -> Prediction:
    """What a plan keeps of a simulated step in which so many listed bytes are on the device.

    Raises:
        ConfigError: if the step is too long to be told.
    """
    if timing.step_ns >= LONGEST_NS:
        raise ConfigError(
            f"the step takes {format_ns(LONGEST_NS)} or longer, over links that are too slow for "
            "what has to move; correct the speeds of the hardware, or raise the device budget"
        )
    stall_ns: dict[int, int] = {}
    for wait in timing.waits:
        tensor_id = moved_tensor(migrations, placed.work, wait.migration, wait.direction)
        stall_ns[tensor_id] = stall_ns.get(tensor_id, 0) + wait.duration_ns
    out_bytes: dict[Tier, int] = {}
    back_bytes: dict[Tier, int] = {}
    for m in migrations:
        for tier, nbytes in m.parts(trace.tensors[m.tensor_id].nbytes):
            out_bytes[tier] = out_bytes.get(tier, 0) + (0 if m.clean else nbytes)
            back_bytes[tier] = back_bytes.get(tier, 0) + nbytes
    for w in placed.work:
        out_bytes[Tier.HOST] = out_bytes.get(Tier.HOST, 0) + w.gradient_bytes
        back_bytes[Tier.HOST] = back_bytes.get(Tier.HOST, 0) + w.parameter_bytes
    return Prediction(
        step_ns=timing.step_ns,
        ideal_ns=trace.duration_ns,
        device_peak_bytes=peak(fixed_curve(placed.trace) + managed),
        unlimited_peak_bytes=peak(device_curve(trace)),
        managed_peak_bytes=peak(managed),
        host_peak_bytes=peak(placed.occupied(migrations, Tier.HOST)),
        storage_peak_bytes=peak(placed.occupied(migrations, Tier.STORAGE)),
        out_bytes=out_bytes,
        back_bytes=back_bytes,
        stall_ns=stall_ns,
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
    """The prediction that belongs into a plan with these migrations and other choices.

    Raises:
        ConfigError: as `simulate`.
    """
    step = recomputed_step(trace, [choice.tensor_id for choice in recomputed])
    placed = PlacedStep.of(step, host_updates)
    timing = Simulator(placed.trace, hardware, placed.work).run(migrations)
    said = _prediction(step, placed, migrations, timing, placed.managed(migrations))
    if not recomputed:
        return said
    unlimited = peak(device_curve(trace))
    return replace(said, ideal_ns=trace.duration_ns, unlimited_peak_bytes=unlimited)
