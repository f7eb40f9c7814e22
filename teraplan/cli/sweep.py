"""`teraplan sweep`: step time over budgets and numbers of SSDs."""

import argparse
import csv
import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from teraplan.cli.command import DONE, NO, Command, emit, emit_json
from teraplan.cli.output_file import whole_file, write_whole
from teraplan.cli.planning import (
    add_workload_arguments,
    budgets_of,
    library_trace,
    listed,
    require_no_workload,
    workload_of,
)
from teraplan.errors import ConfigError, InfeasibleBudgetError
from teraplan.files.trace_file import read_trace
from teraplan.library.machines import MAX_SSDS, machine_named
from teraplan.planners import make_plan
from teraplan.report.table import aligned
from teraplan.units import format_nbytes, format_ns
from teraplan.values.plan import Plan
from teraplan.values.step_trace import StepTrace


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One place of the sweep."""

    device_bytes: int
    host_bytes: int
    ssds: int
    plan: Plan | None
    """None where nothing fits."""


_SWEPT = (
    ("--device-budgets", "80%,60%,40%,25%,15%", "sizes, or parts of the peak with nothing moved"),
    ("--host-budgets", "0,64GiB,256GiB", "sizes"),
    ("--ssds", "1,4,12", "numbers of SSDs"),
)
"""Options, what they are if not given, and what is in them."""


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("trace", type=Path, nargs="?", metavar="TRACE", help="a trace file")
    add_workload_arguments(parser)
    parser.add_argument(
        "--hardware",
        required=True,
        metavar="MACHINE",
        help="a machine of the library by its name alone, such as h200",
    )
    for name, default, what in _SWEPT:
        shown = default.replace("%", "%%")
        help_text = f"{what}, separated by commas (default: {shown})"
        parser.add_argument(name, default=default, metavar="LIST", help=help_text)
    parser.add_argument("--policy", default="teraplan", help="whose plans (default: %(default)s)")
    parser.add_argument("--csv", type=Path, metavar="FILE", help="the table as a CSV file")
    parser.add_argument("--png", type=Path, metavar="FILE", help="a picture; needs matplotlib")


def _run(options: argparse.Namespace) -> int:
    if options.png and options.png.suffix != ".png":
        raise ConfigError(f"{options.png}: the picture is written as .png; change the name")
    _require_swept(options.hardware)
    machine = machine_named(options.hardware)
    if options.library is not None and options.trace is not None:
        raise ConfigError("give a trace file or --library, not both")
    if options.library is not None:
        trace = library_trace(workload_of(options), machine)
    elif options.trace is not None:
        require_no_workload(options)
        trace = read_trace(options.trace)
    else:
        raise ConfigError("give a trace file, or --library with the name of a model")
    cells = _cells(trace, options)
    if options.csv:
        write_whole(options.csv, _csv(cells).encode())
    if options.png:
        with whole_file(options.png) as part:
            _picture(cells, trace.duration_ns, part)
    if options.json:
        emit_json({"ideal_ns": trace.duration_ns, "cells": [_values(cell) for cell in cells]})
    else:
        emit("\n".join(_table(cells, trace.duration_ns)))
    return DONE if any(cell.plan for cell in cells) else NO


def _cells(trace: StepTrace, options: argparse.Namespace) -> list[Cell]:
    """One cell for each combination, from the least of all on: more memory is never slower."""
    try:
        ssds = sorted(int(text) for text in listed(options.ssds))
    except ValueError as error:
        raise ConfigError(f"--ssds: {options.ssds!r} is no list of numbers") from error
    if ssds and not 0 <= ssds[0] <= ssds[-1] <= MAX_SSDS:
        raise ConfigError(f"--ssds: machines of the library have 0 to {MAX_SSDS} of them")
    for name in ("ssds", "device_budgets", "host_budgets"):
        if not listed(getattr(options, name)):
            raise ConfigError(
                f"--{name.replace('_', '-')}: is empty; give values with commas between"
            )
    base = machine_named(options.hardware)
    limits = [
        budgets_of(trace, base, text, None, None).device_bytes
        for text in listed(options.device_budgets)
    ]
    hosts = [
        budgets_of(trace, base, None, text, None).host_bytes
        for text in listed(options.host_budgets)
    ]
    machines = {
        (num_ssds, host): machine_named(f"{options.hardware}:ssd={num_ssds}:host={host}")
        for num_ssds in ssds
        for host in hosts
    }
    cells: dict[tuple[int, int, int], Cell] = {}
    for s, num_ssds in enumerate(ssds):
        for h, host in enumerate(sorted(hosts)):
            machine = machines[num_ssds, host]
            for d, limit in enumerate(sorted(limits)):
                budgets = budgets_of(trace, machine, str(limit), None, None)
                before = (cells.get(at) for at in ((s - 1, h, d), (s, h - 1, d), (s, h, d - 1)))
                smaller = [cell.plan for cell in before if cell is not None and cell.plan]
                try:
                    plan = make_plan(
                        trace, machine.hardware, budgets, options.policy, candidates=smaller
                    )
                except InfeasibleBudgetError:
                    plan = None
                cell = Cell(device_bytes=limit, host_bytes=host, ssds=num_ssds, plan=plan)
                cells[s, h, d] = cell
    return list(cells.values())


def _require_swept(hardware: str) -> None:
    """Refuse a machine whose options say what the sweep is over."""
    for option in hardware.split(":")[1:]:
        name = option.partition("=")[0]
        if name in ("ssd", "host"):
            wanted = "--ssds" if name == "ssd" else "--host-budgets"
            raise ConfigError(f'--hardware {hardware}: leave "{option}" out, and use {wanted}')


def _values(cell: Cell) -> dict[str, object]:
    plan = cell.plan
    return {
        "device_bytes": cell.device_bytes,
        "host_bytes": cell.host_bytes,
        "ssds": cell.ssds,
        "fits": plan is not None,
        "step_ns": plan.prediction.step_ns if plan else None,
        "bound_ns": plan.prediction.bound_ns if plan else None,
    }


def _csv(cells: Sequence[Cell]) -> str:
    text = io.StringIO()
    rows = [_values(cell) for cell in cells]
    writer = csv.DictWriter(text, fieldnames=list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def _table(cells: Sequence[Cell], ideal_ns: int) -> list[str]:
    limits = sorted({cell.device_bytes for cell in cells}, reverse=True)
    rows = [["SSDs", "host", *(format_nbytes(limit) for limit in limits)]]
    for ssds, host in sorted({(cell.ssds, cell.host_bytes) for cell in cells}):
        row = [str(ssds), format_nbytes(host)]
        for limit in limits:
            cell = next(
                c for c in cells if (c.ssds, c.host_bytes, c.device_bytes) == (ssds, host, limit)
            )
            row.append(format_ns(cell.plan.prediction.step_ns) if cell.plan else "no fit")
        rows.append(row)
    lines = aligned(rows, ">>" + ">" * len(limits))
    return [f"Step time by device budget; {format_ns(ideal_ns)} with unlimited memory.", "", *lines]


def _picture(cells: Sequence[Cell], ideal_ns: int, path: Path) -> None:
    try:
        from teraplan.report.sweep_picture import Curve, save_sweep
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != "matplotlib":
            raise
        raise ConfigError(
            "--png needs matplotlib, which is not installed: pip install 'teraplan[plot]'"
        ) from error
    curves = [
        Curve(
            label=f"{ssds} SSD{'s' if ssds != 1 else ''}, {format_nbytes(host)} host",
            points=tuple(
                (cell.device_bytes, cell.plan.prediction.step_ns)
                for cell in cells
                if cell.plan is not None and (cell.ssds, cell.host_bytes) == (ssds, host)
            ),
        )
        for ssds, host in sorted({(cell.ssds, cell.host_bytes) for cell in cells})
    ]
    save_sweep(curves, ideal_ns, path)


COMMAND = Command(
    name="sweep",
    summary="step time over device budget, host budget and number of SSDs",
    description=(
        "Plans one step for every combination of budgets and SSDs, and prints a table of step\n"
        "times; a plan for less of everything stays a candidate where there is more, so more\n"
        "memory is never slower. Exit code 0 if any combination fits, 1 if none does."
    ),
    example="teraplan sweep --library llama3-8b --hardware h100-nvl --png sweep.png",
    add_arguments=_add_arguments,
    run=_run,
)
