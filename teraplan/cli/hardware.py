"""`teraplan hardware`: a machine of the library as a file to edit."""

import argparse
from pathlib import Path

from teraplan.cli.command import DONE, Command, emit, emit_json
from teraplan.cli.output_file import writing
from teraplan.library.machine_file import write_machine
from teraplan.library.machines import DEVICES, machine_named


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "machine",
        metavar="MACHINE",
        help=f"one of {', '.join(DEVICES)}; with options if need be, such as "
        "h200:ssd=4:host=1TiB:cores=40GB:staging=1GiB",
    )
    parser.add_argument(
        "-o", "--output", type=Path, required=True, metavar="FILE", help="the file to be written"
    )


def _run(options: argparse.Namespace) -> int:
    machine = machine_named(options.machine)
    with writing(options.output):
        write_machine(machine, options.output)
    if options.json:
        emit_json({"path": str(options.output), "sources": dict(machine.sources)})
    else:
        lines = [f"{name}: {source}" for name, source in sorted(machine.sources.items())]
        emit("\n".join([str(options.output), *lines]))
    return DONE


COMMAND = Command(
    name="hardware",
    summary="a machine of the library as a hardware file",
    description=(
        "Writes a hardware file that plan, simulate, estimate and trace read, with the source of\n"
        "each figure. Edit it where you know better; `teraplan probe` measures a machine's links."
    ),
    example="teraplan hardware h100-sxm:ssd=8:host=1TiB -o machine.json",
    add_arguments=_add_arguments,
    run=_run,
)
