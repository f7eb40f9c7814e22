"""Times that others have published beside what the simulator says of the same step and machine.

Rows have the tolerance within which the research before this project asked for agreement; "order"
means that only which is faster counts. Nothing is fitted to the value that a row compares with;
what was taken from the same logs stands with the rows.
"""

from collections.abc import Iterator
from dataclasses import asdict, dataclass

from bench.published_cases import (
    LOHAN_BUDGETS,
    LOHAN_PARAMETERS,
    OPEN,
    SUBGROUP,
    Offloaded,
    lohan_step,
    node_of_dos,
    nvme_of_mlp_offload,
    seconds_of,
    ssds_of_lohan,
    zero_3_step,
)
from teraplan.checker.check_plan import require_valid
from teraplan.planners import make_plan
from teraplan.simulation.simulate import Simulation, simulate
from teraplan.values.hardware import Budgets, Hardware
from teraplan.values.plan import HostUpdate, Migration, Plan
from teraplan.values.step_trace import StepTrace

MLP_OFFLOAD = (
    (44.28, 209.3, 28.3),
    (48.16, 213.6, 27.5),
    (68.61, 336.4, 32.9),
    (105.89, 501.9, 68.3),
)
"""Billions of parameters, seconds of the update and of the backward."""
_ALL = Budgets(device_bytes=OPEN, host_bytes=OPEN, storage_bytes=OPEN)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One published value."""

    reference: str
    what: str
    unit: str
    published: float
    ours: float
    tolerance: float | None
    """As a part of the published value; None: only the order counts."""

    @property
    def off(self) -> float:
        """By how much ours is above the published value, as a part of it."""
        return self.ours / self.published - 1

    @property
    def met(self) -> bool | None:
        """Whether it is within the tolerance, None without one."""
        return None if self.tolerance is None else abs(self.off) <= self.tolerance


def simulated(
    trace: StepTrace,
    hardware: Hardware,
    migrations: tuple[Migration, ...],
    host_updates: tuple[HostUpdate, ...],
) -> Simulation:
    """The step under a plan written by hand, which the checker accepts."""
    done = simulate(trace, hardware, migrations, host_updates)
    plan = Plan(
        policy="published",
        budgets=_ALL,
        hardware=hardware,
        trace=trace,
        migrations=migrations,
        prediction=done.prediction,
        host_updates=host_updates,
    )
    require_valid(plan)
    return done


def mlp_offload_rows() -> Iterator[Row]:
    """R1: the update and the flush of ZeRO-3 with NVMe, four ranks."""
    logged = (
        (44.28, 209.3, 28.3),
        (48.16, 213.6, 27.5),
        (68.61, 336.4, 32.9),
        (105.89, 501.9, 68.3),
    )
    hardware = nvme_of_mlp_offload()
    for billions, update_s, backward_s in logged:
        trace = zero_3_step(billions * 1e9)
        limit = Budgets(device_bytes=4 * 16 * SUBGROUP, host_bytes=0, storage_bytes=OPEN)
        plan = make_plan(trace, hardware, limit, "zero-infinity")
        done = simulate(trace, hardware, plan.migrations)
        start_ns = done.site_start_ns[len(trace.sites) // 2]
        for what, published, ours, tolerance in (
            ("update", update_s, (done.step_ns - start_ns) / 1e9, 0.05),
            ("backward", backward_s, start_ns / 1e9, 0.20),
        ):
            yield Row(
                reference="R1",
                what=f"{billions} G parameters, {what}",
                unit="s",
                published=published,
                ours=ours,
                tolerance=tolerance,
            )


def _phases_ms(run: Offloaded, done: Simulation) -> tuple[float, float]:
    """Backward with what it waits for, and update, which ends where the next step can begin."""
    first = len(done.site_start_ns) - run.count
    wait_ns = sum(stall.duration_ns for stall in done.stalls if stall.site == 0)
    begin_ns = done.site_start_ns[1] - wait_ns
    backward_ns = done.site_start_ns[first] - done.site_start_ns[1]
    waits = sum(s.duration_ns for s in done.stalls if s.site == first)
    update_ns = done.step_ns - begin_ns - backward_ns - waits
    return (backward_ns + waits) / 1e6, update_ns / 1e6


def h100_rows() -> Iterator[Row]:
    """R3: Deep Optimizer States on four H100s, 15.33 billion parameters.

    From the same logs: the forward, 209 ms; 1.69 G parameters per second on the host. The backward
    is taken to compute for three forwards, as with recomputation. 50 GB/s of link: assumed.
    """
    run = Offloaded(parameters=15.33e9 / 4, forward_ms=209, backward_ms=3 * 209)
    hardware = node_of_dos(50.0, 1.69e9)
    for what, stride, waiting, backward_ms, update_ms in (
        ("gradients waited for, all on the host", 0, True, 4455, 2272),
        ("all on the host", 0, False, 971, 2278),
        ("every second on the device", 2, False, 848, 1296),
    ):
        done = simulated(run.step(), hardware, *run.by_stride(stride, waiting=waiting))
        backward, update = _phases_ms(run, done)
        for phase, published, ours in (
            ("backward", backward_ms, backward),
            ("update", update_ms, update),
        ):
            yield Row(
                reference="R3",
                what=f"{what}, {phase}",
                unit="ms",
                published=published,
                ours=ours,
                tolerance=0.10,
            )


def stride_rows() -> Iterator[Row]:
    """R4: strides on four A100s; the update, with 0.74 G parameters per second on the host.

    Three of the four models: of "8.3B" the number of parameters is not in the logs.
    """
    logged = {
        "7B": (5.90, (1993, 1338, 1449, 1462, 1485, 1509, 1474)),
        "13B": (11.32, (3762, 2596, 2680, 2821, 2921, 2922, 3006)),
        "20B": (15.33, (5200, 3499, 3602, 3818, 3932, 3940, 3950)),
    }
    hardware = node_of_dos(25.0, 0.74e9)
    for name, (billions, values) in logged.items():
        run = Offloaded(parameters=billions * 1e9 / 4, forward_ms=100, backward_ms=300)
        for stride, published in zip((0, 2, 3, 4, 6, 8, 10), values, strict=True):
            done = simulated(run.step(), hardware, *run.by_stride(stride))
            yield Row(
                reference="R4",
                what=f"{name}, " + (f"stride {stride}" if stride else "all on the host"),
                unit="ms",
                published=published,
                ours=_phases_ms(run, done)[1],
                tolerance=None,
            )


def batch_rows() -> Iterator[Row]:
    """R5: how many times as fast stride 5 is than waiting for gradients, one GPU, "7B".

    From logs of the same group: a forward takes 640 ms, the host alone updates 1.45 G parameters
    per second.
    """
    hardware = node_of_dos(25.0, 1.45e9)
    for batch, published in ((4, 1.69), (8, 1.44), (16, 1.29), (32, 1.18), (64, 1.11)):
        run = Offloaded(
            parameters=5.90e9, forward_ms=640, backward_ms=3 * 640, micro_batches=batch // 4
        )
        slow = simulated(run.step(), hardware, *run.by_stride(0, waiting=True))
        fast = simulated(run.step(), hardware, *run.by_stride(5))
        yield Row(
            reference="R5",
            what=f"batch {batch}",
            unit="times",
            published=published,
            ours=slow.step_ns / fast.step_ns,
            tolerance=None,
        )


def lohan_rows() -> Iterator[Row]:
    """R6: LoHan, 13 billion parameters on an RTX 4090 with 1 to 12 SSDs.

    From the same logs: what it reaches at most, 155.8 TFLOPS, which is the computation. All state
    goes to the SSDs in every step, as there.
    """
    logged = {
        32: (37.5, 64.3, 81.1, 121.7, 142.0),
        48: (53.1, 89.7, 121.7, 146.3, 153.9),
        64: (70.3, 111.7, 136.3, 151.5, 148.2),
    }
    for batch, values in logged.items():
        trace = lohan_step(batch)
        for ssds, published in zip((1, 2, 3, 6, 12), values, strict=True):
            plan = make_plan(trace, ssds_of_lohan(ssds), LOHAN_BUDGETS, "zero-infinity")
            seconds = plan.prediction.step_ns * 1e-9
            yield Row(
                reference="R6",
                what=f"batch {batch}, {ssds} SSD",
                unit="TFLOPS",
                published=published,
                ours=seconds_of(batch, 1.0) / seconds,
                tolerance=0.10,
            )


def own_split_ms() -> dict[str, float]:
    """The H100s of R3 under our planner: the step, where the update is no phase of its own."""
    run = Offloaded(parameters=15.33e9 / 4, forward_ms=209, backward_ms=3 * 209)
    trace, hardware = run.step(), node_of_dos(50.0, 1.69e9)
    stride = simulated(trace, hardware, *run.by_stride(2))
    limit = Budgets(
        device_bytes=stride.prediction.device_peak_bytes, host_bytes=OPEN, storage_bytes=0
    )
    ours = make_plan(trace, hardware, limit)
    return {
        "stride_2_step_ms": stride.step_ns / 1e6,
        "ours_step_ms": ours.prediction.step_ns / 1e6,
        "ours_on_device": 1 - len(ours.host_updates) / run.count,
        "device_bytes": stride.prediction.device_peak_bytes,
    }


def published() -> dict[str, object]:
    """Every row, printed as a table, and how many are within their tolerance."""
    rows: list[Row] = []
    for rows_of in (mlp_offload_rows, h100_rows, stride_rows, batch_rows, lohan_rows):
        for row in rows_of():
            rows.append(row)
            verdict = {True: "within", False: "NOT within", None: "order of"}[row.met]
            limit = "" if row.tolerance is None else f" {row.tolerance:.0%}"
            print(
                f"{row.reference} {row.what}: {row.published:g} {row.unit}, ours {row.ours:.4g} "
                f"({row.off:+.1%}, {verdict}{limit})",
                flush=True,
            )
    met = {
        name: [row.met for row in rows if row.reference == name and row.met is not None]
        for name in dict.fromkeys(row.reference for row in rows)
    }
    counts = {name: f"{sum(found)} of {len(found)}" for name, found in met.items() if found}
    own = own_split_ms()
    print(f"within their tolerance: {counts}; our split: {own}")
    return {
        "rows": [asdict(row) | {"off": row.off, "met": row.met} for row in rows],
        "within": counts,
        "own_split": own,
        "lohan_parameters": LOHAN_PARAMETERS,
    }
