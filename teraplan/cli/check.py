"""`teraplan check`: whether a plan holds."""

import argparse
from dataclasses import asdict
from pathlib import Path

from teraplan.checker.check_plan import broken_rules, check_plan
from teraplan.cli.command import DONE, NO, Command, emit, emit_json
from teraplan.files.run_file import read_plan_or_runs
from teraplan.planners import as_it_is
from teraplan.report.check_text import valid_text, violations_text


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("plan", type=Path, metavar="PLAN", help="a plan or run file")


def _run(options: argparse.Namespace) -> int:
    plan, _ = read_plan_or_runs(options.plan)
    found = check_plan(plan)
    violations = broken_rules(found)
    outdated = [violation.message for violation in found if not violations]
    if not violations:
        said_ns, plan = plan.prediction.step_ns, as_it_is(plan)
        if said_ns != plan.prediction.step_ns:
            now_ns = plan.prediction.step_ns
            outdated.append(f"step_ns is {said_ns} in the plan, {now_ns} by a simulation of it")
    if options.json:
        peaks = {
            "device": plan.prediction.device_peak_bytes,
            "host": plan.prediction.host_peak_bytes,
            "storage": plan.prediction.storage_peak_bytes,
        }
        emit_json(
            {
                "valid": not violations,
                "violations": [asdict(violation) for violation in violations],
                "verified_peak_bytes": {} if violations else peaks,
                "outdated": outdated,
            }
        )
    else:
        emit(violations_text(plan, violations) if violations else valid_text(plan, outdated))
    return NO if violations else DONE


COMMAND = Command(
    name="check",
    summary="whether a plan holds, by a checker independent of the planners",
    description=(
        "Recomputes everything that a plan promises from its trace and its migrations: order of\n"
        "sites, tensors away only while idle, budgets and peaks of each tier, bytes moved.\n"
        "Exit code 0 if the plan holds, 1 if not; run it after you edited a plan by hand. If its\n"
        "prediction is of the plan as it was, that is said, and does not count."
    ),
    example="teraplan check plan.json",
    add_arguments=_add_arguments,
    run=_run,
)
