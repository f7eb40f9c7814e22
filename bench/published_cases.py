"""Steps and machines of published logs, as far as what is published says what they were.

Sources, as in the figures below: Deep Optimizer States (arXiv 2410.21316), logs at
github.com/mauryaavinash95/deep-optimizer-states-results; MLP-Offload (arXiv 2509.02480), logs at
github.com/DataStates/artifacts; LoHan (arXiv 2403.06504), github.com/RC4ML/LoHan.
"""

from dataclasses import dataclass
from itertools import accumulate

from teraplan.library.machines import GB
from teraplan.values.hardware import Budgets, Hardware, HostCores, Link, Tier
from teraplan.values.plan import HostUpdate, Migration
from teraplan.values.step_trace import (
    Fingerprint,
    Site,
    SiteKind,
    StepTrace,
    Tensor,
    TensorKind,
    Update,
)

SUBGROUP = 100_000_000
"""Parameters that Deep Optimizer States and MLP-Offload update together."""
OPEN = 1 << 60
_MS = 1_000_000
_PRINT = Fingerprint(graphs=("g",), shapes="", torch_version="none", kernels="none", device="")


def _site(graph: str, duration_ns: float, *, backward: bool = False) -> Site:
    return Site(
        kind=SiteKind.NEED,
        graph=graph,
        call=0,
        backward=backward,
        tensor_id=None,
        duration_ns=round(duration_ns),
        workspace_bytes=0,
    )


def _tensor(
    name: str,
    kind: TensorKind,
    nbytes: int,
    windows: tuple[tuple[int, int], ...],
    changed_in: tuple[int, ...],
) -> Tensor:
    return Tensor(
        name=name,
        kind=kind,
        nbytes=nbytes,
        shape=(nbytes,),
        dtype="uint8",
        layer="",
        windows=windows,
        persistent=kind in (TensorKind.PARAMETER, TensorKind.OPTIMIZER_STATE),
        changed_in=changed_in,
    )


def _hardware(host: Link | None, storage: Link | None, cores: HostCores | None) -> Hardware:
    return Hardware(
        device="rank",
        device_capacity_bytes=OPEN,
        host_capacity_bytes=OPEN if host is not None else 0,
        storage_capacity_bytes=OPEN,
        host_link=host,
        storage_link=storage,
        host_cores=cores,
    )


def even_link(alone_gb_per_s: float, both_gb_per_s: float | None = None) -> Link:
    """A link that is as fast out as back."""
    alone = int(alone_gb_per_s * GB)
    both = alone if both_gb_per_s is None else int(both_gb_per_s * GB)
    return Link(
        out_bytes_per_s=alone,
        back_bytes_per_s=alone,
        out_while_back_bytes_per_s=both,
        back_while_out_bytes_per_s=both,
        latency_ns=0,
    )


# MLP-Offload's baseline: ZeRO-3 with everything on NVMe.


def zero_3_step(parameters: float, ranks: int = 4) -> StepTrace:
    """One rank of ZeRO-3 with all state on NVMe: a backward that flushes gradients, an update.

    Per parameter 12 bytes of state and 4 of gradient; computation is negligible beside them.
    """
    count = round(parameters / ranks / SUBGROUP)
    sites = tuple(
        _site("backward" if k < count else "update", _MS, backward=k < count)
        for k in range(2 * count)
    )
    tensors: list[Tensor] = []
    for i in range(count):
        backward, update = (count - 1 - i, count - i), (count + i, count + i + 1)
        state, gradient = TensorKind.OPTIMIZER_STATE, TensorKind.GRADIENT
        tensors.append(_tensor(f"{state}.{i}", state, 12 * SUBGROUP, (update,), (0,)))
        tensors.append(
            _tensor(f"{gradient}.{i}", gradient, 4 * SUBGROUP, (backward, update), (0, 1))
        )
    return StepTrace(fingerprint=_PRINT, state_bytes=0, sites=sites, tensors=tuple(tensors))


