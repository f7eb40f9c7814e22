"""System calls of the storage engine that fail, as a schedule says, on their k-th call.

The faults enter where the engine calls the kernel, so everything above is the code that trains.
"""

import ctypes
import errno
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest

from teraplan.runtime.storage import arena, posix_arena
from teraplan.runtime.storage.lane import lane_library
from teraplan.runtime.storage.memory import view

Buffers = Sequence[memoryview]
CALLS = ("write", "read", "grow")
"""pwritev, preadv and posix_fallocate."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """What goes wrong, and when.

    Attributes:
        call: one of CALLS.
        what: an errno, or "short", "flip", "slow" or "end" (of the file).
        at: number of the first call that goes wrong, from 1.
        times: how many calls go wrong from there on.
    """

    call: str
    what: int | str
    at: int
    times: int = 1

    def __str__(self) -> str:
        return f"{self.name_of(self.what)} in {self.call} {self.at}, {self.times} times"

    @staticmethod
    def name_of(what: int | str) -> str:
        """The name of an errno, and any other fault as it is."""
        return errno.errorcode[what] if isinstance(what, int) else what


class FaultyCalls:
    """Counts the calls and lets those fail that the schedule names."""

    def __init__(self, faults: Sequence[Fault]) -> None:
        self.counts: dict[str, int] = dict.fromkeys(CALLS, 0)
        self.num_injected = 0
        self._faults = tuple(faults)
        self._lock = threading.Lock()

    def write(self, fd: int, buffers: Buffers, offset: int) -> int:
        """`os.pwritev`."""
        fault = self._next("write")
        if fault is not None and fault.what == "short":
            return os.pwritev(fd, [_half(buffers[0])], offset)
        self._raise(fault, offset)
        return os.pwritev(fd, buffers, offset)

    def read(self, fd: int, buffers: Buffers, offset: int) -> int:
        """`os.preadv`."""
        fault = self._next("read")
        if fault is not None and fault.what == "short":
            return os.preadv(fd, [_half(buffers[0])], offset)
        if fault is not None and fault.what == "end":
            return 0
        self._raise(fault, offset)
        got = os.preadv(fd, buffers, offset)
        if fault is not None and fault.what == "flip":
            buffers[0][got // 2] ^= 1
        return got

    def grow(self, fd: int, offset: int, nbytes: int) -> None:
        """`os.posix_fallocate`."""
        self._raise(self._next("grow"), offset)
        os.posix_fallocate(fd, offset, nbytes)

    def _next(self, call: str) -> Fault | None:
        with self._lock:
            self.counts[call] += 1
            number = self.counts[call]
            for fault in self._faults:
                if fault.call == call and fault.at <= number < fault.at + fault.times:
                    self.num_injected += 1
                    return fault
        return None

    def _raise(self, fault: Fault | None, offset: int) -> None:
        if fault is None:
            return
        if fault.what == "slow":
            time.sleep(0.02)
        elif isinstance(fault.what, int):
            raise OSError(fault.what, os.strerror(fault.what))


def _half(buffer: memoryview) -> memoryview:
    """The first half of the buffer in whole blocks, all of it if that is one block."""
    return buffer[: max(4096, buffer.nbytes // 2 // 4096 * 4096)]


@contextmanager
def injected(*faults: Fault) -> Iterator[FaultyCalls]:
    """Within this, the calls of every open storage fail as `faults` say."""
    calls = FaultyCalls(faults)
    with pytest.MonkeyPatch.context() as patch:
        replaced: tuple[tuple[object, str, Callable[..., object]], ...] = (
            (posix_arena, "pwritev", calls.write),
            (posix_arena, "preadv", calls.read),
            (arena, "posix_fallocate", calls.grow),
        )
        for module, name, call in replaced:
            patch.setattr(module, name, call)
        with _in_lanes(calls):
            yield calls


_Call = ctypes.CFUNCTYPE(
    ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int64, use_errno=True
)


@contextmanager
def _in_lanes(calls: FaultyCalls) -> Iterator[None]:
    """The same for what is moved in C++."""
    library = lane_library()
    assert library is not None, "there is a compiler where this is tested"
    write, read = _in_c(calls.write), _in_c(calls.read)
    library.set_calls(ctypes.cast(write, ctypes.c_void_p), ctypes.cast(read, ctypes.c_void_p))
    try:
        yield
    finally:
        library.set_calls(None, None)
        _kept.append((write, read))  # a thread may be in one of them


_kept: list[object] = []


def _in_c(call: Callable[[int, Buffers, int], int]) -> Any:  # noqa: ANN401  a ctypes function
    def in_c(fd: int, address: int, nbytes: int, offset: int) -> int:
        try:
            return call(fd, [view(address, nbytes)], offset)
        except OSError as error:
            ctypes.set_errno(error.errno or errno.EIO)
            return -1

    return _Call(in_c)
