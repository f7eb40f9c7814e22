"""Moves chunks in C++ without Python's lock: see `lane.cpp`, which this hands them to.

A thread that moves chunks in Python takes the lock some four times for each, and whoever computes
waits meanwhile. With threads like this one a T5's step under half of its memory was 1.1 % shorter.
They take the lock when there is something to do in Python. What fails here is tried once more
there, where errors get their names.
"""

import ctypes
import errno
import logging
import os
import weakref
from collections.abc import Callable, Sequence
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any, NamedTuple

from teraplan.runtime.process import compiled_source
from teraplan.runtime.storage.memory import digest
from teraplan.values.run_record import Direction

if TYPE_CHECKING:
    from teraplan.runtime.storage.transfers import Chunk

_log = logging.getLogger(__name__)
_SLICE_S = 0.02
"""Handlers of signals run after so much of a wait at the latest."""
_MOST_REPORTS = 256
_DIGESTS = ("XXH3_64bits_dispatch", "XXH3_64bits")
"""What xxhash has compiled: for the best of this processor's instructions, or for all."""
_ENDED_EARLY = -1
"""Of a job, where it is no errno."""


class Group(ctypes.Structure):
    """The jobs of one transfer, as far as C++ is through with them."""

    left: int
    start_ns: int
    end_ns: int
    report: int
    _fields_ = tuple((name, ctypes.c_int64) for name in ("left", "start_ns", "end_ns", "report"))


class _Job(ctypes.Structure):
    _fields_ = (
        ("number", ctypes.c_uint64),
        ("group", ctypes.c_void_p),
        ("digest", ctypes.c_void_p),
        ("address", ctypes.c_void_p),
        ("nbytes", ctypes.c_uint64),
        ("offset", ctypes.c_int64),
        ("is_write", ctypes.c_int64),
    )


class _Report(ctypes.Structure):
    _fields_ = (
        ("number", ctypes.c_uint64),
        ("start_ns", ctypes.c_int64),
        ("end_ns", ctypes.c_int64),
        ("error", ctypes.c_int64),
    )


class Ended(NamedTuple):
    """What became of a chunk."""

    chunk: "Chunk"
    error: int
    """0 if all is well, an errno, or what C++ says beside them."""

    @property
    def why(self) -> str:
        """The error in words."""
        if self.error > 0:
            return f"{errno.errorcode.get(self.error, 'error')}: {os.strerror(self.error)}"
        return "the file ended early" if self.error == _ENDED_EARLY else "the checksum differs"


_Lane, _Bool, _U64, _I64 = ctypes.c_void_p, ctypes.c_bool, ctypes.c_uint64, ctypes.c_int64
_Size, _Reports = ctypes.c_size_t, ctypes.POINTER(_Report)
_SIGNATURES = {
    "new_lane": (_Lane, ctypes.c_int, _Size),
    "set_calls": (None, ctypes.c_void_p, ctypes.c_void_p),
    "delete_lane": (None, _Lane),
    "push_jobs": (None, _Lane, ctypes.POINTER(_Job), _Size, _Bool),
    "promote_group": (None, _Lane, ctypes.c_void_p),
    "remove_jobs": (_Size, _Lane, ctypes.c_void_p, ctypes.POINTER(_U64), _Size),
    "last_number": (_U64, _Lane),
    "num_calls": (_U64, _Lane),
    "call_back": (None, _Lane),
    "ask_report": (None, _Lane, ctypes.c_void_p),
    "take_reports": (_Size, _Lane, _Reports, _Size),
    "count_jobs": (None, _Lane, _Size),
    "running_jobs": (_Size, _Lane, _Reports, _Size),
    "num_queued": (_Size, _Lane),
    "num_ended": (_U64, _Lane),
    "num_uncounted": (_U64, _Lane),
    "ring_lane": (None, _Lane),
    "stop_lane": (None, _Lane),
}
_WAITING = {
    "run_lane": (None, _Lane, _U64, _Bool, _Bool),
    "await_end": (_Bool, _Lane, _U64, _I64),
    "await_counted": (_Bool, _Lane, _I64),
}
"""These let others have Python's lock meanwhile."""