def nvme_of_mlp_offload(ranks: int = 4) -> Hardware:
    """6.0 GB/s read and written mixed, shared by the ranks: what fits those logs."""
    return _hardware(None, even_link(6.0 / ranks, 3.0 / ranks), None)


# Deep Optimizer States: forward, backward, then the update of subgroups on host and device.


@dataclass(frozen=True, slots=True, kw_only=True)
class Offloaded:
    """One rank of ZeRO-3 with its optimizer in host memory."""

    parameters: float
    """Of the rank."""
    forward_ms: float
    backward_ms: float
    """Computation alone."""
    micro_batches: int = 1
    device_ns: float = SUBGROUP * 32 / 2.0e12 * 1e9
    """Update of one subgroup on the device: 32 bytes per parameter at 2 TB/s."""

    @property
    def count(self) -> int:
        """Subgroups."""
        return round(self.parameters / SUBGROUP)

    def step(self) -> StepTrace:
        """Forwards and backwards of micro-batches, then one update per subgroup.

        Parameters have 2 bytes, gradients 4 as they go to the host, states 12. All gradients have
        to be there before the first update begins.
        """
        count, last = self.count, self.micro_batches - 1
        sites: list[Site] = []
        for _ in range(self.micro_batches):
            sites.append(_site("forward", self.forward_ms * _MS))
            sites += [
                _site("backward", self.backward_ms * _MS / count, backward=True)
                for _ in range(count)
            ]
        first, each = len(sites), count + 1
        sites += [_site("update", self.device_ns) for _ in range(count)]
        tensors: list[Tensor] = []
        updates: list[Update] = []
        for i in range(count):
            # the last subgroup is that of the last layers, whose gradients come first
            uses = [(b * each, b * each + 1) for b in range(self.micro_batches)]
            made = last * each + 1 + (count - 1 - i)
            touched = (first + i, first + i + 1)
            gradient: tuple[tuple[int, int], ...] = ((made, made + 1), touched)
            if gradient[0][1] == gradient[1][0]:
                gradient = ((made, touched[1]),)
            ids = (3 * i, 3 * i + 1, 3 * i + 2)
            tensors += [
                _tensor(
                    f"weight.{i}",
                    TensorKind.PARAMETER,
                    2 * SUBGROUP,
                    (*uses, touched),
                    (len(uses),),
                ),
                _tensor(f"gradient.{i}", TensorKind.GRADIENT, 4 * SUBGROUP, gradient, (0,)),
                _tensor(f"state.{i}", TensorKind.OPTIMIZER_STATE, 12 * SUBGROUP, (touched,), (0,)),
            ]
            updates.append(
                Update(
                    start=touched[0],
                    end=touched[1],
                    ready=first,
                    parameters=ids[:1],
                    gradients=ids[1:2],
                    states=ids[2:],
                )
            )
        return StepTrace(
            fingerprint=_PRINT,
            state_bytes=0,
            sites=tuple(sites),
            tensors=tuple(tensors),
            updates=tuple(updates),
        )

    def by_stride(
        self, stride: int, *, waiting: bool = False
    ) -> tuple[tuple[Migration, ...], tuple[HostUpdate, ...]]:
        """Every `stride`-th subgroup on the device, its state there and back; 0: none.

        The state of one comes in while that before it is worked on, and all is away again when the
        step ends, as it is there. With `waiting`, the backward waits for each gradient to be out.
        """
        trace = self.step()
        num_sites, first = len(trace.sites), len(trace.sites) - self.count
        on_device = [i for i in range(self.count) if stride and (i + 1) % stride == 0]
        migrations: list[Migration] = []
        for before, i in zip([-1, *on_device], on_device, strict=False):
            window = (first + i, first + i + 1)
            migrations.append(
                Migration(
                    tensor_id=3 * i + 2,
                    leave=window[1],
                    gone=num_sites,
                    back=num_sites + max(first + before, first),
                    needed=num_sites + window[0],
                    tier=Tier.HOST,
                )
            )
        hosted: list[HostUpdate] = []
        for i in range(self.count):
            flush = trace.tensors[3 * i + 1].windows[0][0] + 1
            gone = flush if waiting else first
            placed = HostUpdate(update=i, flush=flush, gone=gone, back=num_sites, needed=num_sites)
            if i not in on_device:
                hosted.append(placed)
        return tuple(migrations), tuple(hosted)


