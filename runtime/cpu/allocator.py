"""Makes PyTorch take the memory of its large CPU tensors from a pool.

A pool knows which memory is free and touched; the heap, where PyTorch's kernels (convolutions,
attention, everything with `kernels="aot_eager"`) have theirs from otherwise, keeps much of what is
freed. PyTorch's interface for this is in C++: `cpu_allocator.cpp` beside this file is compiled by
the toolchain that Inductor has for its kernels, in two seconds, and kept in Inductor's cache.
"""

import ctypes
import os
import threading
from pathlib import Path
from typing import Protocol

from teraplan.runtime.process import compiled_source, pages
from teraplan.runtime.process.locks import if_free
from teraplan.values.graph_table import MIN_SLOT_BYTES

MIN_BLOCK_BYTES = MIN_SLOT_BYTES
"""Smaller tensors are left to the heap: they do not move."""
UNIT_BYTES = 64 << 10
"""What a pool gives is a multiple of it; of pages, where that would be few units."""

_SOURCE = Path(__file__).with_name("allocator.cpp")

lock = threading.Lock()
"""Of all pools. Who needs it within `take` or `give_back`, as a finalizer may, goes without."""


class Pool(Protocol):
    """Where memory comes from. Both are called with `lock` held.

    What is freed is used again for a tensor of the same size without asking; it comes back when
    the pool wants it (`take_back_now`), or somebody asks how much there is.
    """

    def take(self, nbytes: int) -> int:
        """Address of a block for so many bytes, in whole pages; 0 if there is none to be had."""
        ...

    def give_back(self, address: int) -> None:
        """Nobody uses the block any more, if it was in use."""
        ...


class _Block(ctypes.Structure):
    _fields_ = (("address", ctypes.c_void_p), ("nbytes", ctypes.c_size_t))


class _Allocator:
    """The installed allocator. One per process."""

    def __init__(self) -> None:
        self._library = compiled_source.load(_SOURCE)
        self._library.install.argtypes = (ctypes.c_size_t, ctypes.c_size_t, ctypes.c_size_t)
        self._library.install.restype = self._library.last_returned.restype = ctypes.c_bool
        self._library.serve.argtypes = (ctypes.py_object,)
        self._library.serve.restype = self._library.forget_returned.restype = None
        self._library.num_returned_bytes.restype = ctypes.c_size_t
        self._returned = _Block()
        self._interrupted = False
        """What is in the library's hand may be where it belongs already."""
        self._owners: dict[int, Pool] = {}
        self.pool: Pool | None = None
        if not self._library.install(MIN_BLOCK_BYTES, UNIT_BYTES, pages.PAGE_BYTES):
            raise RuntimeError("PyTorch has another allocator, of a higher priority")
        os.register_at_fork(after_in_child=self._forget)  # the pool is the parent's

    def serve(self, pool: Pool) -> None:
        self.pool = pool
        self._library.serve(self._take)

    def stop(self, pool: Pool) -> None:
        if self.pool is pool:
            self._library.serve(None)
            self.pool = None
        self.take_back()
        self._owners = {a: owner for a, owner in self._owners.items() if owner is not pool}

    def take_back(self) -> None:
        """Give each block that has been freed to its pool, with `lock` held.

        An interrupt may come anywhere: then the block is given once more, to no effect, before
        anything else can have it.
        """
        block, self._interrupted = self._returned, True
        while self._library.last_returned(ctypes.byref(block)):
            owner = self._owners.get(block.address)
            if owner is not None:
                owner.give_back(block.address)
                self._library.forget_returned(ctypes.byref(block))
                self._owners.pop(block.address, None)
            else:
                self._library.forget_returned(ctypes.byref(block))
                pages.release(block.address, block.nbytes)
        self._interrupted = False

    @property
    def num_returned_bytes(self) -> int:
        return int(self._library.num_returned_bytes())

    def _take(self, nbytes: int) -> int | None:
        """Called by PyTorch."""
        found: list[int] = []
        if_free(lock, lambda: found.append(self._taken(nbytes)))
        return found[0] if found else None

    def _taken(self, nbytes: int) -> int:
        pool = self.pool
        if pool is None:
            return 0
        if self._interrupted:
            self.take_back()
        address = pool.take(nbytes)
        if address:
            self._owners[address] = pool
        return address

    def _forget(self) -> None:
        global lock
        lock = threading.Lock()
        self.pool = None
        self._owners.clear()


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
    """`pool` gives nothing any more; what it has given is unmapped when it is freed."""
    if _allocator is not None:
        with lock:
            _allocator.stop(pool)


def take_back() -> None:
    """Give what has been freed to the pools that it is from, unless one is at work."""
    if num_returned_bytes():
        assert _allocator is not None
        if_free(lock, _allocator.take_back)


def take_back_now() -> None:
    """The same for a pool at work, which has the lock."""
    if _allocator is not None:
        _allocator.take_back()


def num_returned_bytes() -> int:
    """Of what has been freed and has not come back to its pool."""
    return _allocator.num_returned_bytes if _allocator is not None else 0
