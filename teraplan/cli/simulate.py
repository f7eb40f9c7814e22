"""`teraplan simulate`: what a plan does to a step, perhaps another than it was made for."""

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from teraplan.checker.check_plan import check_plan
from teraplan.checker.violations import Violation, ViolationKind
from teraplan.cli.command import DONE, NO, Command, emit, emit_json
from teraplan.errors import PlanMismatchError
from teraplan.files.run_file import read_plan_or_runs
from teraplan.files.trace_file import read_trace
from teraplan.library.machine_file import find_machine
from teraplan.planners import with_bound
from teraplan.report.check_text import violations_text
from teraplan.report.critical_path import critical_path
from teraplan.report.plan_text import plan_json, plan_screen
from teraplan.simulation.simulate import predict
from teraplan.values.plan import Plan
from teraplan.values.recomputed_step import independent
from teraplan.values.step_trace import StepTrace

_RUNNABLE = (
    ViolationKind.CLEAN,
    ViolationKind.DEVICE_BUDGET,
    ViolationKind.HOST_BUDGET,
    ViolationKind.STORAGE_BUDGET,
    ViolationKind.PREDICTION,
)
"""Plans in which no more than this is wrong can be simulated."""


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("trace", type=Path, metavar="TRACE", help="a trace file")
    parser.add_argument("plan", type=Path, metavar="PLAN", help="a plan or run file")
    parser.add_argument(
        "--hardware", metavar="H", help="another machine than the plan's: a file or a name"
    )


def _run(options: argparse.Namespace) -> int:
    trace = read_trace(options.trace)
    plan, _ = read_plan_or_runs(options.plan)
    _require_same_step(trace, plan)
    hardware = find_machine(options.hardware).hardware if options.hardware else plan.hardware
    same = replace(plan, trace=trace)
    broken = tuple(v for v in check_plan(same) if v.kind not in _RUNNABLE)
    if broken:
        return _refuse(options, same, broken)
    again = replace(same, hardware=hardware)
    again = replace(again, prediction=predict(trace, again.machine, *plan.choices))
    violations = check_plan(again)
    if violations:
        return _refuse(options, again, violations)
    again = with_bound(again)
    path = critical_path(again.step, again.machine, plan.migrations, plan.host_updates)
    if options.json:
        emit_json(plan_json(again) | {"fits": True, "critical_path": path.as_json()})
    else:
        lines = [plan_screen(again), "", "What the step is as long as:", *path.describe(again.step)]
        emit("\n".join(lines))
    return DONE


def _refuse(options: argparse.Namespace, plan: Plan, violations: Sequence[Violation]) -> int:
    if options.json:
        emit_json(plan_json(plan) | {"fits": False, "critical_path": None})
    else:
        emit(violations_text(plan, violations))
    return NO


def _require_same_step(trace: StepTrace, plan: Plan) -> None:
    """Raise PlanMismatchError unless both have the same tensors, touched at the same sites."""
    planned = plan.trace
    ours = [(tensor.name, tensor.nbytes, tensor.windows) for tensor in trace.tensors]
    theirs = [(tensor.name, tensor.nbytes, tensor.windows) for tensor in planned.tensors]
    if len(trace.sites) != len(planned.sites) or ours != theirs:
        raise PlanMismatchError(
            "the plan is for another step: its tensors or the sites that touch them differ from "
            "those of the trace; only times may differ"
        )
    chosen = [choice.tensor_id for choice in plan.recomputed]
    if chosen != list(independent(trace, chosen)):
        raise PlanMismatchError(
            "the plan computes tensors again of which the trace does not say what that takes"
        )


COMMAND = Command(
    name="simulate",
    summary="the step of a trace under a plan, perhaps on another machine",
    description=(
        "Simulates the step of TRACE under the migrations of PLAN and prints the plan with the\n"
        "new prediction. Times of the trace may differ from those that the plan was made with;\n"
        "tensors and sites may not. Exit code 0 if the plan keeps its budgets, 1 if not."
    ),
    example="teraplan simulate trace.json plan.json --hardware h200:ssd=8",
    add_arguments=_add_arguments,
    run=_run,
)
