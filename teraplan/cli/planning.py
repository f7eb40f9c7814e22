"""What the commands that plan have in common: their arguments, and what they make of them."""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, replace

from teraplan.config import Budget
from teraplan.errors import ConfigError
from teraplan.files.json_files import MAX_INT
from teraplan.files.trace_file import excess, read_trace
from teraplan.library.machine_file import find_machine
from teraplan.library.machines import DEVICES, Machine
from teraplan.library.models import MODELS, Workload, trace_of
from teraplan.simulation.memory_curve import device_curve, peak
from teraplan.values.hardware import Budgets
from teraplan.values.step_trace import StepTrace, TensorKind

_MAX_SITES = 1 << 22
"""Of a step that is written down: minutes, and 750 MB in a file."""

_NUMBERS = (
    ("batch", 1, "sequences of a micro-batch"),
    ("length", 2048, "tokens of a sequence; of a U-Net's images, pixels of a side"),
    ("micro-batches", 1, "micro-batches of a step"),
    ("stages", 1, "pipeline stages; the first is built, of layers / stages, rounded down"),
)
"""Numbers of a workload: name, default, meaning."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A step and what there is to plan it with."""

    trace: StepTrace
    machine: Machine
    budgets: Budgets
    workload: Workload | None
    """What the trace was made of, None if it was read."""


def add_machine_argument(parser: argparse.ArgumentParser) -> None:
    """`--hardware`."""
    parser.add_argument(
        "--hardware",
        required=True,
        metavar="H",
        help=f"a hardware file (.json), or a machine such as h100-nvl:ssd=4:host=512GiB; "
        f"devices are {', '.join(DEVICES)}; with :cores=published updates may run on the host, "
        "too; with :staging=512MiB so much host memory is what bytes for storage pass through",
    )


def add_budget_arguments(parser: argparse.ArgumentParser) -> None:
    """The budgets of one plan."""
    for tier in ("device", "host", "storage"):
        parser.add_argument(
            f"--{tier}-budget",
            default=None,
            metavar="SIZE",
            help=f'most {tier} memory to use: "40GiB", or "50%%" of the peak with nothing moved; '
            "all that the machine has if not given",
        )


def add_workload_arguments(parser: argparse.ArgumentParser) -> None:
    """A model of the library, in the place of a trace."""
    parser.add_argument(
        "--library",
        choices=sorted(MODELS),
        default=None,
        help="a model whose step is written down in the library",
    )
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), help="default: bfloat16")
    for name, default, what in _NUMBERS:
        parser.add_argument(f"--{name}", type=int, help=f"{what} (default: {default})")


def workload_of(options: argparse.Namespace) -> Workload:
    """The workload that the arguments name."""
    numbers: dict[str, int] = {}
    for name, default, _ in _NUMBERS:
        field = name.replace("-", "_")
        given = getattr(options, field)
        numbers[field] = default if given is None else given
        if numbers[field] < 1:
            raise ConfigError(f"--{name}: expected 1 or more")
    return Workload(
        model=options.library,
        dtype=options.dtype or "bfloat16",
        batch=numbers["batch"],
        length=numbers["length"],
        micro_batches=numbers["micro_batches"],
        stages=numbers["stages"],
    )


def require_no_workload(options: argparse.Namespace) -> None:
    """Refuse arguments of models of the library, where the step is another one."""
    for name in ("dtype", *(name for name, _, _ in _NUMBERS)):
        if getattr(options, name.replace("-", "_"), None) is not None:
            raise ConfigError(
                f"--{name} is for models of the library: leave it out, or give --library"
            )


def library_trace(workload: Workload, machine: Machine) -> StepTrace:
    """The step of a workload, if it is none of centuries, zettabytes or billions of operations.

    Raises:
        ConfigError: it is, or there is no such model.
    """
    one = trace_of(replace(workload, micro_batches=1), machine)
    why = _excess(one, workload.micro_batches)
    if why:
        raise ConfigError(f"the step is too large to be counted with: {why}; ask for a smaller one")
    return one if workload.micro_batches == 1 else trace_of(workload, machine)


def _excess(one: StepTrace, micro_batches: int) -> str:
    """What is too much of a step with so many micro-batches, of which one is given; or "".

    Each of the others adds what is before the updates, and activations of its own.
    """
    others, repeated = micro_batches - 1, one.sites[: one.updates[0].start]
    num_sites = len(one.sites) + others * len(repeated)
    if num_sites > _MAX_SITES:
        return f"it has {num_sites} operations, at most {_MAX_SITES}"
    rest_ns = others * sum(site.duration_ns for site in repeated)
    saved = sum(t.nbytes for t in one.tensors if t.kind is TensorKind.ACTIVATION)
    rest = replace(one.sites[0], duration_ns=rest_ns)
    as_large = replace(one, sites=(*one.sites, rest), state_bytes=one.state_bytes + others * saved)
    return " ".join(excess(as_large)).strip()


def asked(options: argparse.Namespace) -> Asked:
    """The step, the machine and the budgets that the arguments name."""
    machine = find_machine(options.hardware)
    workload = None
    if getattr(options, "library", None) is not None:
        if options.trace is not None:
            raise ConfigError("give a trace file or --library, not both")
        workload = workload_of(options)
        trace = library_trace(workload, machine)
    elif options.trace is not None:
        require_no_workload(options)
        trace = read_trace(options.trace)
    else:
        raise ConfigError("give a trace file, or --library with the name of a model")
    return Asked(
        trace=trace,
        machine=machine,
        budgets=budgets_of(
            trace, machine, options.device_budget, options.host_budget, options.storage_budget
        ),
        workload=workload,
    )


def budgets_of(
    trace: StepTrace, machine: Machine, device: str | None, host: str | None, storage: str | None
) -> Budgets:
    """Budgets as written: sizes, or percentages of the peak with nothing moved."""
    most, hardware = peak(device_curve(trace)), machine.hardware

    def size(text: str | None, capacity: int) -> int:
        if text is None:
            return capacity
        try:
            return min(Budget.parse(text).resolve(most), MAX_INT)
        except ValueError as error:
            raise ConfigError(f"budget {text!r}: {error}") from error

    return Budgets(
        device_bytes=size(device, hardware.device_capacity_bytes),
        host_bytes=size(host, hardware.host_capacity_bytes),
        storage_bytes=size(storage, hardware.storage_capacity_bytes),
    )


def with_more_storage(machine: Machine, factor: int) -> Machine:
    """The machine with so many times the SSDs; the device's port is as it was."""
    hardware = machine.hardware
    link = hardware.storage_link
    assert link is not None, "there are SSDs"
    faster = replace(
        link,
        out_bytes_per_s=link.out_bytes_per_s * factor,
        back_bytes_per_s=link.back_bytes_per_s * factor,
        out_while_back_bytes_per_s=link.out_while_back_bytes_per_s * factor,
        back_while_out_bytes_per_s=link.back_while_out_bytes_per_s * factor,
    )
    nbytes = hardware.storage_capacity_bytes * factor
    changed = replace(hardware, storage_link=faster, storage_capacity_bytes=nbytes)
    return replace(machine, hardware=changed)


def listed(text: str) -> Sequence[str]:
    """The parts of a list with commas."""
    return [part.strip() for part in text.split(",") if part.strip()]
