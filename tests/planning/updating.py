"""Steps with updates that could run on the host, and machines with cores that do them."""

from dataclasses import replace
from types import MappingProxyType

from hypothesis import strategies as st

from teraplan.library.builder import Tape
from teraplan.library.costs import Roofline
from teraplan.library.machines import Processor
from teraplan.library.training import Parameters, Schedule, training_step
from teraplan.values.hardware import Hardware, HostCores
from teraplan.values.step_trace import StepTrace
from tests.planning.traces import machines

_COSTS = Roofline(
    processor=Processor(
        flops_per_s=MappingProxyType({"float32": 10**12}), memory_bytes_per_s=2 * 10**10
    ),
    least_ns=100,
)


def layers_step(
    sizes: tuple[int, ...], *, micro_batches: int = 1, clipped: bool = False, wide: int = 2000
) -> StepTrace:
    """Layers with one parameter of so many elements each, then AdamW."""

    def forward(tape: Tape, parameters: Parameters) -> None:
        value = tape.op("input", (), (wide,), graph="input", backward=False)
        for number, size in enumerate(sizes):
            graph = f"layers.{number}"
            weight = parameters.get(f"{graph}.weight", (size,), graph)
            value = tape.op(
                "mm",
                (value,),
                (wide,),
                graph=graph,
                parameters=(weight,),
                saves=(value,),
                flops=400.0 * wide,
            )

    schedule = Schedule(micro_batches=micro_batches, clipped=clipped)
    return training_step(forward, _COSTS, "float32", schedule, "test")


@st.composite
def updating_steps(draw: st.DrawFn) -> StepTrace:
    """Few layers of random sizes, one or two micro-batches, some with clipping."""
    sizes = draw(st.lists(st.integers(1, 40), min_size=1, max_size=5))
    return layers_step(
        tuple(500 * size for size in sizes),
        micro_batches=draw(st.integers(1, 2)),
        clipped=draw(st.booleans()),
        wide=draw(st.sampled_from([100, 2000, 20_000])),
    )


@st.composite
def updating_machines(draw: st.DrawFn) -> Hardware:
    """Machines with cores from slower than the links to faster."""
    speed = draw(st.integers(1, 40)) * 10**8
    cores = HostCores(update_bytes_per_s=speed, memory_bytes_per_s=speed * draw(st.integers(1, 4)))
    return replace(draw(machines()), host_cores=cores)
