"""Policies of other packages: what they return is brought into form, what they do wrong is named.

Whether migrations make sense is the checker's to say; here is seen to it that they are some, of
values that the checker, the simulator and plan files are made for.
"""

import operator
from collections.abc import Callable, Iterable, Mapping
from importlib.metadata import EntryPoint
from types import MappingProxyType
from typing import Any

import numpy as np

from teraplan.errors import ConfigError, TeraplanError
from teraplan.files.json_files import MAX_TEXT, printable
from teraplan.planners.base import Planner, Problem
from teraplan.values.hardware import Tier
from teraplan.values.plan import Migration


def load_planner(point: EntryPoint) -> Planner:
    """The planner that an entry point names.

    Raises:
        ConfigError: it cannot be loaded, or is no function. So does the planner if it fails, with
            the cause, or returns anything but migrations.
    """
    policy = f'policy "{point.name}" ({point.value})'
    try:
        function: object = point.load()
    except (Exception, SystemExit) as error:
        raise ConfigError(f"{policy} cannot be loaded: {_told(error)}") from error
    if not callable(function):
        raise ConfigError(
            f"{policy} is {_kind(function)}; let its entry point name a function of a Problem"
        )

    def planner(problem: Problem) -> tuple[Migration, ...]:
        try:
            returned = function(problem)
            items = tuple(returned) if isinstance(returned, Iterable) else None
        except TeraplanError:
            raise
        except (Exception, SystemExit) as error:
            raise ConfigError(
                f"{policy} failed: {_told(error)}; correct it, or choose another"
            ) from error
        if items is None:
            raise ConfigError(
                f"{policy} returned {_kind(returned)}; let it return a tuple of Migration"
            )
        return tuple(_plain(item, f"{policy} returned") for item in items)

    return planner


def _plain(item: object, returned: str) -> Migration:
    """A migration of integers, where there may have been NumPy's.

    Raises:
        ConfigError: it is none, or a field holds something else.
    """
    if not isinstance(item, Migration):
        raise ConfigError(f"{returned} {_kind(item)} among its migrations; let all be Migration")
    values: dict[str, Any] = {}
    for name, form in _FIELDS.items():
        try:
            values[name] = form(getattr(item, name))
        except (TypeError, ValueError) as error:
            raise ConfigError(
                f"{returned} a migration whose {name} is wrong: {_told(error)}"
            ) from error
    return Migration(**values)


def _flag(value: object) -> bool:
    if not isinstance(value, bool | np.bool_):
        raise TypeError(f"{_kind(value)}, expected True or False")
    return bool(value)


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{_kind(value)}, expected a string")
    if len(value) > MAX_TEXT:
        raise ValueError(f"{len(value)} characters, at most {MAX_TEXT}")
    return value


_FIELDS: Mapping[str, Callable[[Any], object]] = MappingProxyType(
    {
        "tensor_id": operator.index,
        "leave": operator.index,
        "gone": operator.index,
        "back": operator.index,
        "needed": operator.index,
        "tier": Tier,
        "host_bytes": operator.index,
        "clean": _flag,
        "reason": _text,
    }
)


def _told(error: BaseException) -> str:
    return printable(f"{type(error).__name__}: {error}")


def _kind(value: object) -> str:
    return f"something of type {type(value).__name__}"
