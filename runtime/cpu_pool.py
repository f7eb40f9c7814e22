"""Memory of large CPU tensors, reused while it is warm and given back when it would be too much.

glibc's heap is no place for tensors that come and go under a budget: after one step its free holes
held as much as the tensors did (1,001 MiB of heap for 626 MiB in use), and blocks that are mappings
of their own cost a page fault per 4 KiB. Here freed memory waits for the next tensors, and repeated
layers ask for the same sizes again and again. In use and waiting together never exceed the most
that has been in use at once, unless there is slack under the budget: where no free range is long
enough, a tensor gets pages of several.
"""

import ctypes
import threading
import weakref
from collections.abc import Sequence
from typing import Any, ClassVar, cast

import torch
from torch._C._dynamo import guards

from teraplan.runtime.free_ranges import PageBlock
from teraplan.runtime.page_pool import PagePool
from teraplan.runtime.pages import HUGE_PAGE_BYTES, round_up

MIN_BLOCK_BYTES = 256 << 10
"""Smaller tensors are left to the heap."""

_ALIGNMENT = 64 << 10
_empty_strided_cpu: Any = vars(guards)["_empty_strided_cpu"]
"""What generated code calls otherwise."""


class _Lease:
    """What a tensor's memory belongs to: a ctypes array whose end returns the block to its pool.

    One subclass per size, because a ctypes array type has its length.
    """

    _classes: ClassVar[dict[int, Any]] = {}

    @classmethod
    def of(cls, block: PageBlock, pool: "CpuPool") -> object:
        """An object with the buffer interface over the block."""
        kind: Any = cls._classes.get(block.nbytes)
        if kind is None:
            kind = type("_LeaseArray", (ctypes.c_char * block.nbytes,), {"__del__": _end_of_lease})
            cls._classes[block.nbytes] = kind
        lease = kind.from_address(block.address)
        lease.block, lease.pool = block, pool
        return cast("object", lease)


def _end_of_lease(lease: object) -> None:
    lease.pool.give_back(lease.block)  # type: ignore[attr-defined]


class CpuPool:
    """Blocks for tensors of `MIN_BLOCK_BYTES` and more. All methods are safe from any thread."""

    def __init__(self) -> None:
        self._waiting = PagePool()
        self._addresses: set[int] = set()
        self._lock = threading.RLock()
        self.in_use_bytes = 0
        self._most_bytes = 0
        self.slack_bytes = 0
        """So much more may be mapped while something waits."""
        self.room_bytes: int | None = None
        """At most so much, where something else takes what is not in use here; None: nothing."""
        weakref.finalize(self, self._waiting.clear).atexit = False

    @property
    def waiting_bytes(self) -> int:
        """Of blocks that no tensor has."""
        return self._waiting.nbytes

    def empty_strided(
        self, size: Sequence[int], stride: Sequence[int], dtype: torch.dtype
    ) -> torch.Tensor:
        """An uninitialized CPU tensor, as `torch.empty_strided` makes one."""
        span = 1
        for length, step in zip(size, stride, strict=True):
            span += (length - 1) * step
        if span * dtype.itemsize < MIN_BLOCK_BYTES or 0 in size:
            return cast("torch.Tensor", _empty_strided_cpu(size, stride, dtype))
        flat = torch.frombuffer(self._lease(span * dtype.itemsize), dtype=dtype, count=span)
        return flat.as_strided(size, stride)

    def empty_bytes(self, nbytes: int) -> torch.Tensor:
        """An uninitialized CPU tensor of `nbytes` bytes, aligned to a page."""
        return torch.frombuffer(self._lease(nbytes), dtype=torch.uint8, count=nbytes)

    def owns(self, address: int) -> bool:
        """True if a tensor that starts at `address` has its memory from here."""
        return address in self._addresses

    def give_back(self, block: PageBlock) -> None:
        """A block's tensor is gone. Called by the tensor's memory itself."""
        with self._lock:
            self.in_use_bytes -= block.nbytes
            self._addresses.discard(block.address)
            self._waiting.give(block)

    def trim(self) -> None:
        """Unmap every waiting block, and forget how much has been in use at once."""
        with self._lock:
            self._unmap(self.waiting_bytes)
            self._most_bytes = self.in_use_bytes

    def lower(self, nbytes: int) -> None:
        """Hold `nbytes` less from now on, in use and waiting, than the most in use so far."""
        with self._lock:
            self._most_bytes = max(self.in_use_bytes, self._most_bytes - nbytes)
            self._unmap(self.in_use_bytes + self.waiting_bytes - self._most_bytes)

    def shrink(self, nbytes: int) -> int:
        """Unmap waiting blocks of at least `nbytes` if there are so many; bytes unmapped."""
        with self._lock:
            before = self.waiting_bytes
            self._unmap(nbytes)
            return before - self.waiting_bytes

    def _lease(self, nbytes: int) -> object:
        nbytes = _aligned(nbytes)
        with self._lock:
            self.in_use_bytes += nbytes
            self._most_bytes = max(self._most_bytes, self.in_use_bytes)
            block = self._waiting.take(nbytes)
            if block is None:
                beyond = self.in_use_bytes + self.waiting_bytes - self._most_bytes
                beyond -= self.slack_bytes
                if self.room_bytes is not None:
                    beyond = max(beyond, nbytes - self.room_bytes)
                block = self._new_block(nbytes, beyond)
            self._addresses.add(block.address)
            return _Lease.of(block, self)

    def _new_block(self, nbytes: int, beyond_bytes: int) -> PageBlock:
        """A block from `beyond_bytes` of what waits; what it does not need of that is unmapped."""
        self._unmap(beyond_bytes - nbytes)
        before = self._waiting.nbytes
        block = self._waiting.make(nbytes, _reused(nbytes, beyond_bytes))
        fresh_bytes = nbytes - (before - self._waiting.nbytes)
        if fresh_bytes:
            self.slack_bytes = max(0, self.slack_bytes - fresh_bytes)
            if self.room_bytes is not None:
                self.room_bytes = max(0, self.room_bytes - fresh_bytes)
        return block

    def _unmap(self, nbytes: int) -> None:
        self._waiting.shrink(_aligned(nbytes))


def _reused(nbytes: int, beyond_bytes: int) -> int:
    """Bytes of a new block that come out of what waits: whole huge pages, where the block has any.

    Else the seam between them and fresh memory would take a huge page from both.
    """
    unit = HUGE_PAGE_BYTES if nbytes >= HUGE_PAGE_BYTES else _ALIGNMENT
    return min(nbytes, max(0, round_up(beyond_bytes, unit)))


def _aligned(nbytes: int) -> int:
    return max(0, round_up(nbytes, _ALIGNMENT))
