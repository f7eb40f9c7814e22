"""The files that a run leaves behind: traces, plans and what really happened."""

import functools
import logging
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from teraplan.errors import ConfigError
from teraplan.files.plan_file import write_plan
from teraplan.files.run_file import write_runs
from teraplan.files.trace_file import write_trace
from teraplan.runtime.process import fallbacks
from teraplan.values.plan import Plan
from teraplan.values.run_record import RunRecord
from teraplan.values.step_trace import StepTrace

_RUNS_WRITTEN_AT = (1, 3, 10)
"""Numbers of planned steps after which the run file is written."""
log = logging.getLogger(__name__)


class ReportFiles:
    """Writes into one directory, or nowhere. Kinds of steps after the first get a number.

    A file that cannot be written later on is a fallback: training does not end for it.
    """

    def __init__(self, directory: str | None, *, strict: bool) -> None:
        self._directory = Path(directory) if directory is not None else None
        self._strict = strict
        self.fallbacks: list[str] = []
        if self._directory is not None:
            _require_writable(self._directory)

    def path(self, what: str, case: int) -> Path | None:
        """Where the file of this kind ("trace", "plan", "run") is, or would be."""
        if self._directory is None:
            return None
        suffix = "" if case == 0 else f"-{case}"
        return self._directory / f"{what}{suffix}.json"

    def write_trace(self, case: int, trace: StepTrace) -> None:
        """Write the trace of a kind of step."""
        self._write("trace", case, functools.partial(write_trace, trace))

    def write_plan(self, case: int, plan: Plan) -> None:
        """Write the plan of a kind of step."""
        self._write("plan", case, functools.partial(write_plan, plan))

    def write_runs(
        self, case: int, plan: Plan, records: Sequence[RunRecord], *, num_runs: int
    ) -> None:
        """Write the last planned steps of a kind, of which so many have run, now and then."""
        if num_runs in _RUNS_WRITTEN_AT:
            self._write("run", case, lambda path: write_runs(path, plan, records))

    def _write(self, what: str, case: int, write: Callable[[Path], None]) -> None:
        path = self.path(what, case)
        if path is None:
            return
        try:
            write(path)
        except OSError as error:
            text = f"{path} cannot be written: {error.strerror}"
            fallbacks.allow(text, strict=self._strict)
            if text not in self.fallbacks:
                self.fallbacks.append(text)
                log.warning("%s", text)


def _require_writable(directory: Path) -> None:
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):
            pass
    except OSError as error:
        raise ConfigError(
            f"option report: no file can be made in {directory}: {error.strerror}; "
            "name a directory that can be written to"
        ) from None
