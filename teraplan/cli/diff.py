"""`teraplan diff`: what changed between two plans."""

import argparse
from pathlib import Path

from teraplan.cli.command import DONE, NO, Command, emit, emit_json, read_as_it_is
from teraplan.report.plan_changes import all_layers, changes_json, changes_text, plan_changes


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("before", type=Path, metavar="A", help="a plan or run file")
    parser.add_argument("after", type=Path, metavar="B", help="another one")


def _run(options: argparse.Namespace) -> int:
    before, notes = read_as_it_is(options.before)
    after, more = read_as_it_is(options.after)
    notes = tuple(dict.fromkeys(notes + more))
    changes = plan_changes(before, after)
    if options.json:
        emit_json(changes_json(changes) | {"notes": notes})
    else:
        emit("\n".join([*notes, changes_text(changes, all_layers(before, after))]))
    return NO if changes.any else DONE


COMMAND = Command(
    name="diff",
    summary="what changed between two plans",
    description=(
        "Prints budgets, predictions and decisions that differ between two plans; tensors are\n"
        "matched by name. Exit code 0 if the plans are equal, 1 if they differ."
    ),
    example="teraplan diff before.json after.json",
    add_arguments=_add_arguments,
    run=_run,
)
