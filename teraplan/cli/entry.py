"""From command line arguments to an exit code."""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import teraplan
from teraplan.cli import (
    check,
    diff,
    doctor,
    estimate,
    hardware,
    plan,
    plot,
    probe,
    show,
    simulate,
    sweep,
    timeline,
    trace,
)
from teraplan.cli.command import BAD_INPUT, Command, say
from teraplan.cli.output_file import require_outputs
from teraplan.errors import TeraplanError

COMMANDS: tuple[Command, ...] = (
    doctor.COMMAND,
    probe.COMMAND,
    hardware.COMMAND,
    trace.COMMAND,
    plan.COMMAND,
    simulate.COMMAND,
    estimate.COMMAND,
    sweep.COMMAND,
    show.COMMAND,
    diff.COMMAND,
    check.COMMAND,
    timeline.COMMAND,
    plot.COMMAND,
)
_INTERRUPTED = 130
_DESCRIPTION = """\
Plans memory of training steps, and looks at this machine and at plans and runs.

exit codes:
  0  done; the answer is yes
  1  done; the answer is no (does not fit, invalid plan, plans differ, warnings with --strict)
  2  bad input or usage; one message on stderr says what to do
  130  interrupted
"""


def make_parser() -> argparse.ArgumentParser:
    """The parser of `teraplan` with one subparser for each command."""
    parser = argparse.ArgumentParser(
        prog="teraplan",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"teraplan {teraplan.__version__}")
    subparsers = parser.add_subparsers(metavar="COMMAND", required=True)
    for command in COMMANDS:
        subparser = subparsers.add_parser(
            command.name,
            help=command.summary,
            description=f"{command.description}\n\nexample:\n  {command.example}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        command.add_arguments(subparser)
        subparser.add_argument(
            "--json", action="store_true", help="print the same facts as one JSON object"
        )
        subparser.set_defaults(command=command)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command that `arguments` (`sys.argv` without them) name; returns its exit code."""
    if sys.stdout is None:  # closed by who started this
        sys.stdout = Path(os.devnull).open("w")  # noqa: SIM115  for the rest of the process
    name = "teraplan"
    try:
        options = _parsed(arguments)
        command: Command = options.command
        name = f"teraplan {command.name}"
        require_outputs(options)
        return command.run(options)
    except TeraplanError as error:
        print(f"{name}: {error}", file=sys.stderr)
        return BAD_INPUT
    except KeyboardInterrupt:
        return _INTERRUPTED


def _parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    try:
        return make_parser().parse_args(arguments)
    finally:
        say("", end="")  # the rest of a help text, which ends the process
