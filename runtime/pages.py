"""Memory by the page, straight from the kernel: mapped, moved to another address, given back.

Moving takes the page tables along and leaves the bytes where they are in memory: a page that has
been touched once need not be cleared by the kernel again (0.25 us per KiB on the machine where it
was tried; a step under a budget of 50 % had 550 MiB of blocks mapped anew, for 7 % of its time).
"""

import ctypes
import mmap
import os
from collections.abc import Iterable

HUGE_PAGE_BYTES = 2 << 20

_MAP_FIXED, _MAP_NORESERVE = 0x10, 0x4000
_MREMAP_MAYMOVE, _MREMAP_FIXED = 1, 2
_MADV_COLLAPSE = 25
_FAILED = ctypes.c_void_p(-1).value
_READ_WRITE = mmap.PROT_READ | mmap.PROT_WRITE
_PRIVATE = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE

# With the GIL held: the calls take microseconds, and to wait for the GIL again may take longer.
_libc = ctypes.PyDLL(None, use_errno=True)
_libc.mmap.restype = _libc.mremap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_long,
)
_libc.mremap.argtypes = (
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_void_p,
)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def map_pages(nbytes: int) -> int:
    """The address of `nbytes` bytes of private memory that nothing has touched.

    Where a huge page fits, the address is a multiple of one, and huge pages are asked for.

    Raises:
        MemoryError: the kernel refuses.
    """
    if nbytes < HUGE_PAGE_BYTES:
        return _map(None, nbytes, 0)
    start = _map(None, nbytes + HUGE_PAGE_BYTES, 0)
    address = -(-start // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
    if address > start:
        unmap_pages(start, address - start)
    unmap_pages(address + nbytes, start + HUGE_PAGE_BYTES - address)
    _libc.madvise(address, nbytes, mmap.MADV_HUGEPAGE)
    return address


def move_pages(source: int, target: int, nbytes: int) -> None:
    """What is mapped at `source` is mapped at `target` instead, where it replaces what was there.

    Where the kernel refuses (too many mappings), `target` has untouched memory and `source` none:
    the bytes are lost in either case as far as the caller may assume.
    """
    moved = _libc.mremap(source, nbytes, nbytes, _MREMAP_MAYMOVE | _MREMAP_FIXED, target)
    if moved == _FAILED:
        _map(target, nbytes, _MAP_FIXED)
        unmap_pages(source, nbytes)


def unmap_pages(address: int, nbytes: int) -> None:
    """Give memory back to the system."""
    _libc.munmap(address, nbytes)


def use_huge_pages(ranges: Iterable[tuple[int, int]]) -> None:
    """Put what lies in `ranges` of (address, bytes) on huge pages, where whole ones fit.

    Ranges that follow each other closely, as tensors on the heap do, count as one. What is touched
    there for the first time later gets huge pages, too. A kernel that cannot do it (before Linux
    6.1), or has no huge page free, leaves the memory as it is.
    """
    for start, end in _merged(ranges):
        start = -(-start // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
        nbytes = end // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES - start
        if nbytes > 0:
            _libc.madvise(start, nbytes, mmap.MADV_HUGEPAGE)
            _libc.madvise(start, nbytes, _MADV_COLLAPSE)


def _merged(ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """(start, end) of ranges joined over gaps of less than a page."""
    merged: list[tuple[int, int]] = []
    for address, nbytes in sorted(ranges):
        if merged and address - merged[-1][1] < mmap.PAGESIZE:
            merged[-1] = (merged[-1][0], max(merged[-1][1], address + nbytes))
        else:
            merged.append((address, address + nbytes))
    return merged


def _map(address: int | None, nbytes: int, flags: int) -> int:
    mapped = _libc.mmap(address, nbytes, _READ_WRITE, _PRIVATE | flags, -1, 0)
    if mapped == _FAILED or mapped is None:
        why = os.strerror(ctypes.get_errno())
        raise MemoryError(f"mapping {nbytes} bytes of memory failed: {why}")
    return int(mapped)
