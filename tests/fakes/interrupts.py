"""An interrupt before a given line of our code, where one could come.

Python looks for signals at the end of calls and at jumps back. A trace function can raise in other
places, too: where a `with` is left, before its lock is released (the line of the `with` comes once
more there), and where `if_free` has done its work and releases the lock.
"""

import sys
from functools import cache
from types import CodeType, FrameType
from typing import TYPE_CHECKING

from teraplan.runtime.process.locks import if_free

if TYPE_CHECKING:
    from _typeshed import TraceFunction


@cache
def _first_instructions(code: CodeType) -> frozenset[int]:
    """Of each line of the code, where it begins."""
    starts: dict[int, int] = {}
    for start, _, line in code.co_lines():
        if line is not None:
            starts[line] = min(start, starts.get(line, start))
    return frozenset(starts.values())


def _begins_line(frame: FrameType) -> bool:
    if frame.f_code is if_free.__code__:
        return False
    return frame.f_lasti in _first_instructions(frame.f_code)


class InterruptAt:
    """Raises KeyboardInterrupt before the `at`-th line that runs in some files, once.

    It counts over all blocks that it is entered for. 0 only counts.
    """

    def __init__(self, at: int, *files: str, within: CodeType | None = None) -> None:
        """An interrupt to come.

        Args:
            at: number of the line, from 1 on.
            files: how the names of files begin whose lines count.
            within: only lines that run while this function does.
        """
        self.num_lines, self._at = 0, at
        self._files, self._within = files, within
        self._frame: FrameType | None = None

    def __enter__(self) -> "InterruptAt":
        if not self.has_come:
            sys.settrace(self._call)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)

    @property
    def has_come(self) -> bool:
        """True once it was raised."""
        return 0 < self._at <= self.num_lines

    def _call(self, frame: FrameType, event: str, arg: object) -> "TraceFunction | None":
        if frame.f_code is self._within:
            self._frame = frame
        counts = self._within is None or self._frame is not None
        return self._line if counts and frame.f_code.co_filename.startswith(self._files) else None

    def _line(self, frame: FrameType, event: str, arg: object) -> "TraceFunction | None":
        if event == "line" and _begins_line(frame):
            self.num_lines += 1
            if self.num_lines == self._at:
                sys.settrace(None)
                raise KeyboardInterrupt
        elif event == "return" and frame is self._frame:
            self._frame = None
        return self._line
