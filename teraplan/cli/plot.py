"""`teraplan plot`: a picture of a step."""

import argparse
from pathlib import Path

from teraplan.cli.command import (
    DONE,
    Command,
    Drawn,
    add_drawing_arguments,
    emit,
    emit_json,
    read_drawn,
)
from teraplan.cli.output_file import whole_file
from teraplan.errors import ConfigError

_FORMATS = {".png": "png", ".svg": "svg", ".pdf": "pdf"}


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    add_drawing_arguments(parser, "where the picture goes: .png, .svg or .pdf")


def _run(options: argparse.Namespace) -> int:
    file_format = _FORMATS.get(options.output.suffix)
    if file_format is None:
        raise ConfigError(
            f"{options.output}: a picture is written as .png, .svg or .pdf; change the name"
        )
    drawn = read_drawn(options.file, options.step)
    with whole_file(options.output) as part:
        _draw(drawn, part, file_format)
    if options.json:
        emit_json({"path": str(options.output), "actual": drawn.actual is not None})
    else:
        emit(str(options.output))
    return DONE


def _draw(drawn: Drawn, path: Path, file_format: str) -> None:
    try:
        from teraplan.report.picture import save_picture
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != "matplotlib":
            raise
        raise ConfigError(
            "plot needs matplotlib, which is not installed: pip install 'teraplan[plot]'"
        ) from error
    save_picture(drawn.plan, drawn.planned, drawn.actual, path, file_format)


COMMAND = Command(
    name="plot",
    summary="a picture of a step: memory with and without the plan, and the links",
    description=(
        "Draws device memory over the step with and without the plan, the budget, and under it\n"
        "what each link carries when and where the computation waits. Given a run file, the step\n"
        "as it ran is drawn beside the plan. Needs matplotlib: pip install 'teraplan[plot]'"
    ),
    example="teraplan plot plan.json -o plan.png",
    add_arguments=_add_arguments,
    run=_run,
)
