"""How much memory this process has, and may have, by Linux's own account."""

import ctypes
import os
import weakref
from bisect import bisect_left
from collections.abc import Iterable, Iterator

from teraplan.runtime.process.control_groups import limited_groups
from teraplan.runtime.process.proc_file import ProcFile

_status = ProcFile("/proc/self/status")
_STATUS_BYTES = 1 << 14
_maps = ProcFile("/proc/self/maps")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_meminfo = ProcFile("/proc/meminfo")
_clear_refs = ProcFile("/proc/self/clear_refs", os.O_WRONLY)


def resident_bytes() -> int:
    """Resident set size now."""
    return _status_bytes("VmRSS")


_libc = ctypes.PyDLL(None, use_errno=True)
"""Keeps the GIL: `os.pread` gives it to whichever thread waits for it, and then waits itself."""
_libc.pread.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_long]
_libc.pread.restype = ctypes.c_ssize_t


class _Statm:
    """A shorter file with the resident set size."""

    def __init__(self) -> None:
        self._file = ProcFile("/proc/self/statm")
        self._text = ctypes.create_string_buffer(128)

    def resident_bytes(self) -> int:
        return self._field_bytes(1)

    def mapped_file_bytes(self) -> int:
        return self._field_bytes(2)

    def _field_bytes(self, number: int) -> int:
        if _libc.pread(self._file.fd, self._text, len(self._text), 0) <= 0:
            raise OSError(ctypes.get_errno(), "reading /proc/self/statm")
        return int(self._text.raw.split(None, 3)[number]) * _PAGE_BYTES


_statm = _Statm()
resident_bytes_fast = _statm.resident_bytes
"""Resident set size now, for use at every site."""
mapped_file_bytes = _statm.mapped_file_bytes
"""Of the resident set, pages of files that are mapped."""


_NAME = 5
"""Fields before it in a line of /proc/self/maps."""


def heap_range() -> tuple[int, int]:
    """Address and bytes of the heap that `malloc` grows, all of its mappings; (0, 0) if none."""
    ranges = [(start, end) for start, end, name in _mappings() if name == "[heap]"]
    return (ranges[0][0], ranges[-1][1] - ranges[0][0]) if ranges else (0, 0)


def mappings_with(addresses: Iterable[int]) -> list[tuple[int, int]]:
    """Address and bytes of each mapping in which one of `addresses` lies."""
    wanted = sorted(addresses)
    found = []
    for start, end, _ in _mappings() if wanted else ():
        if bisect_left(wanted, start) < bisect_left(wanted, end):
            found.append((start, end - start))
    return found


def _mappings() -> Iterator[tuple[int, int, str]]:
    """Start, end and name of each."""
    for line in _maps.read_all().split("\n")[:-1]:
        fields = line.split(maxsplit=_NAME)
        start, _, end = fields[0].partition("-")
        yield int(start, 16), int(end, 16), fields[_NAME] if len(fields) > _NAME else ""


def peak_bytes() -> int:
    """The most that the resident set has been since `reset_peak` or the process's start."""
    return _status_bytes("VmHWM")


def reset_peak() -> None:
    """Start measuring the peak anew from the resident set of now."""
    for watch in list(_watches):
        watch.note()
    _clear_refs.write(b"5")


class PeakWatch:
    """The most that the resident set has been since this was made, over all `reset_peak` since."""

    def __init__(self) -> None:
        reset_peak()
        self._most = 0
        _watches.add(self)

    def note(self) -> None:
        """Keep the peak of until now, which is about to be forgotten."""
        self._most = max(self._most, peak_bytes())

    @property
    def nbytes(self) -> int:
        """The peak."""
        return max(self._most, peak_bytes())


_watches: "weakref.WeakSet[PeakWatch]" = weakref.WeakSet()


def available_bytes() -> int:
    """Memory that this process could still take, within its control groups, too."""
    lines = _meminfo.read_all().splitlines()
    free = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvail"))
    return min([free, *(group.free_bytes for group in limited_groups())])


def _status_bytes(field: str) -> int:
    for line in _status.read(_STATUS_BYTES).decode().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) * 1024
    raise OSError(f"/proc/self/status has no {field}")
