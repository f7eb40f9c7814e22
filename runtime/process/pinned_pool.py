"""Host memory for copies to and from a device: exactly as much as asked for, pinned where possible.

    limit_bytes = slab | slab | slab | last slab       each one mapping, registered as a whole
                  [lease][free][lease...]              best fit; neighbours that are free merge

PyTorch's own pinned allocator rounds every block up to a power of two and keeps it for its size;
here a 33 MiB tensor takes 33 MiB. A lease is returned by its end: whoever still needs the bytes (a
copy under way, a write to disk) refers to it. Slabs are page aligned, so that direct I/O reaches
them without copies, and are not inherited by forked processes: registered pages would be copied.
"""

import ctypes
import mmap
import os
import threading
import time
import weakref
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from teraplan.runtime.process.locks import if_free
from teraplan.units import MIB, format_nbytes

PAGE_BYTES = 4096
SLAB_BYTES = 256 * MIB

Pin = Callable[[int, int], str]
"""Registers host memory [address, +nbytes) with the device; "" or the reason why it could not."""
Unpin = Callable[[int], None]


@dataclass(frozen=True, slots=True)
class Part:
    """One contiguous piece of a lease."""

    tensor: torch.Tensor
    """(nbytes,), uint8; a view of the slab. Whoever holds it only does not hold the lease."""
    address: int
    nbytes: int


class Lease:
    """Memory of a pool, in one part or several. Its end returns it; safe in any thread.

    A weak reference to it is dead before that. While the `__del__` of an object runs, weak
    references still give the object out, so it is `_end` that has one, and not the lease.
    """

    __slots__ = ("__weakref__", "_end", "nbytes", "parts")

    def __init__(
        self, pool: "PinnedPool", ranges: tuple["_Range", ...], nbytes: int, *, is_shown: bool
    ) -> None:
        self._end, self.nbytes = _End(pool, _Returned(ranges, is_shown)), nbytes
        parts = []
        for slab, offset, taken in ranges:
            length = min(taken, nbytes)
            tensor = slab.tensor.narrow(0, offset, length)
            parts.append(Part(tensor, slab.address + offset, length))
            nbytes -= length
        self.parts = tuple(parts)


class _End:
    """Ends with the lease that has it, and returns what that had."""

    __slots__ = ("_pool", "_returned")

    def __init__(self, pool: "PinnedPool", returned: "_Returned") -> None:
        self._pool, self._returned = pool, returned

    def __del__(self) -> None:
        self._pool._give_back(self._returned)


@dataclass(slots=True, eq=False)
class _Slab:
    """One mapping. `free` are its free stretches as offset and length, in order, never adjacent."""

    memory: mmap.mmap
    tensor: torch.Tensor
    address: int
    nbytes: int
    pinned: bool
    num_shown: int = 0
    """Leases of it that kernels may use at any time."""
    is_closed: bool = False
    """To be unregistered when there are none."""
    free: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])

    def cut(self, offset: int, nbytes: int) -> None:
        """Take a part of a free stretch."""
        index = bisect_left(self.free, (offset + 1, 0)) - 1
        start, length = self.free[index]
        end = start + length
        rest = ((start, offset - start), (offset + nbytes, end - offset - nbytes))
        self.free[index : index + 1] = [stretch for stretch in rest if stretch[1]]

    def join(self, offset: int, nbytes: int) -> None:
        """Give a stretch back, merged with the free ones beside it."""
        index = bisect_left(self.free, (offset, 0))
        if index < len(self.free) and self.free[index][0] == offset + nbytes:
            nbytes += self.free.pop(index)[1]
        if index and sum(self.free[index - 1]) == offset:
            offset, before = self.free.pop(index - 1)
            nbytes, index = nbytes + before, index - 1
        self.free.insert(index, (offset, nbytes))


_Range = tuple[_Slab, int, int]
"""Slab, offset in it, length: multiples of the pool's granule."""


class _Returned(NamedTuple):
    """What a lease had."""

    ranges: tuple[_Range, ...]
    is_shown: bool


