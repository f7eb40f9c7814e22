"""`teraplan plan`: a plan for a trace."""

import argparse
import math
from pathlib import Path

from teraplan.cli.command import DONE, NO, Command, emit, emit_json, on_screen
from teraplan.cli.output_file import writing
from teraplan.cli.planning import add_budget_arguments, add_machine_argument, asked
from teraplan.errors import InfeasibleBudgetError
from teraplan.files.plan_file import read_plan, write_plan
from teraplan.planners import make_plan
from teraplan.planners.rules import read_rules
from teraplan.report.plan_text import plan_json, plan_screen


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("trace", type=Path, metavar="TRACE", help="a trace file")
    add_machine_argument(parser)
    add_budget_arguments(parser)
    parser.add_argument("--policy", default="teraplan", help="who plans (default: teraplan)")
    parser.add_argument("--rules", type=Path, metavar="FILE", help="which tensors go where")
    parser.add_argument(
        "--time-limit", type=_seconds, metavar="S", help="stop searching after so many seconds"
    )
    parser.add_argument(
        "--candidate",
        type=Path,
        action="append",
        default=[],
        metavar="PLAN",
        help="a plan made before, taken if it holds here and is faster; may be repeated",
    )
    parser.add_argument(
        "--tight-bound",
        action="store_true",
        help="say by a linear program how fast a plan could be at most (needs scipy)",
    )
    parser.add_argument(
        "--no-recompute",
        action="store_true",
        help="compute no activation again, though the trace says how",
    )
    parser.add_argument(
        "--no-split",
        action="store_true",
        help="leave each tensor in one tier as a whole",
    )
    parser.add_argument(
        "-o", "--output", type=Path, required=True, metavar="FILE", help="where the plan goes"
    )


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is no number of seconds above 0")
    return value


def _run(options: argparse.Namespace) -> int:
    question = asked(options)
    try:
        plan = make_plan(
            question.trace,
            question.machine.hardware,
            question.budgets,
            options.policy,
            rules=read_rules(options.rules) if options.rules else None,
            candidates=[read_plan(path) for path in options.candidate],
            time_limit_s=options.time_limit,
            tight_bound=options.tight_bound,
            recompute=not options.no_recompute,
            split=not options.no_split,
        )
    except InfeasibleBudgetError as error:
        report: dict[str, object] = {
            "fits": False,
            "least_budget_bytes": error.least_budget_bytes,
            "why": str(error),
        }
        if options.json:
            emit_json(report)
        else:
            emit(f"does not fit: {error}")
        return NO
    with writing(options.output):
        write_plan(plan, options.output)
    if options.json:
        emit_json(plan_json(plan) | {"fits": True, "path": str(options.output)})
    else:
        emit(on_screen(plan_screen(plan)))
    return DONE


COMMAND = Command(
    name="plan",
    summary="a plan for a trace, on any machine, without torch",
    description=(
        "Plans the step of a trace within budgets on a machine, and writes the plan.\n"
        "Exit code 0 if the step fits, 1 if no plan keeps the budgets (the least device budget\n"
        "is told), 2 if an argument or a file is wrong."
    ),
    example="teraplan plan trace.json --hardware h100-nvl:ssd=4 --device-budget 40GiB -o plan.json",
    add_arguments=_add_arguments,
    run=_run,
)
