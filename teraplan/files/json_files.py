"""Strict reading and atomic writing of JSON files that people may have edited or received.

`load` bounds what a hostile file can cost (size before reading, nesting, digits) and `Node` walks
the parsed value: each access checks the type and knows the path of the field, so that every refusal
says which file and which field, e.g.

    plan.json: migrations[3].tier: "disk" is not one of device, host, storage
"""

import codecs
import io
import json
import os
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import final

from teraplan.bounded_file import pieces
from teraplan.errors import FileFormatError
from teraplan.files.whole_file import whole_file

MAX_FILE_NBYTES = 1 << 30
"""Larger files are refused unread; a trace of 250 000 sites takes about 40 MB."""
MAX_INT = (1 << 62) - 1
"""Bytes and nanoseconds beyond this (146 years) are refused, so that sums of a few fit 64 bits."""
MAX_TEXT = 1 << 16
"""Longest name in characters."""
MAX_MESSAGE = 1000
"""Characters that an error shows at most, about."""
_MOST_BITS = 128
"""Of a whole number that an error shows."""


def write_object(value: dict[str, object], path: Path) -> None:
    """Writes `value` to `path` as JSON with sorted keys, in place of what was there or not at all.

    The outer object has one key per line and lists of objects one object per line, so that a
    person can read the file and a line-based diff means something. Mode 0600 less the umask.
    """
    with whole_file(Path(path), mode=0o600) as part, part.open("w", encoding="utf-8") as file:
        file.writelines(_lines(value))
        file.flush()
        os.fsync(file.fileno())


def load_object(path: Path, schema: str, versions: Sequence[int]) -> "Node":
    """The outer object of a JSON file whose `schema` and `schema_version` are as wanted.

    Raises:
        FileFormatError: unreadable, too large, not JSON, another schema, an unknown version.
    """
    return require_schema(load(path), schema, versions)


def load(path: Path) -> "Node":
    """What a JSON file holds, whatever it is.

    Raises:
        FileFormatError: unreadable, too large, not JSON, a field twice, or a number that is no
            integer.
    """
    path = Path(path)
    return Node(_parse(_text(path), path), f"{path}: ")


def require_schema(root: "Node", schema: str, versions: Sequence[int]) -> "Node":
    """`root`, the outer object of a file, if its `schema` and `schema_version` are as wanted.

    Raises:
        FileFormatError: another schema, an unknown version.
    """
    found = root.get("schema")
    if found.text() != schema:
        raise found.fail(f'is "{found.text()}", expected "{schema}"')
    version = root.get("schema_version")
    if version.integer() not in versions:
        known = ", ".join(str(v) for v in versions)
        raise version.fail(
            f"is {version.integer()}, this teraplan reads {known}; "
            "use the version of teraplan that wrote the file, or make it again"
        )
    return root


def _text(path: Path) -> str:
    """The text of a file, of whose bytes few are in memory at a time."""
    text, decoder = io.StringIO(), codecs.getincrementaldecoder("utf-8")()
    try:
        for piece in pieces(path, MAX_FILE_NBYTES):
            text.write(decoder.decode(piece))
        text.write(decoder.decode(b"", final=True))
    except UnicodeDecodeError as error:
        raise FileFormatError(f"{path}: is not JSON: {error}") from error
    return text.getvalue()


def _parse(text: str, path: Path) -> object:
    def refuse(token: str) -> object:
        raise FileFormatError(f"{path}: has the number {token}; only integers are allowed")

    def no_minus_zero(token: str) -> int:
        if token == "-0":
            raise FileFormatError(f"{path}: has the number -0; write 0")
        return int(token)

    def no_duplicates(pairs: list[tuple[str, object]]) -> dict[str, object]:
        result = dict(pairs)
        if len(result) != len(pairs):
            counts = Counter(name for name, _ in pairs)
            twice = next(name for name, count in counts.items() if count > 1)
            message = f'{path}: has the field "{twice}" twice in one object'
            raise FileFormatError(_for_people(message))
        return result

    try:
        value: object = json.loads(
            text,
            # Python's own is faster, and most files have no such characters.
            parse_int=no_minus_zero if "-0" in text else None,
            parse_float=refuse,
            parse_constant=refuse,
            object_pairs_hook=no_duplicates,
        )
    except FileFormatError:
        raise
    except json.JSONDecodeError as error:
        raise FileFormatError(f"{path}: is not JSON: {error}") from error
    except RecursionError as error:
        raise FileFormatError(f"{path}: is not JSON: nested too deeply") from error
    except ValueError as error:  # Python's own, of an integer with thousands of digits
        message = f"{path}: is not JSON that is read here: a number has thousands of digits"
        raise FileFormatError(message) from error
    return value


