"""The files that a run leaves behind: traces, plans and what really happened."""

from collections.abc import Sequence
from pathlib import Path

from teraplan.plan import Plan
from teraplan.plan_file import write_plan
from teraplan.run_file import write_runs
from teraplan.run_record import RunRecord
from teraplan.step_trace import StepTrace
from teraplan.trace_file import write_trace


class ReportFiles:
    """Writes into one directory, or nowhere. Kinds of steps after the first get a number."""

    def __init__(self, directory: str | None) -> None:
        self._directory = Path(directory) if directory is not None else None
        if self._directory is not None:
            self._directory.mkdir(parents=True, exist_ok=True)

    def path(self, what: str, case: int) -> Path | None:
        """Where the file of this kind ("trace", "plan", "run") is, or would be."""
        if self._directory is None:
            return None
        suffix = "" if case == 0 else f"-{case}"
        return self._directory / f"{what}{suffix}.json"

    def write_trace(self, case: int, trace: StepTrace) -> None:
        """Write the trace of a kind of step."""
        path = self.path("trace", case)
        if path is not None:
            write_trace(trace, path)

    def write_plan(self, case: int, plan: Plan) -> None:
        """Write the plan of a kind of step."""
        path = self.path("plan", case)
        if path is not None:
            write_plan(plan, path)

    def write_runs(self, case: int, plan: Plan, records: Sequence[RunRecord]) -> None:
        """Write the planned steps of a kind that have run."""
        path = self.path("run", case)
        if path is not None:
            write_runs(path, plan, records)
