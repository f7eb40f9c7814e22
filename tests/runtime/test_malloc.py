"""One allocator for all sessions of the process."""

import ctypes

from teraplan.runtime import process_memory
from teraplan.runtime.malloc import Malloc
from teraplan.units import MIB


def on_heap(nbytes: int) -> bool:
    """Where the allocator puts a block of this size now."""
    library = ctypes.CDLL(None)
    library.malloc.restype, library.free.argtypes = ctypes.c_void_p, (ctypes.c_void_p,)
    block: int = library.malloc(ctypes.c_size_t(nbytes))
    start, heap_bytes = process_memory.heap_range()
    library.free(block)
    return start <= block < start + heap_bytes


def test_large_blocks_are_mapped_as_long_as_one_session_wants_it() -> None:
    first, second = Malloc(), Malloc()
    first.keep_for_reuse()
    assert on_heap(8 * MIB)
    first.map_large()
    first.plug_holes()
    second.keep_for_reuse()
    assert not on_heap(8 * MIB)
    second.map_large()
    second.plug_holes()
    first.keep_for_reuse()
    assert not on_heap(8 * MIB)
    second.keep_for_reuse()
    assert on_heap(8 * MIB)


def test_a_session_that_is_gone_wants_nothing() -> None:
    gone = Malloc()
    gone.map_large()
    gone.plug_holes()
    assert not on_heap(8 * MIB)
    del gone
    Malloc().keep_for_reuse()
    assert on_heap(8 * MIB)
