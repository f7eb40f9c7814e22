"""`teraplan trace`: the trace of a step that does not run here."""

import argparse
from pathlib import Path

from teraplan.cli.command import DONE, Command, emit, emit_json, require_torch
from teraplan.cli.output_file import writing
from teraplan.cli.planning import (
    add_machine_argument,
    add_workload_arguments,
    library_trace,
    require_no_workload,
    workload_of,
)
from teraplan.errors import ConfigError
from teraplan.files.trace_file import write_trace
from teraplan.library.machine_file import find_machine
from teraplan.library.machines import Machine
from teraplan.simulation.memory_curve import device_curve, least_budget, peak
from teraplan.units import format_nbytes, format_ns
from teraplan.values.step_trace import StepTrace


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model",
        metavar="MODULE:FACTORY",
        help="a function that returns a module and a tuple of its inputs; needs torch, and runs "
        "on fake tensors",
    )
    add_workload_arguments(parser)
    add_machine_argument(parser)
    parser.add_argument(
        "-o",
        "--output",
        type=Path,
        required=True,
        metavar="FILE",
        help="the trace file to be written",
    )


def _run(options: argparse.Namespace) -> int:
    trace = _trace(options, find_machine(options.hardware))
    with writing(options.output):
        write_trace(trace, options.output)
    most, least = peak(device_curve(trace)), least_budget(trace).nbytes
    if options.json:
        emit_json(
            {
                "path": str(options.output),
                "sites": len(trace.sites),
                "tensors": len(trace.tensors),
                "duration_ns": trace.duration_ns,
                "unlimited_peak_bytes": most,
                "least_device_bytes": least,
            }
        )
    else:
        emit(
            f"{options.output}: {len(trace.sites)} sites, {len(trace.tensors)} tensors, "
            f"{format_ns(trace.duration_ns)}, peak {format_nbytes(most)}, "
            f"least device budget {format_nbytes(least)}"
        )
    return DONE


def _trace(options: argparse.Namespace, machine: Machine) -> StepTrace:
    if (options.model is None) == (options.library is None):
        raise ConfigError("give either --model MODULE:FACTORY or --library with a model's name")
    if options.library is not None:
        return library_trace(workload_of(options), machine)
    require_no_workload(options)
    require_torch()
    from teraplan.fake_trace import (
        load_factory,
        modules_of_working_directory,
        trace_of_module,
    )

    with modules_of_working_directory():
        return trace_of_module(load_factory(options.model), machine)


COMMAND = Command(
    name="trace",
    summary="the trace of a step that does not run here, from a cost model",
    description=(
        "Writes the trace of a training step, with times from a roofline model of the device: of\n"
        "a model of the library, or of your own, which is run once on fake tensors that have no\n"
        "memory (this needs torch). Parameters, gradients, optimizer state and activations are\n"
        "tensors of the trace."
    ),
    example="teraplan trace --model my_models:build --hardware h200:ssd=4 -o trace.json",
    add_arguments=_add_arguments,
    run=_run,
)
