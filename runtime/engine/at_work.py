"""While an op of the engine runs, nothing else changes what is saved."""

from collections.abc import Callable
from functools import wraps
from typing import TYPE_CHECKING, Concatenate, ParamSpec, TypeVar

if TYPE_CHECKING:
    from teraplan.runtime.engine.engine import Engine

_P = ParamSpec("_P")
_R = TypeVar("_R")


def at_work(
    op: Callable[Concatenate["Engine", _P], _R],
) -> Callable[Concatenate["Engine", _P], _R]:
    """`op` with the engine's lock held; then tokens that are gone meanwhile are forgotten.

    The lock's own `with`, since an interrupt can come between taking a lock and entering the block
    of any context manager that is written in Python.
    """

    @wraps(op)
    def run(engine: "Engine", /, *args: _P.args, **kwargs: _P.kwargs) -> _R:
        with engine.lock:
            result = op(engine, *args, **kwargs)
        if engine.released:
            engine.forget_released()
        return result

    return run
