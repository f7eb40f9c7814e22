"""What a plan moves, without a plan: as many bytes to a file and back beside each step.

A thread writes and reads in large aligned pieces past the page cache, spread over as long as the
step before took. What plain steps beside it lose is what the disk takes from them anyway.
"""

import mmap
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from teraplan.runtime.storage import default_directory
from teraplan.units import MIB

_PIECE_BYTES = 8 * MIB
_FILE_PIECES = 64


class DiskLoad:
    """`nbytes` out and as many back within each step."""

    def __init__(self, nbytes: int) -> None:
        self._num_pieces = nbytes // _PIECE_BYTES
        self._out, self._back = (mmap.mmap(-1, _PIECE_BYTES) for _ in range(2))
        self._out.write(os.urandom(_PIECE_BYTES))
        flags = os.O_RDWR | os.O_TMPFILE | os.O_DIRECT
        self._file = os.open(default_directory(), flags, 0o600)
        self._step_s = 0.0
        for place in range(_FILE_PIECES):
            os.pwritev(self._file, [self._out], place * _PIECE_BYTES)

    @contextmanager
    def beside_step(self) -> Iterator[None]:
        """Within this they move, the first time all at once; it ends when they have moved."""
        began_s = time.perf_counter()
        thread = threading.Thread(target=self._move, args=(began_s, self._step_s))
        thread.start()
        yield
        self._step_s = time.perf_counter() - began_s
        thread.join()

    def _move(self, began_s: float, step_s: float) -> None:
        for number in range(self._num_pieces):
            due_s = began_s + step_s * number / self._num_pieces
            time.sleep(max(0.0, due_s - time.perf_counter()))
            offset = number % _FILE_PIECES * _PIECE_BYTES
            os.pwritev(self._file, [self._out], offset)
            os.preadv(self._file, [self._back], offset)
