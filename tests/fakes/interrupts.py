"""An interrupt before a given line of our code."""

import sys
from types import CodeType, FrameType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from _typeshed import TraceFunction


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
        if event == "line":
            self.num_lines += 1
            if self.num_lines == self._at:
                sys.settrace(None)
                raise KeyboardInterrupt
        elif event == "return" and frame is self._frame:
            self._frame = None
        return self._line
