"""Files that commands read, and what tests of commands look at."""

import json
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from teraplan.files.plan_file import write_plan
from teraplan.files.run_file import write_runs
from teraplan.values.plan import Plan
from tests.report.example_plan import make_other_plan, make_plan, make_run

Captured = pytest.CaptureFixture[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Files:
    plan: str
    other: str
    broken: str
    run: str
    out: Path


def write_files(folder: Path) -> Files:
    plan = make_plan()
    run = make_run(plan)
    write_plan(plan, folder / "plan.json")
    write_plan(make_other_plan(), folder / "other.json")
    write_plan(_broken(plan), folder / "broken.json")
    write_runs(folder / "run.json", plan, [run, replace(run, step=8)])
    return Files(
        plan=str(folder / "plan.json"),
        other=str(folder / "other.json"),
        broken=str(folder / "broken.json"),
        run=str(folder / "run.json"),
        out=folder,
    )


def _broken(plan: Plan) -> Plan:
    first, *rest = plan.migrations
    return replace(plan, migrations=(replace(first, needed=first.needed + 1), *rest))


def loaded(capsys: Captured) -> Any:  # noqa: ANN401  JSON of many shapes, looked into by tests
    return json.loads(capsys.readouterr().out)


def assert_one_line(capsys: Captured, *parts: str) -> None:
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.count("\n") == 1
    assert "Traceback" not in output.err
    for part in parts:
        assert part in output.err


def python(*arguments: str, **environment: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        [sys.executable, *arguments], capture_output=True, check=False, env=environment, timeout=60
    )
