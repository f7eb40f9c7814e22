"""Keeps what user code touches of tensors that are away from filling memory.

Reading all gradients to clip them, or all weights to average them, maps page after page of the
spill file into this process. A thread looks at how much has come and takes it out again.
"""

import os
import threading
import weakref
from contextlib import suppress
from typing import TYPE_CHECKING

from teraplan.runtime.process import pages, process_memory
from teraplan.runtime.process.threads import start_thread

if TYPE_CHECKING:
    from teraplan.runtime.cpu.page_memory import PageMemory

_PERIOD_S, _PERIOD_WHILE_TOUCHED_S = 0.01, 0.001
"""In the longer one some 20 MB can come."""
_MOST_ALLOWED_BYTES, _LEAST_ALLOWED_BYTES = 32 << 20, 2 << 20
_ALLOWED_FRACTION = 1 / 8
"""Of what the state may take: so much may be touched before anything is done about it."""


class Trimmer:
    """The thread; ends with its memory or with `close`."""

    def __init__(self, memory: "PageMemory") -> None:
        self._closed, self._memory = threading.Event(), weakref.ref(memory)
        self._thread = threading.Thread(
            target=_run, args=(self._memory, self._closed), name="teraplan-trim", daemon=True
        )
        start_thread(self._thread)

    def drop_all(self) -> None:
        """Take out of memory now what has been touched."""
        memory = self._memory()
        if memory is not None:
            _drop_touched(memory, None)

    def close(self) -> None:
        """End the thread."""
        self._closed.set()
        if threading.current_thread() is not self._thread:
            self._thread.join()


def _run(reference: "weakref.ref[PageMemory]", closed: threading.Event) -> None:
    before = usual = process_memory.mapped_file_bytes()
    period_s = _PERIOD_S
    while not closed.wait(period_s):
        now = process_memory.mapped_file_bytes()
        period_s = _PERIOD_WHILE_TOUCHED_S if now > before else _PERIOD_S
        before, usual = now, min(usual, now)
        if now - usual <= _LEAST_ALLOWED_BYTES:
            continue
        memory = reference()
        if memory is None:
            return
        if now - usual > _allowed_bytes(memory.limit_bytes):
            _drop_touched(memory, now - usual)
            before = usual = process_memory.mapped_file_bytes()
        del memory


def _allowed_bytes(limit_bytes: int) -> int:
    part = int(limit_bytes * _ALLOWED_FRACTION)
    return min(max(part, _LEAST_ALLOWED_BYTES), _MOST_ALLOWED_BYTES)


def _drop_touched(memory: "PageMemory", nbytes: int | None) -> None:
    """Take what user code has touched of blocks that are away out of memory again.

    Looks for about `nbytes`, or for all, first where such bytes were found the last time: whoever
    reads all of the state reads it in order.
    """
    with memory.lock:
        for _ in range(len(memory.shown)):
            block = next(iter(memory.shown))
            found = pages.touched_bytes(block.address, block.nbytes)
            if found:
                block.touched = True
                pages.drop_mapped(block.address, block.nbytes)
                with suppress(OSError):  # closed, at exit or by a collection in this very thread
                    for fd, offset, length in memory.pieces(block):
                        os.posix_fadvise(fd, offset, length, os.POSIX_FADV_DONTNEED)
                if nbytes is not None:
                    nbytes -= found
                    if nbytes <= 0:
                        return
            memory.shown.move_to_end(block)
