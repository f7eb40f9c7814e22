"""The C++ of this folder as one library, with the types of what it is called with."""

import ctypes
from functools import cache
from pathlib import Path

from teraplan.runtime.process import compiled_source

_SOURCES = ("page_pool.cpp", "allocator.cpp")


class CPiece(ctypes.Structure):
    """A `Piece` of memory."""

    _fields_ = (
        ("address", ctypes.c_size_t),
        ("nbytes", ctypes.c_size_t),
        ("mapping", ctypes.c_size_t),
    )


class CCounts(ctypes.Structure):
    """Bytes of one pool."""

    _fields_ = (
        ("in_use", ctypes.c_size_t),
        ("waiting", ctypes.c_size_t),
        ("most_in_use", ctypes.c_size_t),
    )


_Pool, _Size, _Bool = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_bool
_Pieces = ctypes.POINTER(CPiece)
_SIGNATURES = {
    "new_pool": (_Pool,),
    "counts_of": (ctypes.POINTER(CCounts), _Pool),
    "take_block": (_Size, _Pool, _Size),
    "free_block": (_Bool, _Size),
    "owns_block": (_Bool, _Pool, _Size),
    "join_free": (None, _Pool),
    "add_block": (None, _Pool, _Pieces, _Size, _Bool),
    "add_piece": (None, _Pool, _Pieces, _Bool),
    "take_piece": (_Size, _Pool, _Size),
    "cut_off": (_Pieces, _Pool, _Size, _Bool, ctypes.POINTER(ctypes.c_size_t)),
    "take_huge": (_Pieces, _Pool, _Size, ctypes.POINTER(ctypes.c_size_t)),
    "lower_most": (None, _Pool, _Size),
    "forget_taken": (None, _Pool),
    "install": (_Bool, _Size, _Size),
    "serve": (None, _Pool, ctypes.py_object),
}
"""What each function returns, and takes."""


@cache
def library() -> ctypes.PyDLL:
    """Compiled at the first call; it fails as a compiler does."""
    here = Path(__file__)
    loaded = compiled_source.load(*(here.with_name(name) for name in _SOURCES))
    compiled_source.declare(loaded, _SIGNATURES)
    return loaded