class _Library:
    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Callable[..., Any]: ...

    def __init__(self) -> None:
        short = compiled_source.load(Path(__file__).with_name("lane.cpp"))
        for library, signatures in ((short, _SIGNATURES), (ctypes.CDLL(short._name), _WAITING)):
            compiled_source.declare(library, signatures)
            for name in signatures:
                setattr(self, name, getattr(library, name))
        compiled = find_spec("xxhash._xxhash")
        if compiled is None or compiled.origin is None:
            raise AttributeError("xxhash is not compiled")
        hashes = ctypes.CDLL(compiled.origin)
        hashing = next(getattr(hashes, name) for name in _DIGESTS if hasattr(hashes, name))
        hashing.restype, hashing.argtypes = _U64, (ctypes.c_void_p, _Size)
        probe = ctypes.create_string_buffer(bytes(range(256)) * 64)
        address, nbytes = ctypes.addressof(probe), len(probe)
        if hashing(address, nbytes) != digest(address, nbytes):
            raise AttributeError("XXH3 of xxhash is not what it was")
        self.digest = ctypes.cast(hashing, ctypes.c_void_p).value


@cache
def lane_library() -> "_Library | None":
    """What lanes are made with; None where there is no compiler."""
    try:
        return _Library()
    except (AttributeError, OSError, RuntimeError, StopIteration) as error:
        # There is no compiler, or xxhash is another one.
        _log.info("tensors are moved by threads of Python: %s", error)
        return None


def _delete(library: _Library, handle: int, pid: int) -> None:
    """Not in a forked child: it has none of the threads that it would wait for."""
    if os.getpid() == pid:
        library.delete_lane(handle)


