"""What a command is, and what all of them share: exit codes, output, reading of their inputs."""

import argparse
import importlib
import json
import os
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from teraplan.checker.check_plan import broken_rules, check_plan
from teraplan.errors import ConfigError, FileFormatError
from teraplan.files.json_files import printable
from teraplan.files.run_file import read_plan_or_runs
from teraplan.planners import as_it_is
from teraplan.report.drawing import Drawing, draw_plan, draw_run
from teraplan.report.table import to_ascii
from teraplan.simulation.simulate import simulate
from teraplan.values.plan import Plan
from teraplan.values.run_record import RunRecord

DONE, NO, BAD_INPUT = 0, 1, 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """One word after `teraplan`."""

    name: str
    summary: str
    """A few words for the list of commands."""
    description: str
    example: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]


def require_torch() -> None:
    """Does nothing if torch can be imported.

    Raises:
        ConfigError: it cannot.
    """
    try:
        importlib.import_module("torch")
    except ImportError as error:
        raise ConfigError(f"needs torch: pip install torch ({error})") from error


def emit(text: str) -> None:
    """Prints `text`: nothing that a terminal obeys, and in ASCII where it cannot show more."""
    text = "\n".join(map(printable, text.split("\n")))
    encoding = sys.stdout.encoding or "ascii"
    try:
        text.encode(encoding)
    except UnicodeEncodeError:
        text = to_ascii(text)
    say(text)


def on_screen(text: str) -> str:
    """`text` with lines no wider than the terminal that it is printed on, if it is one."""
    if not sys.stdout.isatty():
        return text
    width = shutil.get_terminal_size().columns
    lines = text.split("\n")
    return "\n".join(line if len(line) <= width else f"{line[: width - 1]}…" for line in lines)


def emit_json(value: dict[str, object]) -> None:
    """Prints `value` as JSON."""
    say(json.dumps(value, indent=2, sort_keys=True))


def say(text: str, end: str = "\n") -> None:
    """Prints `text`; when the reader (`head`, a pager) has seen enough, it goes nowhere.

    Raises:
        ConfigError: the output cannot be written.
    """
    try:
        print(text, end=end, flush=True)
    except BrokenPipeError:
        _write_no_more()
    except OSError as error:
        _write_no_more()
        raise ConfigError(f"{error.strerror}: output is lost") from error


def _write_no_more() -> None:
    """Python flushes stdout once more at exit, and would complain there."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)


def read_as_it_is(path: Path) -> tuple[Plan, tuple[str, ...]]:
    """A plan with the prediction of what it says now, and what is to be said of an edited one.

    Raises:
        FileFormatError: if the file is no plan file or run file.
    """
    plan, _ = read_plan_or_runs(path)
    return predicted_as_it_is(plan, path)


def predicted_as_it_is(plan: Plan, path: Path) -> tuple[Plan, tuple[str, ...]]:
    """The same of a plan that has been read from the file at `path`."""
    broken = broken_rules(check_plan(plan))
    if broken:
        rules = "1 rule" if len(broken) == 1 else f"{len(broken)} rules"
        return plan, (
            f"{path} does not hold: it breaks {rules} (`teraplan check` names them). The "
            "prediction is that of the file, and does not count",
        )
    again = as_it_is(plan)
    if again is plan:
        return plan, ()
    return again, (f"{path} was edited, or another version made it: the prediction is made anew",)


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawn:
    """A plan file or run file, ready to be drawn."""

    plan: Plan
    planned: Drawing
    actual: Drawing | None


def read_drawn(path: Path, step: int | None) -> Drawn:
    """What `timeline` and `plot` draw; the plan is checked and simulated.

    Args:
        path: of a plan file or run file.
        step: number of the step to be drawn from a run file; None is the last.

    Raises:
        FileFormatError: if the file is neither, its plan does not hold, or it lacks the step.
    """
    plan, runs = read_plan_or_runs(path)
    plan = as_it_is(plan)
    simulation = simulate(plan.step, plan.machine, plan.migrations, plan.host_updates)
    run = _choose(runs, step, path)
    return Drawn(
        plan=plan,
        planned=draw_plan(plan, simulation),
        actual=draw_run(plan, run) if run else None,
    )


def _choose(runs: tuple[RunRecord, ...], step: int | None, path: Path) -> RunRecord | None:
    if step is None:
        return runs[-1] if runs else None
    for run in runs:
        if run.step == step:
            return run
    if not runs:
        raise FileFormatError(f"{path}: is a plan, not a run; --step needs a run file")
    numbers = ", ".join(str(run.step) for run in runs[:10])
    more = f" and {len(runs) - 10} more" if len(runs) > 10 else ""
    raise FileFormatError(f"{path}: has no step {step}; it has {numbers}{more}")


def add_drawing_arguments(parser: argparse.ArgumentParser, output_help: str) -> None:
    """The arguments that `timeline` and `plot` share."""
    parser.add_argument("file", type=Path, metavar="PLAN_OR_RUN", help="a plan or run file")
    parser.add_argument(
        "-o", "--output", type=Path, required=True, metavar="FILE", help=output_help
    )
    parser.add_argument(
        "--step",
        type=int,
        metavar="N",
        help="which step of a run file; the last one if not given",
    )