class PinnedPool:
    """At most `limit_bytes` of host memory, mapped and registered slab by slab as it is needed.

    All methods are safe from any thread, and none waits for memory: who gets none is called (by
    `on_return`, which must neither block nor raise) when some has come back, and tries again.
    """

    def __init__(
        self,
        limit_bytes: int,
        *,
        pin: Pin | None,
        unpin: Unpin | None = None,
        slab_bytes: int = SLAB_BYTES,
        granule_bytes: int = PAGE_BYTES,
        on_return: Callable[[], object] | None = None,
    ) -> None:
        self.limit_bytes = limit_bytes // PAGE_BYTES * PAGE_BYTES
        self.mapped_bytes = 0
        self.in_use_bytes = 0
        self.most_bytes = 0
        self.why_not_pinned = ""
        """Why some of it is pageable memory, "" if none is (or no pinning was asked for)."""
        self._slab_bytes = -(-slab_bytes // PAGE_BYTES) * PAGE_BYTES
        self._granule_bytes = granule_bytes
        self._pin, self._unpin, self._on_return = pin, unpin, on_return
        self._slabs: list[_Slab] = []
        self._returned: deque[_Returned] = deque()
        self._lock = threading.Lock()
        _pools.add(self)

    @property
    def free_bytes(self) -> int:
        """What can still be leased, mapped already or not."""
        with self._lock:
            self._take_back()
            return self.limit_bytes - self.in_use_bytes

    def give_up(self, nbytes: int) -> bool:
        """Let the limit be so much lower, for good; False if so much is not free."""
        with self._lock:
            self._take_back()
            fits = nbytes <= self.limit_bytes - self.in_use_bytes
            if fits:
                self.limit_bytes -= nbytes
        return fits

    def prepare(self) -> None:
        """Map and register all of it now: registering stops the device for a moment."""
        with self._lock:
            while self.mapped_bytes < self.limit_bytes:
                self._grow()

    def try_take(
        self, nbytes: int, *, in_one_part: bool = True, is_shown: bool = False
    ) -> Lease | None:
        """Memory for `nbytes` bytes, None if there is none now.

        Args:
            nbytes: more than 0.
            in_one_part: False: gather it from several stretches if no single one is long enough;
                then there is memory whenever `free_bytes` are as many.
            is_shown: kernels may use it until the lease ends, also when the pool is closed; so it
                is pinned.
        """
        wanted = -(-nbytes // self._granule_bytes) * self._granule_bytes
        with self._lock:
            self._take_back()
            ranges = self._find(wanted, in_one_part=in_one_part, is_shown=is_shown)
            if ranges is None:
                return None
            for slab, offset, length in ranges:
                slab.cut(offset, length)
                slab.num_shown += is_shown
            self.in_use_bytes += wanted
            self.most_bytes = max(self.most_bytes, self.in_use_bytes)
        return Lease(self, ranges, nbytes, is_shown=is_shown)

    def close(self) -> None:
        """Unregister and forget all memory; call it when no copy is under way. Idempotent.

        Memory of leases that still exist stays mapped until their end; registered, if it is shown.
        """
        with self._lock:
            self._take_back()
            slabs, self._slabs = self._slabs, []
            self.limit_bytes = 0
            for slab in slabs:
                slab.is_closed = True
                self._unpin_if_closed(slab)

    def _unpin_if_closed(self, slab: _Slab) -> None:
        is_over = slab.is_closed and not slab.num_shown
        if is_over and slab.pinned and self._unpin is not None:
            slab.pinned = False
            self._unpin(slab.address)

    def _give_back(self, returned: _Returned) -> None:
        # Finalizers run anywhere, also in a thread that is inside this pool: never wait here.
        self._returned.append(returned)
        if_free(self._lock, self._take_back)
        if self._on_return is not None:
            self._on_return()

    def _take_back(self) -> None:
        while self._returned:
            ranges, is_shown = self._returned.popleft()
            for slab, offset, length in ranges:
                slab.join(offset, length)
                self.in_use_bytes -= length
                slab.num_shown -= is_shown
                self._unpin_if_closed(slab)

    def _find(self, nbytes: int, *, in_one_part: bool, is_shown: bool) -> tuple[_Range, ...] | None:
        if nbytes > self.limit_bytes - self.in_use_bytes:
            return None
        while True:
            fitting = [
                (slab, offset, length)
                for slab, offset, length in self._stretches()
                if length >= nbytes and (slab.pinned or not is_shown)
            ]
            if fitting:
                slab, offset, length = min(fitting, key=lambda stretch: stretch[2])
                # From the other end than what has to lie in one piece, between which gaps are lost.
                return ((slab, offset if is_shown else offset + length - nbytes, nbytes),)
            if self.mapped_bytes >= self.limit_bytes:
                return None if in_one_part else self._gather(nbytes)
            self._grow(nbytes)

    def _gather(self, nbytes: int) -> tuple[_Range, ...]:
        ranges = []
        for slab, offset, length in sorted(self._stretches(), key=lambda stretch: -stretch[2]):
            if not nbytes:
                break
            ranges.append((slab, offset, min(length, nbytes)))
            nbytes -= ranges[-1][2]
        assert not nbytes, f"free stretches are {nbytes} bytes less than what is accounted for"
        return tuple(ranges)

    def _stretches(self) -> Iterator[_Range]:
        for slab in self._slabs:
            for offset, length in slab.free:
                yield slab, offset, length

    def _grow(self, nbytes: int = 0) -> None:
        rounded = -(-nbytes // PAGE_BYTES) * PAGE_BYTES
        nbytes = min(max(self._slab_bytes, rounded), self.limit_bytes - self.mapped_bytes)
        memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        memory.madvise(mmap.MADV_DONTFORK)
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        reason = self._pin(address, nbytes) if self._pin is not None else ""
        slab = _Slab(
            memory=memory,
            tensor=torch.frombuffer(memory, dtype=torch.uint8),
            address=address,
            nbytes=nbytes,
            pinned=self._pin is not None and not reason,
            free=[(0, nbytes)],
        )
        if reason and not self.why_not_pinned:
            self.why_not_pinned = f"{format_nbytes(nbytes)} of host memory are pageable: {reason}"
        self._slabs.append(slab)
        self.mapped_bytes += nbytes


def wait_until(condition: Callable[[], bool], timeout_s: float) -> bool:
    """Look every millisecond until `condition` holds; False if it does not within `timeout_s`."""
    until = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > until:
            return False
        time.sleep(0.001)
    return True


# A fork can only be watched for the whole process. The child has no such pages (MADV_DONTFORK), and
# unmapping what is not there could hit what was mapped in its place: the objects are kept for good.
_pools: "weakref.WeakSet[PinnedPool]" = weakref.WeakSet()
_kept_in_child: list[object] = []


def _forget_in_child() -> None:
    for pool in _pools:
        pool._pin = pool._unpin = pool._on_return = None
        _kept_in_child.extend(pool._slabs)
        pool._slabs = []
        pool._lock = threading.Lock()
        pool._returned = deque()


os.register_at_fork(after_in_child=_forget_in_child)
