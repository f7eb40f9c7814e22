"""`teraplan estimate`: does it fit, how fast will it be, and what would help."""

import argparse
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from teraplan.cli.command import DONE, NO, Command, emit, emit_json
from teraplan.cli.planning import (
    Asked,
    add_budget_arguments,
    add_machine_argument,
    add_workload_arguments,
    asked,
    library_trace,
    with_more_storage,
)
from teraplan.errors import InfeasibleBudgetError
from teraplan.planners import make_plan
from teraplan.planners.base import Problem
from teraplan.planners.feasible import finds_room, working_budget
from teraplan.report.table import aligned
from teraplan.simulation.memory_curve import device_curve, peak
from teraplan.units import format_nbytes, format_ns
from teraplan.values.plan import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class _Change:
    """Something that could be had, and the step per sample with it."""

    name: str
    plan: Plan | None
    samples: int


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("trace", type=Path, nargs="?", metavar="TRACE", help="a trace file")
    add_workload_arguments(parser)
    add_machine_argument(parser)
    add_budget_arguments(parser)


def _run(options: argparse.Namespace) -> int:
    question = asked(options)
    most = peak(device_curve(question.trace))
    why, plan = "", None
    try:
        plan = _plan(question)
        least = _least_bytes(question)
    except InfeasibleBudgetError as error:
        why, least = str(error), error.least_budget_bytes
    changes = sorted(_changes(question, plan), key=_time_per_sample)
    if options.json:
        emit_json(
            {
                "fits": plan is not None,
                "why": why,
                "least_device_bytes": least,
                "unlimited_peak_bytes": most,
                "step_ns": plan.prediction.step_ns if plan else None,
                "ideal_ns": question.trace.duration_ns,
                "bound_ns": plan.prediction.bound_ns if plan else None,
                "changes": [
                    {
                        "name": change.name,
                        "step_ns": change.plan.prediction.step_ns if change.plan else None,
                        "samples": change.samples,
                    }
                    for change in changes
                ],
            }
        )
    else:
        emit("\n".join(_lines(question, plan, why, least, most, changes)))
    return DONE if plan else NO


def _plan(question: Asked, candidate: Plan | None = None) -> Plan:
    candidates = () if candidate is None else (candidate,)
    return make_plan(
        question.trace, question.machine.hardware, question.budgets, candidates=candidates
    )


def _least_bytes(question: Asked) -> int:
    """The least device budget that is known to work; that of the question does."""
    problem = Problem.of(question.trace, question.machine.hardware, question.budgets)
    return min(problem.limit_bytes, working_budget(problem, finds_room, problem.enough_bytes()))


def _time_per_sample(change: _Change) -> float:
    return change.plan.prediction.step_ns / change.samples if change.plan else float("inf")


def _changes(question: Asked, plan: Plan | None) -> Iterator[_Change]:
    samples = question.workload.batch if question.workload else 1
    for name, changed in _variants(question):
        same_step = changed.trace is question.trace
        size = changed.workload.batch if changed.workload else 1
        try:
            made = _plan(changed, plan if same_step else None)
        except InfeasibleBudgetError:
            made = None
        yield _Change(name=name, plan=made, samples=samples if same_step else size)


def _variants(question: Asked) -> Iterator[tuple[str, Asked]]:
    machine, budgets = question.machine, question.budgets
    hardware = machine.hardware
    if hardware.storage_link is not None:
        yield (
            "twice the SSDs",
            replace(
                question,
                machine=with_more_storage(machine, 2),
                budgets=replace(budgets, storage_bytes=2 * budgets.storage_bytes),
            ),
        )
    if hardware.host_link is not None:
        more = replace(hardware, host_capacity_bytes=2 * hardware.host_capacity_bytes)
        yield (
            "twice the host memory",
            replace(
                question,
                machine=replace(machine, hardware=more),
                budgets=replace(budgets, host_bytes=2 * budgets.host_bytes),
            ),
        )
    larger = int(1.25 * min(budgets.device_bytes, hardware.device_capacity_bytes))
    yield (
        "a quarter more device memory",
        replace(
            question,
            machine=replace(machine, hardware=replace(hardware, device_capacity_bytes=larger)),
            budgets=replace(budgets, device_bytes=larger),
        ),
    )
    if question.workload is not None:
        doubled = replace(question.workload, batch=2 * question.workload.batch)
        yield (
            "twice the batch",
            replace(question, workload=doubled, trace=library_trace(doubled, machine)),
        )


def _lines(
    question: Asked, plan: Plan | None, why: str, least: int, most: int, changes: list[_Change]
) -> Iterator[str]:
    budget = question.budgets.device_bytes
    rows = [
        ("peak with nothing moved", format_nbytes(most)),
        ("device budget", format_nbytes(budget)),
        ("least device budget", format_nbytes(least)),
    ]
    if plan is not None:
        said = plan.prediction
        part = said.ideal_ns / said.step_ns if said.step_ns else 1.0
        ideal = f"the ideal is {format_ns(said.ideal_ns)} ({100 * part:.1f} % of its speed)"
        rows.append(("predicted step", f"{format_ns(said.step_ns)}; {ideal}"))
        if said.gap is not None:
            rows.append(("no plan is faster by more than", f"{100 * said.gap:.1f} %"))
    yield "It fits." if plan else f"It does not fit: {why}"
    yield ""
    yield from aligned(rows)
    yield ""
    yield "What would help, by time per sample:"
    samples = question.workload.batch if question.workload else 1
    now = plan.prediction.step_ns / samples if plan else None
    table: list[tuple[str, str, str]] = []
    for change in changes:
        if change.plan is None:
            table.append((f"  {change.name}", "does not fit", ""))
            continue
        each = _time_per_sample(change)
        gain = f"{now / each:.2f} times as fast" if now and each else ""
        table.append((f"  {change.name}", format_ns(change.plan.prediction.step_ns), gain))
    yield from aligned(table, "<><")


COMMAND = Command(
    name="estimate",
    summary="whether a step fits, how fast it will be, and what would help most",
    description=(
        "Plans the step of a trace, or of a model of the library, and again with more SSDs, host\n"
        "memory, device memory and, for a model, a larger batch. Exit code 0 if it fits, 1 if not."
    ),
    example="teraplan estimate --library llama3-8b --batch 4 --hardware rtx-4090:ssd=2",
    add_arguments=_add_arguments,
    run=_run,
)
