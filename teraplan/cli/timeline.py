"""`teraplan timeline`: a step as a Chrome trace."""

import argparse
import gzip
import json

from teraplan.cli.command import DONE, Command, add_drawing_arguments, emit, emit_json, read_drawn
from teraplan.cli.output_file import write_whole
from teraplan.errors import ConfigError
from teraplan.report.chrome_trace import chrome_trace


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    add_drawing_arguments(parser, "where the trace goes: .json, or .json.gz")


def _run(options: argparse.Namespace) -> int:
    name: str = options.output.name
    if not name.endswith((".json", ".json.gz")):
        raise ConfigError(
            f"{options.output}: a timeline is written as .json or .json.gz; change the name"
        )
    drawn = read_drawn(options.file, options.step)
    drawings = [drawn.planned] if drawn.actual is None else [drawn.planned, drawn.actual]
    trace = chrome_trace(drawn.plan, drawings)
    data = json.dumps(trace, separators=(",", ":")).encode()
    # mtime=0: the same plan gives the same bytes.
    write_whole(options.output, gzip.compress(data, mtime=0) if name.endswith(".gz") else data)
    events = trace["traceEvents"]
    assert isinstance(events, list), "the trace has its events in a list"
    processes = [drawing.name for drawing in drawings]
    if options.json:
        facts: dict[str, object] = {"path": str(options.output), "num_events": len(events)}
        emit_json(facts | {"processes": processes})
    else:
        emit(
            f"{options.output}: {len(events)} events ({' and '.join(processes)}); "
            "open it in https://ui.perfetto.dev or chrome://tracing"
        )
    return DONE


COMMAND = Command(
    name="timeline",
    summary="a step as a Chrome trace for Perfetto",
    description=(
        "Writes the step as Chrome trace events: computation per graph call and phase, waits,\n"
        "each link in each direction, memory and budget. Given a run file, planned and actual\n"
        "step are two processes of one timeline."
    ),
    example="teraplan timeline plan.json -o out.json.gz",
    add_arguments=_add_arguments,
    run=_run,
)
