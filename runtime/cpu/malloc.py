"""How glibc's allocator treats freed memory: kept for its next use, until it is told to let go.

On a CPU device the device tier is this process's memory, so what `free` does decides what a plan
achieves. Large tensors have a pool of their own (`pool.py`); the heap has the small ones, and
what kernels need for themselves. It is never trimmed by itself: with glibc's defaults, which trim
and fault in every step, a step of a 26 M parameter GPT took 2 % longer. `trim` gives all free pages
back at once, where memory is short or what is in use is to be measured.

For large tensors it is no place: torch asks for aligned memory, and glibc (2.36) looks for a hole
that is larger by the alignment than what it then takes, so a hole is never used for the same size
again unless its neighbours are free, too. AdamW's temporaries for parameters of 4 to 16 MiB, small
tensors between them, made the heap grow by 960 MiB for each 720 MiB of parameters, step after step.
"""

import ctypes
import logging

log = logging.getLogger(__name__)

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_NEVER_TRIM = 2**31 - 1
_LARGEST_HEAP_BLOCK = 32 << 20


class _MallInfo(ctypes.Structure):
    """`struct mallinfo2` of <malloc.h>."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in (
            "arena",
            "ordblks",
            "smblks",
            "hblks",
            "hblkhd",
            "usmblks",
            "fsmblks",
            "uordblks",
            "fordblks",
            "keepcost",
        )
    )


class Malloc:
    """The process's allocator; does nothing where it is not glibc's."""

    def __init__(self) -> None:
        library = ctypes.CDLL(None)
        self.available = hasattr(library, "mallopt") and hasattr(library, "mallinfo2")
        self._library = library
        if self.available:
            library.mallinfo2.restype = _MallInfo
        if not self.available:
            log.warning("the C library is not glibc: peak memory may exceed what a plan predicts")

    def keep_for_reuse(self) -> None:
        """Make freed blocks of up to 32 MiB stay in the process."""
        self._set(_M_MMAP_THRESHOLD, _LARGEST_HEAP_BLOCK)
        self._set(_M_TRIM_THRESHOLD, _NEVER_TRIM)

    def trim(self) -> None:
        """Give all free pages of the heap back to the system."""
        if self.available:
            self._library.malloc_trim(0)

    def in_use_bytes(self) -> int:
        """Bytes that have been asked for and not been freed, touched or not."""
        if not self.available:
            return 0
        info = self._library.mallinfo2()
        return int(info.uordblks + info.hblkhd)

    def _set(self, parameter: int, value: int) -> None:
        if self.available:
            self._library.mallopt(parameter, value)