def _lines(value: dict[str, object]) -> Iterable[str]:
    yield "{\n"
    for index, key in enumerate(sorted(value)):
        yield ("" if index == 0 else ",\n") + f"{json.dumps(key)}: "
        yield from _member(value[key])
    yield "\n}\n"


_SORTED = json.JSONEncoder(sort_keys=True)


def _member(value: object) -> Iterable[str]:
    if isinstance(value, dict) and any(isinstance(v, (dict, list)) for v in value.values()):
        yield from (line.rstrip("\n") if line == "\n}\n" else line for line in _lines(value))
    elif isinstance(value, list) and value and isinstance(value[0], dict):
        yield "[\n"
        for index, item in enumerate(value):
            yield ("" if index == 0 else ",\n") + _SORTED.encode(item)
        yield "\n]"
    else:
        yield _SORTED.encode(value)


@final
class Node:
    """A JSON value and the path by which it was reached."""

    __slots__ = ("_value", "_where")

    def __init__(self, value: object, where: str) -> None:
        self._value = value
        self._where = where

    def fail(self, problem: str) -> FileFormatError:
        """The error to raise: the path of this value and what is wrong with it."""
        return FileFormatError(_for_people(f"{self._where}: {problem}".replace(": : ", ": ")))

    def only(self, fields: Iterable[str]) -> "Node":
        """Itself, after a check that it is an object with no other than these fields."""
        unknown = self._object().keys() - set(fields)
        if unknown:
            raise self.fail(f'unknown field "{min(unknown)}"')
        return self

    def field_names(self) -> list[str]:
        """The field names of an object, in their order."""
        return list(self._object())

    def get(self, field: str) -> "Node":
        """A field of an object."""
        fields = self._object()
        if field not in fields:
            raise self.fail(f'field "{field}" is missing')
        return Node(fields[field], self._child(field))

    def has(self, field: str) -> bool:
        """Whether an object has this field."""
        return field in self._object()

    def items(self) -> list["Node"]:
        """The items of a list."""
        items = self._list()
        return [Node(item, f"{self._where}[{i}]") for i, item in enumerate(items)]

    def integer(self, limit: int = MAX_INT) -> int:
        """An integer from 0 to `limit`."""
        value = self._value
        if type(value) is not int:
            raise self.fail(f"is {_describe(value)}, expected an integer")
        if not 0 <= value <= limit:
            raise self.fail(f"is {_describe(value)}, expected 0 to {limit}")
        return value

    def flag(self) -> bool:
        """A true or false."""
        if type(self._value) is not bool:
            raise self.fail(f"is {_describe(self._value)}, expected true or false")
        return self._value

    def text(self, max_length: int = MAX_TEXT) -> str:
        """A string."""
        value = self._value
        if type(value) is not str:
            raise self.fail(f"is {_describe(value)}, expected a string")
        if len(value) > max_length:
            raise self.fail(f"is a string of {len(value)} characters, at most {max_length}")
        return value

    def label(self) -> str:
        """A string that only people read: what a terminal would obey is written out."""
        return printable(self.text())

    def integers(self, length: int | None = None, limit: int = MAX_INT) -> tuple[int, ...]:
        """A list of integers from 0 to `limit`."""
        items = self._list(length)
        if set(map(type, items)) <= {int}:
            numbers: list[int] = items  # type: ignore[assignment]
            if not numbers or (min(numbers) >= 0 and max(numbers) <= limit):
                return tuple(numbers)
        return tuple(node.integer(limit) for node in self.items())

    def is_null(self) -> bool:
        """Whether it is null."""
        return self._value is None

    def _object(self) -> dict[str, object]:
        if not isinstance(self._value, dict):
            raise self.fail(f"is {_describe(self._value)}, expected an object")
        return self._value

    def _list(self, length: int | None = None) -> list[object]:
        if not isinstance(self._value, list):
            raise self.fail(f"is {_describe(self._value)}, expected a list")
        if length is not None and len(self._value) != length:
            raise self.fail(f"has {len(self._value)} items, expected {length}")
        return self._value

    def _child(self, field: str) -> str:
        return self._where + field if self._where.endswith(": ") else f"{self._where}.{field}"


def printable(text: str) -> str:
    """Text on one line without what a terminal would obey, which a file may contain."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def _for_people(message: str) -> str:
    """Printable, and without the middle of a name of thousands of characters."""
    message = printable(message)
    if len(message) <= MAX_MESSAGE:
        return message
    half = MAX_MESSAGE // 2
    return f"{message[:half]} ... {message[-half:]}"


def _describe(value: object) -> str:
    if isinstance(value, (dict, list)):
        return f"a{'n object' if isinstance(value, dict) else ' list'} of {len(value)}"
    if type(value) is int and value.bit_length() > _MOST_BITS:
        return f"a whole number of {value.bit_length()} bits"
    text = "null" if value is None else json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."