class Lane:
    """The jobs of one file. Chunks are in it from `push` to `take_ended`, and kept alive."""

    def __init__(self, library: "_Library", fd: int) -> None:
        self._library = library
        self._handle = library.new_lane(fd, library.digest)
        # Threads that run keep it alive.
        weakref.finalize(self, _delete, library, self._handle, os.getpid()).atexit = False
        self._chunks: dict[int, Chunk] = {}
        self._next_number = 1

    @classmethod
    def open(cls, fd: int) -> "Lane | None":
        """A lane to a file, None where there can be none."""
        library = lane_library()
        return cls(library, fd) if library is not None else None

    # -- what is to be moved -----------------------------------------------------------------------

    def push(self, group: Group, chunks: Sequence["Chunk"], *, urgent: bool, checked: bool) -> None:
        """Queue chunks of one transfer, whose group is to live as long as it."""
        jobs = (_Job * len(chunks))()
        for job, chunk in zip(jobs, chunks, strict=True):
            record = chunk.record
            job.number, self._next_number = self._next_number, self._next_number + 1
            job.group, job.address = ctypes.addressof(group), chunk.address
            job.nbytes, job.offset = chunk.nbytes, chunk.place.offset
            if checked and not record.is_compared:
                job.digest = record.checksum_address(chunk.index)
            job.is_write = chunk.transfer.direction is Direction.OUT
            self._chunks[job.number] = chunk
        self._library.push_jobs(self._handle, jobs, len(jobs), urgent)

    def promote(self, group: Group) -> None:
        """What is queued of it goes first."""
        self._library.promote_group(self._handle, ctypes.addressof(group))

    def remove(self, group: Group) -> int:
        """Take what is queued of it out again; how many chunks of it threads have begun."""
        self._remove(group)
        return sum(chunk.transfer.group is group for chunk in self._chunks.values())

    def remove_all(self) -> list["Chunk"]:
        """Take all that is queued out again."""
        return self._remove(None)

    def _remove(self, group: Group | None) -> list["Chunk"]:
        numbers = (_U64 * max(1, self.num_queued))()
        address = ctypes.addressof(group) if group is not None else None
        count = self._library.remove_jobs(self._handle, address, numbers, len(numbers))
        last = self._library.last_number(self._handle)
        for number in [number for number in self._chunks if number > last]:
            del self._chunks[number]  # an interrupt came before it was queued
        return [self._chunks.pop(number) for number in numbers[:count]]

    @property
    def num_queued(self) -> int:
        """Chunks that no thread has begun with."""
        return int(self._library.num_queued(self._handle))

    @property
    def nbytes(self) -> int:
        """Of all chunks that have not been seen to."""
        return sum(chunk.nbytes for chunk in self._chunks.values())

    @property
    def running(self) -> list["Chunk"]:
        """Chunks that threads are moving, each with when that began."""
        reports = (_Report * _MOST_REPORTS)()
        count = self._library.running_jobs(self._handle, reports, len(reports))
        found: list[Chunk] = []
        for report in reports[:count]:
            chunk = self._chunks.get(report.number)
            if chunk is not None:
                chunk.start_ns = report.start_ns
                found.append(chunk)
        return found

    # -- threads -----------------------------------------------------------------------------------

    @property
    def num_calls(self) -> int:
        """How often `call_back` has been called."""
        return int(self._library.num_calls(self._handle))

    def run(self, calls_before: int, prefers: Direction, *, urgent_only: bool) -> None:
        """Move bytes until Python is needed, or has been since there were `calls_before`."""
        writes = prefers is Direction.OUT
        self._library.run_lane(self._handle, calls_before, writes, urgent_only)

    def call_back(self) -> None:
        """Threads that run are wanted in Python."""
        self._library.call_back(self._handle)

    def ask_report(self, group: Group | None = None) -> None:
        """A thread is wanted when `group` has ended; None: now."""
        address = ctypes.addressof(group) if group is not None else None
        self._library.ask_report(self._handle, address)

    def stop(self) -> None:
        """Threads that run are wanted in Python for good."""
        self._library.stop_lane(self._handle)

    # -- what has ended ----------------------------------------------------------------------------

    def take_ended(self) -> list[Ended]:
        """Chunks that have ended, well or not; `counted` is to be called for so many."""
        reports = (_Report * _MOST_REPORTS)()
        count = self._library.take_reports(self._handle, reports, len(reports))
        return [Ended(self._chunks.pop(r.number), r.error) for r in reports[:count]]

    def counted(self, count: int) -> None:
        """So many have been seen to."""
        self._library.count_jobs(self._handle, count)

    def catch_up(self, patience_s: float) -> None:
        """Wait until what has ended has been seen to."""
        until_ns = perf_counter_ns() + int(patience_s * 1e9)
        while self.num_uncounted and perf_counter_ns() < until_ns:
            self.ask_report()
            self._library.await_counted(self._handle, int(_SLICE_S * 1e9))

    @property
    def num_uncounted(self) -> int:
        """Chunks that have ended and have not been seen to."""
        return int(self._library.num_uncounted(self._handle))

    @property
    def num_ended(self) -> int:
        """Transfers that have, and calls of `ring`."""
        return int(self._library.num_ended(self._handle))

    def ring(self) -> None:
        """Something else has ended that somebody may wait for in `await_end`."""
        self._library.ring_lane(self._handle)

    def await_end(self, ended_before: int, patience_s: float) -> None:
        """Wait until more has ended than `ended_before`, or for so long."""
        until_ns = perf_counter_ns() + int(patience_s * 1e9)
        while (left_ns := until_ns - perf_counter_ns()) > 0:
            slice_ns = min(left_ns, int(_SLICE_S * 1e9))
            if self._library.await_end(self._handle, ended_before, slice_ns):
                return
