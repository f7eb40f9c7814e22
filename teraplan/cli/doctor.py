"""`teraplan doctor`: what this machine has, and which paths will be used."""

import argparse
from pathlib import Path

from teraplan.cli.command import DONE, NO, Command, emit, emit_json, require_torch
from teraplan.report.machine_text import facts_json, facts_text, num_warnings


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--storage",
        type=Path,
        nargs="+",
        action="extend",
        default=[],
        metavar="DIR",
        help="storage directories to be looked at",
    )
    parser.add_argument("--strict", action="store_true", help="exit code 1 if there is any warning")


def _run(options: argparse.Namespace) -> int:
    require_torch()
    from teraplan.runtime.machine_facts import collect

    facts = collect(tuple(options.storage))
    if options.json:
        emit_json(facts_json(facts))
    else:
        emit(facts_text(facts))
    return NO if options.strict and num_warnings(facts) else DONE


COMMAND = Command(
    name="doctor",
    summary="what this machine has, which path is used, and what to improve",
    description=(
        "Lists what matters for moving tensors: devices, memory and its limits, storage\n"
        "directories and how they are reached, versions. Each line has a mark (good, worth\n"
        "knowing, ! warning) and advice where there is something to do."
    ),
    example="teraplan doctor --storage /mnt/nvme0 /mnt/nvme1",
    add_arguments=_add_arguments,
    run=_run,
)
