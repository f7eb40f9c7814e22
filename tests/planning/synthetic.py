"""Synthetic steps: what a trace of a GPT-like model looks like, at any number of sites."""

from teraplan.simulation.simulate import predict
from teraplan.units import GIB, MIB
from teraplan.values.hardware import Budgets, Hardware, Link
from teraplan.values.plan import HostUpdate, Migration, Plan
from teraplan.values.step_trace import Fingerprint, Site, SiteKind, StepTrace, Tensor, TensorKind

FINGERPRINT = Fingerprint(
    graphs=("g",), shapes="s", torch_version="2.13", kernels="inductor", device="cpu"
)

# of one layer: name, MiB, part of the layer's forward time
_LAYER = (
    ("norm", 32, 0.02),
    ("q", 32, 0.08),
    ("k", 32, 0.08),
    ("v", 32, 0.08),
    ("attention", 33, 0.2),
    ("residual", 32, 0.1),
    ("norm2", 32, 0.02),
    ("up", 128, 0.2),
    ("gelu", 128, 0.02),
    ("stats", 1, 0.2),
)


def gpt_trace(
    layers: int = 12,
    micro_batches: int = 1,
    layer_ns: int = 20_000_000,
    mib: int = MIB,
    state_bytes: int = GIB,
) -> StepTrace:
    """Activations saved in order and needed in reverse, backward twice as long as forward."""
    sites: list[Site] = []
    born: list[int] = []
    spans: list[tuple[int, int]] = []
    tensors: list[Tensor] = []

    def add(kind: SiteKind, call: int, back: bool, tensor: int | None, ns: float) -> int:
        sites.append(
            Site(
                kind=kind,
                graph="g0",
                call=call,
                backward=back,
                tensor_id=tensor,
                duration_ns=int(ns),
                workspace_bytes=64 * mib,
            )
        )
        return len(sites) - 1

    for call in range(micro_batches):
        base = len(born)
        add(SiteKind.ENTER, call, False, None, 1000)
        for _ in range(layers):
            for _, _, part in _LAYER:
                born.append(add(SiteKind.SAVE, call, False, len(born), part * layer_ns))
        spans += [(0, 0)] * (len(born) - base)
        add(SiteKind.ENTER, call, True, None, 1000)
        for tensor in reversed(range(base, len(born))):
            part = _LAYER[(tensor - base) % len(_LAYER)][2]
            need = add(SiteKind.NEED, call, True, tensor, 2 * part * layer_ns)
            spans[tensor] = (need, add(SiteKind.DONE, call, True, tensor, 0))
    for tensor, (start, span) in enumerate(zip(born, spans, strict=True)):
        call, rest = divmod(tensor, layers * len(_LAYER))
        name, size, _ = _LAYER[rest % len(_LAYER)]
        layer = rest // len(_LAYER)
        tensors.append(
            Tensor(
                name=f"g0.c{call}/{name}_{layer}",
                kind=TensorKind.ACTIVATION,
                nbytes=size * mib,
                shape=(size * mib,),
                dtype="uint8",
                layer=f"blocks.{layer}",
                windows=((start, start), span),
            )
        )
    return StepTrace(
        fingerprint=FINGERPRINT, state_bytes=state_bytes, sites=tuple(sites), tensors=tuple(tensors)
    )


def machine(
    storage: float = 6.0, host: float | None = None, device_bytes: int = 1 << 50
) -> Hardware:
    """Links of so many GB/s each way, somewhat slower both ways at once."""

    def link(speed: float) -> Link:
        return Link(
            out_bytes_per_s=int(speed * 0.9e9),
            back_bytes_per_s=int(speed * 1e9),
            out_while_back_bytes_per_s=int(speed * 0.7e9),
            back_while_out_bytes_per_s=int(speed * 0.8e9),
            latency_ns=20_000,
        )

    return Hardware(
        device="cpu",
        device_capacity_bytes=device_bytes,
        host_capacity_bytes=1 << 50,
        storage_capacity_bytes=1 << 50,
        host_link=None if host is None else link(host),
        storage_link=link(storage),
    )


def budgets(device_bytes: int, host_bytes: int = 1 << 50, storage_bytes: int = 1 << 50) -> Budgets:
    """Budgets that leave the other tiers open unless said."""
    return Budgets(device_bytes=device_bytes, host_bytes=host_bytes, storage_bytes=storage_bytes)


def plan_of(
    trace: StepTrace,
    hardware: Hardware,
    limits: Budgets,
    migrations: tuple[Migration, ...],
    host_updates: tuple[HostUpdate, ...] = (),
) -> Plan:
    """A plan with these moves and what the simulator says of them."""
    return Plan(
        policy="test",
        budgets=limits,
        hardware=hardware,
        trace=trace,
        migrations=migrations,
        prediction=predict(trace, hardware, migrations, host_updates),
        host_updates=host_updates,
    )
