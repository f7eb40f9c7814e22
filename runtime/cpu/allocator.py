"""Makes PyTorch take the memory of its large CPU tensors from a pool.

A pool knows which memory is free and touched; the heap, where PyTorch's kernels (convolutions,
attention, everything with `kernels="aot_eager"`) have theirs from otherwise, keeps much of what is
freed. PyTorch's interface for this is in C++, and so is what serves most tensors: `page_pool.cpp`
and `allocator.cpp` beside this file are compiled by the toolchain that Inductor has for its
kernels, in some seconds, and kept in Inductor's cache.
"""

import os
import threading
from typing import Protocol

from teraplan.runtime.cpu import native
from teraplan.runtime.process.locks import if_free
from teraplan.values.graph_table import MIN_SLOT_BYTES

MIN_BLOCK_BYTES = MIN_SLOT_BYTES
"""Smaller tensors are left to the heap: they do not move."""
UNIT_BYTES = 64 << 10
"""What a pool gives is a multiple of it; of pages, where that would be few units."""

lock = threading.Lock()
"""Of what pools do in Python. Who needs it within `make`, as a finalizer may, goes without."""


class Pool(Protocol):
    """Where memory comes from."""

    @property
    def handle(self) -> int:
        """The pool in the library."""
        ...

    def make(self, nbytes: int) -> bool:
        """Let there be a block of `nbytes`, whole pages, since nothing free is so long.

        Called with `lock` held. False: there is no memory.
        """
        ...


class _Allocator:
    """The installed allocator. One per process."""

    def __init__(self) -> None:
        self._library = native.library()
        self.pool: Pool | None = None
        if not self._library.install(MIN_BLOCK_BYTES, UNIT_BYTES):
            raise RuntimeError("PyTorch has another allocator, of a higher priority")
        os.register_at_fork(after_in_child=self._forget)  # the pool is the parent's

    def serve(self, pool: Pool | None) -> None:
        self.pool = pool
        self._library.serve(None if pool is None else pool.handle, self._make)

    def _make(self, nbytes: int) -> bool:
        """Called by PyTorch."""
        pool, made = self.pool, list[bool]()
        if pool is not None:
            if_free(lock, lambda: made.append(pool.make(nbytes)))
        return made == [True]

    def _forget(self) -> None:
        global lock
        lock = threading.Lock()
        self.pool = None


_allocator: _Allocator | None = None
_failure = ""


def install() -> str:
    """Make a pool possible; why not, if that cannot be. Until one serves all is as it was."""
    global _allocator, _failure
    if _allocator is None and not _failure:
        try:
            _allocator = _Allocator()
        except Exception as error:  # noqa: BLE001  whatever a compiler can have
            _failure = f"{type(error).__name__}: {error}"
    return _failure


def serve(pool: Pool) -> str:
    """From now on the memory of large CPU tensors is from `pool`; why not, if that cannot be."""
    refusal = install()
    if _allocator is not None and _allocator.pool is not pool:
        _allocator.serve(pool)
    return refusal


def stop(pool: Pool) -> None:
    """`pool` gives nothing any more."""
    if _allocator is not None and _allocator.pool is pool:
        _allocator.serve(None)
