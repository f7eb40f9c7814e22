"""Options as the environment and a TOML file have them, before anything is made of their values.

TERAPLAN_CONFIG=a.toml  ->  ("device_budget", "2GiB", "a.toml: line 1: option device_budget")
TERAPLAN_STRICT=yes     ->  ("strict", "yes", "environment variable TERAPLAN_STRICT")
"""

import io
import os
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from teraplan.bounded_file import pieces
from teraplan.errors import ConfigError, FileFormatError
from teraplan.near_names import nearest

PREFIX = "TERAPLAN_"
"""Start of the name of every environment variable that is read."""
FILE_VARIABLE = "TERAPLAN_CONFIG"
"""Names a TOML file with the same options."""
MAX_FILE_NBYTES = 1 << 20
"""Larger files are no configuration."""


def sources(environ: Mapping[str, str], names: Iterable[str]) -> Iterator[tuple[str, object, str]]:
    """Name, value and place of each option that is set, those of the file first.

    Args:
        environ: of the process.
        names: of all options that there are.

    Raises:
        ConfigError: the file cannot be read, or something set is no option.
    """
    names = tuple(names)
    file = environ.get(FILE_VARIABLE)
    if file:
        yield from _in_file(Path(file), names)
    yield from _in_environ(environ, names)


def check_name(name: object, what: str, known: Iterable[str]) -> None:
    """Raises a ConfigError with the nearest known name unless `name` is one of `known`."""
    names = list(known)
    if name in names:
        return
    by_lower = {known_name.lower(): known_name for known_name in names}
    # Only what differs is compared: with the common prefix every variable resembles every other.
    short = {lower.removeprefix(PREFIX.lower()): full for lower, full in by_lower.items()}
    wanted = (
        (name if isinstance(name, str) else "")
        .lower()
        .removeprefix(PREFIX.lower())
        .replace("-", "_")
    )
    near = nearest(wanted, short)
    hint = f"; did you mean {short[near]}?" if near else ""
    raise ConfigError(f"{what} {shown(name)} does not exist{hint} (there are {', '.join(names)})")


def expanded(path: Path) -> Path:
    """`path` with the home directory in the place of `~`.

    Raises:
        ConfigError: there is no such home directory.
    """
    try:
        return path.expanduser()
    except RuntimeError as error:
        raise ConfigError(f"{path}: there is no such user's home directory") from error


def shown(value: object) -> str:
    """A value that a user wrote, as an error shows it."""
    try:
        text = repr(value)
    except ValueError:  # Python's own, of an integer with thousands of digits
        text = "a number of thousands of digits"
    return text if len(text) <= 80 else text[:77] + "..."


def _in_environ(
    environ: Mapping[str, str], names: tuple[str, ...]
) -> Iterator[tuple[str, object, str]]:
    variables = {PREFIX + name.upper(): name for name in names}
    for variable in sorted(environ):
        if not variable.startswith(PREFIX) or variable == FILE_VARIABLE:
            continue
        check_name(variable, "environment variable", [*variables, FILE_VARIABLE])
        text = environ[variable]
        if not text.strip():
            continue
        name = variables[variable]
        value = text.split(os.pathsep) if name == "storage" else text
        yield name, value, f"environment variable {variable}"


def _in_file(path: Path, names: tuple[str, ...]) -> Iterator[tuple[str, object, str]]:
    try:
        text = _text(path)
        table = tomllib.loads(text)
    except (ConfigError, FileFormatError) as error:
        raise ConfigError(f"{error} ({FILE_VARIABLE} names this file)") from error
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        raise ConfigError(f"{path}: line {line}: is not UTF-8") from error
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise ConfigError(f"{path}: is not TOML: {error}") from error
    except ValueError as error:  # Python's own, as where a value is shown
        message = f"{path}: is not TOML that is read here: a number has thousands of digits"
        raise ConfigError(message) from error
    for name, value in table.items():
        place = f"{path}: line {_line_of(name, text)}:"
        check_name(name, f"{place} option", names)
        yield name, value, f"{place} option {name}"


def _text(path: Path) -> str:
    data = b"".join(pieces(expanded(path), MAX_FILE_NBYTES))
    return io.TextIOWrapper(io.BytesIO(data), encoding="utf-8-sig").read()


def _line_of(name: str, text: str) -> int:
    """Number of the first line of a TOML text that sets the key or opens the table `name`."""
    pattern = re.compile(rf"\s*\[*\s*[\"']?{re.escape(name)}[\"']?\s*[\].=]")
    lines = text.splitlines()
    return next((number for number, line in enumerate(lines, 1) if pattern.match(line)), 1)