def node_of_dos(link_gb_per_s: float, rate: float) -> Hardware:
    """One GPU's part: its link to the host, and parameters per second that its cores update."""
    cores = HostCores(update_bytes_per_s=round(rate * 32), memory_bytes_per_s=1 << 50)
    return _hardware(even_link(link_gb_per_s), None, cores)


# LoHan: all model state on SSDs, updated while the backward runs.

LOHAN_PARAMETERS = 13e9
_LAYERS = 40
LOHAN_LENGTH = 1024
"""Tokens of a sequence: assumed, since the logs have TFLOPS without it."""
LOHAN_PEAK = 155.8
"""TFLOPS that it reaches where storage is not the limit."""
LOHAN_BUDGETS = Budgets(device_bytes=32 * GB, host_bytes=0, storage_bytes=OPEN)


def seconds_of(batch: int, tflops: float) -> float:
    """Time of a step at so many TFLOPS with recomputation: 8 flops per parameter and token."""
    return batch * LOHAN_LENGTH * 8 * LOHAN_PARAMETERS / (tflops * 1e12)


def lohan_step(batch: int) -> StepTrace:
    """40 layers; a backward is three forwards long, with the recomputation; updates follow at once.

    The weights of a layer are read for its forward and again for its backward; in its update all
    state is read and written, and the weights are written.
    """
    compute_ns = seconds_of(batch, LOHAN_PEAK) * 1e9
    size = round(LOHAN_PARAMETERS / _LAYERS)
    sites = [_site("forward", compute_ns / 4 / _LAYERS) for _ in range(_LAYERS)]
    tensors: list[Tensor] = []
    for i in range(_LAYERS):
        backward = _LAYERS + 2 * (_LAYERS - 1 - i)
        weight: tuple[tuple[int, int], ...] = ((i, i + 1), (backward, backward + 2))
        if i == _LAYERS - 1:
            weight = ((i, backward + 2),)
        tensors += [
            _tensor(f"weight.{i}", TensorKind.PARAMETER, 2 * size, weight, (len(weight) - 1,)),
            _tensor(
                f"state.{i}",
                TensorKind.OPTIMIZER_STATE,
                12 * size,
                ((backward + 1, backward + 2),),
                (0,),
            ),
        ]
    for _ in range(_LAYERS):
        sites.append(_site("backward", compute_ns * 3 / 4 / _LAYERS, backward=True))
        sites.append(_site("update", _MS, backward=True))
    assert [*accumulate(site.duration_ns for site in sites)][-1] > compute_ns, "all of it"
    return StepTrace(fingerprint=_PRINT, state_bytes=0, sites=tuple(sites), tensors=tuple(tensors))


def ssds_of_lohan(count: int) -> Hardware:
    """So many Intel D7-P5510 of 3.84 TB: 6.5 GB/s read, 3.4 written by the data sheet.

    Both at once have half of each, assumed. What they move goes to the host's memory, where state
    is updated, so that the device's port limits nothing.
    """
    disks = Link(
        out_bytes_per_s=int(3.4 * GB) * count,
        back_bytes_per_s=int(6.5 * GB) * count,
        out_while_back_bytes_per_s=int(1.7 * GB) * count,
        back_while_out_bytes_per_s=int(3.25 * GB) * count,
        latency_ns=0,
    )
    return _hardware(None, disks, None)
