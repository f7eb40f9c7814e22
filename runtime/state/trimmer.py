"""Keeps what user code touches of tensors that are away from filling memory.

Reading all gradients to clip them, or all weights to average them, maps page after page of the
spill file into this process. A thread looks at how much has come and takes it out again.
"""

import threading
import weakref

from teraplan.runtime import process_memory
from teraplan.runtime.state.arena import StateArena

_PERIOD_S = 0.01
_ALLOWED_BYTES = 32 << 20
"""So much may be touched before anything is done about it."""


class Trimmer:
    """The thread; ends with its arena or with `close`."""

    def __init__(self, arena: StateArena) -> None:
        self._closed = threading.Event()
        self._thread = threading.Thread(
            target=_run, args=(weakref.ref(arena), self._closed), name="teraplan-trim", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """End the thread."""
        self._closed.set()
        if threading.current_thread() is not self._thread:
            self._thread.join()


def _run(reference: "weakref.ref[StateArena]", closed: threading.Event) -> None:
    usual = process_memory.mapped_file_bytes()
    while not closed.wait(_PERIOD_S):
        now = process_memory.mapped_file_bytes()
        usual = min(usual, now)
        if now - usual <= _ALLOWED_BYTES:
            continue
        arena = reference()
        if arena is None:
            return
        arena.drop_touched(now - usual)
        del arena
        usual = process_memory.mapped_file_bytes()
