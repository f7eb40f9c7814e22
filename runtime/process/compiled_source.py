"""C++ for what PyTorch has no interface to in Python, compiled where it runs.

By the toolchain that Inductor has for its kernels, in some seconds, and kept in Inductor's cache.
"""

import ctypes
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch._inductor.codecache import CppCodeCache


def load(*sources: Path) -> ctypes.PyDLL:
    """The library made of files, as one text; calls keep Python's lock: they are to be short."""
    torch_lib = Path(torch.__path__[0]) / "lib" / "libc10.so"
    ctypes.CDLL(str(torch_lib), mode=ctypes.RTLD_GLOBAL)  # the symbols that the sources need
    compiled: Any = CppCodeCache.load("\n".join(source.read_text() for source in sources))
    return ctypes.PyDLL(compiled._name)


def declare(library: ctypes.CDLL, signatures: Mapping[str, tuple[Any, ...]]) -> None:
    """Say of each function by its name what it returns, and then what it takes."""
    for name, (result, *arguments) in signatures.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
