"""`teraplan show`: a plan on one screen."""

import argparse
from pathlib import Path

from teraplan.cli.command import (
    DONE,
    Command,
    emit,
    emit_json,
    on_screen,
    predicted_as_it_is,
)
from teraplan.files.run_file import read_plan_or_runs
from teraplan.report.plan_text import plan_details, plan_json, plan_screen
from teraplan.report.run_text import runs_json, runs_text


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("plan", type=Path, metavar="PLAN", help="a plan or run file")
    parser.add_argument(
        "--all", action="store_true", help="every tensor on a line of its own, nothing folded"
    )


def _run(options: argparse.Namespace) -> int:
    plan, runs = read_plan_or_runs(options.plan)
    plan, notes = predicted_as_it_is(plan, options.plan)
    if options.json:
        facts = plan_json(plan, everything=options.all) | {"notes": notes}
        emit_json(facts | {"runs": runs_json(plan, runs) if runs else None})
    else:
        text = plan_details(plan) if options.all else on_screen(plan_screen(plan))
        emit("\n".join([*notes, text, *(["", runs_text(plan, runs)] if runs else [])]))
    return DONE


COMMAND = Command(
    name="show",
    summary="a plan on one screen: budgets, peaks, times, decisions",
    description=(
        "Prints what a plan does: budgets and peaks of each tier, the predicted step beside\n"
        "the ideal one, device memory over the step, and each decision with its reason.\n"
        "Identical layers are folded: blocks.*.mlp x12 are twelve, blocks.{0-5}.mlp only some.\n"
        "Given a run file, the steps as they ran are set beside the prediction."
    ),
    example="teraplan show plan.json",
    add_arguments=_add_arguments,
    run=_run,
)
