"""A plan of known shape: twelve transformer blocks, forward, backward and an optimizer step."""

from teraplan.simulation.memory_curve import managed_curve
from teraplan.simulation.simulate import predict
from teraplan.units import GIB, MIB
from teraplan.values.hardware import Budgets, Hardware, Link, Tier
from teraplan.values.plan import Migration, Plan
from teraplan.values.run_record import Direction, RunRecord, StallRecord, TransferRecord
from teraplan.values.step_trace import Fingerprint, Site, SiteKind, StepTrace, Tensor, TensorKind

NUM_BLOCKS = 12
MS = 1_000_000
PARTS = (("attn", "sdpa", 96 * MIB), ("mlp", "gelu", 160 * MIB))
LINK = Link(
    out_bytes_per_s=25_000_000_000,
    back_bytes_per_s=24_000_000_000,
    out_while_back_bytes_per_s=19_000_000_000,
    back_while_out_bytes_per_s=19_000_000_000,
    latency_ns=15_000,
)
DISK = Link(
    out_bytes_per_s=6_000_000_000,
    back_bytes_per_s=6_800_000_000,
    out_while_back_bytes_per_s=3_100_000_000,
    back_while_out_bytes_per_s=3_600_000_000,
    latency_ns=90_000,
)


class _Sites:
    """Collects sites; `touch` returns the index of the site that it added."""

    def __init__(self) -> None:
        self.sites: list[Site] = []

    def touch(
        self, kind: SiteKind, call: int, backward: bool, tensor: int | None, ms: float
    ) -> int:
        self.sites.append(
            Site(
                kind=kind,
                graph="g0",
                call=call,
                backward=backward,
                tensor_id=tensor,
                duration_ns=round(ms * MS),
                workspace_bytes=(96 if backward else 64) * MIB,
            )
        )
        return len(self.sites) - 1


def make_trace() -> StepTrace:
    """Block b saves tensors 2b (attn) and 2b+1 (mlp); backward needs them in reverse order."""
    sites = _Sites()
    saved: dict[int, int] = {}
    windows: dict[int, tuple[int, int]] = {}
    for block in range(NUM_BLOCKS):
        sites.touch(SiteKind.ENTER, block, False, None, 8.0)
        for part in range(2):
            tensor = 2 * block + part
            saved[tensor] = sites.touch(SiteKind.SAVE, block, False, tensor, 12.0)
    for block in reversed(range(NUM_BLOCKS)):
        sites.touch(SiteKind.ENTER, block, True, None, 2.0)
        for part in (1, 0):
            tensor = 2 * block + part
            need = sites.touch(SiteKind.NEED, block, True, tensor, 24.0)
            windows[tensor] = (need, sites.touch(SiteKind.DONE, block, True, tensor, 4.0))
    tensors = tuple(
        Tensor(
            name=f"g0.c{block}/{node}_{part}",
            kind=TensorKind.ACTIVATION,
            nbytes=nbytes,
            shape=(8, 2048, nbytes // (8 * 2048 * 2)),
            dtype="bfloat16",
            layer=f"blocks.{block}.{layer}",
            windows=((saved[2 * block + part], saved[2 * block + part]), windows[2 * block + part]),
        )
        for block in range(NUM_BLOCKS)
        for part, (layer, node, nbytes) in enumerate(PARTS)
    )
    embedding = Tensor(
        name="embed.weight",
        kind=TensorKind.PARAMETER,
        nbytes=250 * MIB,
        shape=(50_000, 2621),
        dtype="bfloat16",
        layer="embed",
        windows=((0, 2), (len(sites.sites) - 2, len(sites.sites))),
        persistent=True,
    )
    return StepTrace(
        fingerprint=Fingerprint(
            graphs=("g0",), shapes="s", torch_version="2.13.0", kernels="k", device="Test GPU"
        ),
        state_bytes=1 * GIB,
        sites=tuple(sites.sites),
        tensors=(*tensors, embedding),
    )


def make_migrations(trace: StepTrace, num_blocks: int = 9) -> tuple[Migration, ...]:
    """The mlp activations of the first blocks go to storage, attn of some of them to the host."""
    chosen: list[Migration] = []
    for tensor_id, tensor in enumerate(trace.tensors[: 2 * num_blocks]):
        mlp = tensor_id % 2 == 1
        if not mlp and tensor_id >= 8:
            continue
        leave, needed = tensor.windows[0][1], tensor.windows[1][0]
        idle_ms = sum(site.duration_ns for site in trace.sites[leave:needed]) / MS
        chosen.append(
            Migration(
                tensor_id=tensor_id,
                leave=leave,
                gone=leave + (9 if mlp else 2),
                back=needed - (3 if not mlp else 9 if tensor_id < 14 else 2),
                needed=needed,
                tier=Tier.STORAGE if mlp else Tier.HOST,
                reason=f"idle {idle_ms:.0f} ms over the peak",
            )
        )
    return tuple(chosen)


def make_plan(num_blocks: int = 9, budget: int = int(2.75 * GIB), policy: str = "repair") -> Plan:
    """A plan of a step with round numbers."""
    trace = make_trace()
    migrations = make_migrations(trace, num_blocks)
    hardware = Hardware(
        device="Test GPU",
        device_capacity_bytes=8 * GIB,
        host_capacity_bytes=32 * GIB,
        storage_capacity_bytes=500 * GIB,
        host_link=LINK,
        storage_link=DISK,
    )
    return Plan(
        policy=policy,
        budgets=Budgets(device_bytes=budget, host_bytes=2 * GIB, storage_bytes=64 * GIB),
        hardware=hardware,
        trace=trace,
        migrations=migrations,
        prediction=predict(trace, hardware, migrations),
    )


def make_run(plan: Plan) -> RunRecord:
    """The plan carried out, each transfer as slow as its link alone and 2 ms late."""
    starts, now = [], 0
    for index, site in enumerate(plan.trace.sites):
        starts.append(now)
        now += site.duration_ns + (4 * MS if index == 45 else 0)
    transfers: list[TransferRecord] = []
    for migration in plan.migrations:
        tensor = plan.trace.tensors[migration.tensor_id]
        link = LINK if migration.tier is Tier.HOST else DISK
        for direction, site_index, speed in (
            (Direction.OUT, migration.leave, link.out_bytes_per_s),
            (Direction.BACK, migration.back, link.back_bytes_per_s),
        ):
            start = starts[site_index] + 2 * MS
            transfers.append(
                TransferRecord(
                    tensor=tensor.name,
                    nbytes=tensor.nbytes,
                    direction=direction,
                    tier=migration.tier,
                    store="" if migration.tier is Tier.HOST else "/mnt/nvme0",
                    start_ns=start,
                    end_ns=start + tensor.nbytes * 1_000_000_000 // speed,
                )
            )
    return RunRecord(
        step=7,
        duration_ns=now,
        device_peak_bytes=plan.prediction.device_peak_bytes,
        managed_peak_bytes=plan.prediction.managed_peak_bytes,
        site_start_ns=tuple(starts),
        managed_bytes=tuple(managed_curve(plan.trace, plan.migrations).tolist()),
        transfers=tuple(transfers),
        stalls=(
            StallRecord(
                site=45, tensor="g0.c8/gelu_1", start_ns=starts[46] - 4 * MS, duration_ns=4 * MS
            ),
        ),
    )


def make_other_plan() -> Plan:
    """Fewer blocks move, with more memory."""
    return make_plan(num_blocks=7, budget=3 * GIB, policy="teraio")
