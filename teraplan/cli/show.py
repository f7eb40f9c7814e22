"""`teraplan show`: a plan on one screen."""

import argparse
from pathlib import Path

from teraplan.cli.command import DONE, Command, emit, emit_json, read_as_it_is
from teraplan.report.plan_text import plan_details, plan_json, plan_screen


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("plan", type=Path, metavar="PLAN", help="a plan or run file")
    parser.add_argument(
        "--all", action="store_true", help="every tensor on a line of its own, nothing folded"
    )


def _run(options: argparse.Namespace) -> int:
    plan, notes = read_as_it_is(options.plan)
    if options.json:
        emit_json(plan_json(plan, everything=options.all) | {"notes": notes})
    else:
        text = plan_details(plan) if options.all else plan_screen(plan)
        emit("\n".join([*notes, text]))
    return DONE


COMMAND = Command(
    name="show",
    summary="a plan on one screen: budgets, peaks, times, decisions",
    description=(
        "Prints what a plan does: budgets and peaks of each tier, the predicted step beside\n"
        "the ideal one, device memory over the step, and each decision with its reason.\n"
        "Identical layers are folded: blocks.*.mlp x12 are twelve, blocks.{0-5}.mlp only some."
    ),
    example="teraplan show plan.json",
    add_arguments=_add_arguments,
    run=_run,
)
