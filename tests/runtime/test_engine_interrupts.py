"""An interrupt (Ctrl-C) inside of the engine's own code never leaves its lock taken.

Also while somebody keeps the exception, and with it every frame that it came through.
"""

import dis
import sys
from collections.abc import Callable
from types import FrameType, SimpleNamespace
from typing import TYPE_CHECKING, cast

import pytest

from teraplan.runtime.device import Device
from teraplan.runtime.engine import at_work as at_work_module
from teraplan.runtime.engine import engine as engine_module
from teraplan.runtime.engine.at_work import at_work
from teraplan.runtime.engine.engine import Engine
from teraplan.runtime.engine.saved import View
from teraplan.runtime.process import locks

if TYPE_CHECKING:
    from _typeshed import TraceFunction

FILES = (
    str(engine_module.__file__),
    str(at_work_module.__file__),
    str(locks.__file__),
    "contextlib.py",
)
CHECKED_AFTER = {"RESUME", "CALL", "CALL_FUNCTION_EX", "JUMP_BACKWARD"}
"""Instructions after which the interpreter looks for signals."""


class _Interrupt:
    """Raises KeyboardInterrupt where the interpreter looks for signals for the `at`-th time."""

    def __init__(self, at: int) -> None:
        self._left = at
        self._last: dict[FrameType, int] = {}

    @property
    def came(self) -> bool:
        return self._left <= 0

    def __enter__(self) -> None:
        sys.settrace(self._trace)

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)

    def _trace(self, frame: FrameType, event: str, argument: object) -> "TraceFunction | None":
        if not frame.f_code.co_filename.endswith(FILES):
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            last, self._last[frame] = self._last.get(frame), frame.f_lasti
            if last is not None and dis.opname[frame.f_code.co_code[last]] in CHECKED_AFTER:
                self._left -= 1
                if self._left == 0:
                    raise KeyboardInterrupt
        return self._trace


def _forget(engine: Engine) -> None:
    saved = SimpleNamespace(tokens=3)
    for key in (1, 2):
        engine._views[key] = cast("View", SimpleNamespace(saved=saved))
    engine.release(1)
    engine.release(2)
    assert not engine._views


def _work(engine: Engine) -> None:
    engine.released.append(3)
    at_work(lambda _: None)(engine)


@pytest.mark.parametrize("use", [_forget, _work])
def test_the_lock_is_free_after_an_interrupt_anywhere(use: Callable[[Engine], None]) -> None:
    kept: list[BaseException] = []
    for at in range(1, 1000):
        engine, interrupt = Engine(cast("Device", None)), _Interrupt(at)
        try:
            with interrupt:
                use(engine)
        except KeyboardInterrupt as error:
            kept.append(error)
        assert not engine.lock.locked(), f"after interrupt {at}"
        if not interrupt.came:
            break
    assert len(kept) > 5
