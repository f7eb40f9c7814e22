"""Steps and machines on which planners are compared; all from the library, no hardware needed."""

from collections.abc import Iterable
from dataclasses import dataclass

from teraplan.library.machines import GB, Machine, machine_named, machine_of_teraio
from teraplan.library.models import Workload, trace_of
from teraplan.simulation.memory_curve import device_curve, least_budget, peak
from teraplan.values.hardware import Budgets
from teraplan.values.step_trace import StepTrace

AMPLE = 1 << 50


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A step, a machine and budgets."""

    name: str
    trace: StepTrace
    machine: Machine
    budgets: Budgets


def paper_cases(dtype: str) -> list[Case]:
    """TERAIO's three models on one of its GPUs, which is the first of two pipeline stages.

    Host memory is half of what ZeRO-Infinity used on that machine, 170 and 770 GB: TERAIO-Mixed may
    use as much. Micro-batches are of such a size that the peak is about that of figure 7.
    """
    sizes = (("llama3-8b", 4, 2048, 85), ("granite-8b", 4, 4096, 85), ("llama3-70b", 2, 2048, 385))
    cases: list[Case] = []
    for model, batch, length, host in sizes:
        machine = machine_of_teraio(host * GB)
        workload = Workload(
            model=model, dtype=dtype, batch=batch, length=length, micro_batches=8, stages=2
        )
        trace = trace_of(workload, machine)
        budgets = Budgets(device_bytes=94 * GB, host_bytes=host * GB, storage_bytes=AMPLE)
        cases.append(Case(name=f"{model} {dtype}", trace=trace, machine=machine, budgets=budgets))
    return cases


_GRID = (
    Workload(model="llama3-8b", batch=2, length=2048, micro_batches=2),
    Workload(model="granite-8b", dtype="float32", batch=1, length=4096),
    Workload(model="llama3-70b", batch=1, length=2048, micro_batches=4, stages=10),
    Workload(model="mixtral-8x7b", batch=4, length=2048, micro_batches=2, stages=8),
    Workload(model="vit-g", batch=256, length=256),
    Workload(model="unet", batch=32, length=512),
    Workload(model="t5-11b", batch=16, length=512),
)
_SMALL_GRID = (
    Workload(model="llama3-8b", batch=2, length=2048, micro_batches=2, stages=16),
    Workload(model="granite-8b", dtype="float32", batch=1, length=4096, stages=18),
    Workload(model="mixtral-8x7b", batch=4, length=2048, stages=32),
    Workload(model="vit-g", batch=256, length=256, stages=20),
    Workload(model="unet", batch=16, length=256),
)
"""Two layers, or one, for every policy."""
MACHINES = ("h100-nvl:ssd=4:host=128GiB", "rtx-4090:ssd=2:host=64GiB", "gh200:ssd=1")
PARTS = (80, 60, 40, 25, 15)
"""Device budgets in per cent of the peak with nothing moved."""


def grid_cases(machines: Iterable[str] = MACHINES, *, small: bool = False) -> list[Case]:
    """Models by machines by budgets, without those that no plan can keep.

    Args:
        machines: names of machines, with options.
        small: the first layers of models alone.
    """
    cases: list[Case] = []
    for name in machines:
        machine = machine_named(name)
        for workload in _SMALL_GRID if small else _GRID:
            trace = trace_of(workload, machine)
            most, least = peak(device_curve(trace)), least_budget(trace).nbytes
            cases += [
                Case(
                    name=f"{workload.model} on {name.partition(':')[0]} at {part} %",
                    trace=trace,
                    machine=machine,
                    budgets=Budgets(
                        device_bytes=most * part // 100,
                        host_bytes=machine.hardware.host_capacity_bytes,
                        storage_bytes=machine.hardware.storage_capacity_bytes,
                    ),
                )
                for part in PARTS
                if least <= most * part // 100 <= machine.hardware.device_capacity_bytes
            ]
    return cases
