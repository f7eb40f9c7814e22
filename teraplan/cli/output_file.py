"""Output files, written whole or not at all, and what is known of them before the work begins."""

import argparse
import os
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path

from teraplan.errors import ConfigError
from teraplan.files.whole_file import require_place
from teraplan.files.whole_file import whole_file as whole_file_at

_OUTPUTS = {"output": "-o", "csv": "--csv", "png": "--png"}
"""Arguments that name a file to be written, and how they are written."""


def require_outputs(options: argparse.Namespace) -> None:
    """Does nothing if the files to be written can be, and are none that are read.

    Raises:
        ConfigError: one cannot be written, or what is read or written otherwise would be lost.
    """
    given = {field: value for field, value in vars(options).items() if value is not None}
    outputs: dict[str, Path] = {field: given.pop(field) for field in _OUTPUTS if field in given}
    for field, output in outputs.items():
        if any(_is_same(one, output) for one in _paths(given)):
            raise ConfigError(
                f"{output} is read, and would be lost; give another {_OUTPUTS[field]}"
            )
        with writing(output):
            require_place(output)
    first: dict[Path, str] = {}
    for field, output in outputs.items():
        other = first.setdefault(output.resolve(), field)
        if other != field:
            raise ConfigError(
                f"{output} is the file of both {_OUTPUTS[other]} and {_OUTPUTS[field]}; give two"
            )


def _paths(given: dict[str, object]) -> Iterator[Path | str]:
    for value in given.values():
        for one in value if isinstance(value, list) else [value]:
            if isinstance(one, Path | str) and os.path.exists(one):
                yield one


def _is_same(one: Path | str, output: Path) -> bool:
    return output.exists() and os.path.samefile(one, output)


@contextmanager
def writing(path: Path) -> Generator[None, None, None]:
    """Within this `path` is written.

    Raises:
        ConfigError: if it cannot be.
    """
    try:
        yield
    except OSError as error:
        raise ConfigError(
            f"{path}: cannot be written: {error.strerror}; choose another place"
        ) from error


@contextmanager
def whole_file(path: Path) -> Generator[Path, None, None]:
    """A file to write to; it takes the place of `path` when the block ends well.

    Raises:
        ConfigError: if it cannot be written there.
    """
    with writing(path), whole_file_at(path) as part:
        yield part


def write_whole(path: Path, data: bytes) -> None:
    """Writes `data` to `path`, whole or not at all.

    Raises:
        ConfigError: if it cannot be written there.
    """
    with whole_file(path) as part:
        part.write_bytes(data)
