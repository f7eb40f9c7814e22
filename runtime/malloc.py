"""How glibc's allocator treats freed memory: kept for the next tensor, or given back to the system.

On a CPU device the device tier is this process's memory, so what `free` does decides what a plan
achieves. Blocks of up to 32 MiB (glibc's maximum) come from the heap, and the heap is never trimmed
by itself: the memory that one tensor leaves is where the next one goes, already touched. First
touch costs a fault per page; with glibc's defaults, which trim and fault in every step, a step of a
26 M parameter GPT took 2 % longer, and 11 % longer where every block was a mapping of its own.

But torch asks for aligned memory, and glibc (2.36) looks for a hole that is larger by the alignment
than what it then takes: a hole is never reused for the same size unless its neighbours are free,
too. AdamW's temporaries for parameters of 4 to 16 MiB, small tensors between them, made the heap
grow by 960 MiB for each 720 MiB of parameters, step after step, with 32 MiB in use at once; as
mappings of their own they took 37 MiB and were 18 % faster. So where memory is to be kept to while
such tensors come and go, `map_large` leaves only small ones on the heap. A hole that is there
already would still be used first: `plug_holes` gives each a plug, which is never touched and so
takes no memory. Tensors that stay are mappings, too: between them, what comes and goes would leave
holes (first Adam step of an 8-layer GPT-2: 37 MiB).

To measure what is in use, `trim` gives all free pages back at once.
"""

import ctypes
import logging
import weakref

from teraplan.runtime import process_memory

log = logging.getLogger(__name__)

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_NEVER_TRIM = 2**31 - 1
_LARGEST_HEAP_BLOCK = 32 << 20
_LARGEST_SMALL_BLOCK = 256 << 10


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
    """The process's allocator; does nothing where it is not glibc's.

    Each session has one, and all share the allocator: large blocks are mappings as long as one
    session wants them to be.
    """

    def __init__(self) -> None:
        library = ctypes.CDLL(None)
        self.available = hasattr(library, "mallopt") and hasattr(library, "mallinfo2")
        self._library = library
        if self.available:
            library.mallinfo2.restype = _MallInfo
            library.malloc.argtypes, library.malloc.restype = (ctypes.c_size_t,), ctypes.c_void_p
            library.free.argtypes, library.free.restype = (ctypes.c_void_p,), None
        if not self.available:
            log.warning("the C library is not glibc: peak memory may exceed what a plan predicts")

    def keep_for_reuse(self) -> None:
        """Make freed blocks of up to 32 MiB stay in the process, if no session objects."""
        _mapping.discard(self)
        if _mapping:
            return
        self._set(_M_MMAP_THRESHOLD, _LARGEST_HEAP_BLOCK)
        self._set(_M_TRIM_THRESHOLD, _NEVER_TRIM)

    def map_large(self) -> None:
        """Make blocks of more than 256 KiB mappings of their own, which end when they are freed.

        But for those that fit into a hole which the heap has already.
        """
        if self in _mapping:
            return
        _mapping.add(self)
        self._set(_M_MMAP_THRESHOLD, _LARGEST_SMALL_BLOCK)
        self.trim()  # the heap's end, too, would be used first

    def plug_holes(self) -> None:
        """Take each hole of the heap in which a large block would fit, for good."""
        self.trim()
        if not self.available:
            return
        start, nbytes = process_memory.heap_range()
        size = _LARGEST_HEAP_BLOCK
        while size > _LARGEST_SMALL_BLOCK:
            plug = self._library.malloc(size)
            if not start <= (plug or 0) < start + nbytes:  # there is no such hole
                self._library.free(plug)
                size //= 2

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


_mapping: weakref.WeakSet[Malloc] = weakref.WeakSet()
"""Those that want large blocks to be mappings."""
