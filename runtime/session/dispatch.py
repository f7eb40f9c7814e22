"""Binds the migration ops to the session whose graph is running.

A forward op finds its session through this thread's stack of running graph calls; a backward op,
which autograd calls with nothing around it, through its token.
"""

import functools
import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from teraplan import ops
from teraplan.runtime.compiled.compiled_memory import with_compiled_memory
from teraplan.runtime.engine.engine import Engine
from teraplan.runtime.engine.tokens import owner_of
from teraplan.runtime.state.memory.training_state import TrainingState
from teraplan.values.graph_table import GraphTable

if TYPE_CHECKING:
    from teraplan.runtime.session.session import Session


_MAX_SIZES = 256
"""So many tables of calls with different sizes are kept."""


@dataclass(slots=True)
class _Call:
    """A graph call that is running on this thread."""

    session: "Session"
    shapes: tuple[object, ...]
    table: GraphTable | None = None
    number: int = -1


parse_table = functools.lru_cache(maxsize=None)(GraphTable.from_json)
"""Tables are read at every call of their graph."""


@functools.lru_cache(maxsize=_MAX_SIZES)
def _table_at(table: str, sizes: tuple[int, ...], fused: bool) -> GraphTable:
    found = parse_table(table).at(sizes)
    return with_compiled_memory(found, table) if fused else found


class _Running(threading.local):
    call: _Call | None = None
    state: "weakref.ref[TrainingState] | None" = None
    """Of the graph that was entered last."""


_running = _Running()
_OUTSIDE = "a migration op ran outside of a teraplan graph"


@contextmanager
def running(session: "Session", shapes: tuple[object, ...]) -> Iterator[None]:
    """Within this, forward ops belong to `session`; `shapes` tells its input sizes apart."""
    outer = _running.call
    _running.call = _Call(session, shapes)
    try:
        yield
    finally:
        _running.call = outer


def _chain(anchor: torch.Tensor) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=anchor.device)


def _enter(anchor: torch.Tensor, table: str, sizes: Sequence[int]) -> torch.Tensor:
    call = _running.call
    assert call is not None, _OUTSIDE
    call.table = _table_at(table, tuple(sizes), call.session.config.kernels == "inductor")
    state = call.session.engine.training_state
    if state is not None:
        state.arena.user_may_have_run()  # at this graph's first site things may leave
    call.number = call.session.enter_forward(call.table, call.shapes)
    # Afterwards: what is to leave in a step follows from the memory that the state gets for it.
    _enter_training_state(call.session.engine.training_state, in_step=True)
    return _chain(anchor)


def _enter_backward(anchor: torch.Tensor, token: torch.Tensor, table: str) -> torch.Tensor:
    engine, key = owner_of(token)
    assert isinstance(engine, Engine)
    _enter_training_state(engine.training_state, in_step=True)
    engine.enter_backward(key)
    return _chain(anchor)


def _save(
    x: torch.Tensor, chain: torch.Tensor, slot: int, beside: Sequence[torch.Tensor]
) -> torch.Tensor:
    call = _running.call
    assert call is not None, _OUTSIDE
    assert call.table is not None, "save before enter"
    return call.session.engine.save(x, call.table, call.number, slot, beside)


def _need(
    chain: torch.Tensor,
    token: torch.Tensor,
    slot: int,
    size: Sequence[int],
    stride: Sequence[int],
    dtype: torch.dtype,
) -> torch.Tensor:
    engine, key = owner_of(token)
    assert isinstance(engine, Engine)
    try:
        return engine.need(key, size, stride, dtype)
    except Exception as error:
        _explain(engine.training_state, error)
        raise


def _done(x: torch.Tensor, token: torch.Tensor, chain: torch.Tensor, slot: int) -> None:
    engine, key = owner_of(token)
    assert isinstance(engine, Engine)
    engine.done(key)


def _enter_training_state(state: TrainingState | None, *, in_step: bool) -> None:
    _running.state = weakref.ref(state) if state is not None else None
    if state is not None:
        state.in_step = in_step
        state.enter()


def _enter_state(anchor: torch.Tensor) -> torch.Tensor:
    """A graph that saves nothing which moves: of a backward, the only state there is is its."""
    if _running.call is not None:
        state = _running.call.session.engine.training_state
    else:
        alive = TrainingState.all_alive()
        state = alive[0] if len(alive) == 1 else None
    _enter_training_state(state, in_step=False)
    return _chain(anchor)


def _state() -> TrainingState | None:
    return _running.state() if _running.state is not None else None


def _acquire(parameter: torch.Tensor, chain: torch.Tensor, changes: bool = False) -> None:
    state = _state()
    if state is None:
        return
    try:
        state.acquire(parameter, changes=changes)
    except Exception as error:
        _explain(state, error)
        raise


def _release(parameter: torch.Tensor, chain: torch.Tensor) -> None:
    state = _state()
    if state is not None:
        state.release(parameter)


def _settle(
    gradient: torch.Tensor, chain: torch.Tensor, parameter: torch.Tensor | None = None
) -> torch.Tensor:
    state = _state()
    if state is None:
        return gradient
    try:
        return state.settle(gradient, parameter)
    except Exception as error:
        _explain(state, error)
        raise


def _explain(state: TrainingState | None, error: Exception) -> None:
    """Note at an error what the step has done by then."""
    if state is not None and state.at_gradients is not None:
        state.at_gradients.explain(error)


for _name, _kernel in (
    ("enter", _enter),
    ("enter_backward", _enter_backward),
    ("save", _save),
    ("need", _need),
    ("done", _done),
    ("enter_state", _enter_state),
    ("acquire", _acquire),
    ("release", _release),
    ("settle", _settle),
):
    ops.bind(_name, _kernel)
