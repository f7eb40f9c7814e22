"""How much memory this process has, and may have, by Linux's own account."""

import os
from pathlib import Path

_STATUS = Path("/proc/self/status")
_STATM = Path("/proc/self/statm")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_CLEAR_REFS = Path("/proc/self/clear_refs")
_CGROUP_FILES = (
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
    (
        "/sys/fs/cgroup/memory/memory.limit_in_bytes",
        "/sys/fs/cgroup/memory/memory.usage_in_bytes",
    ),
)


def resident_bytes() -> int:
    """Resident set size now."""
    return _status_bytes("VmRSS")


def resident_bytes_fast() -> int:
    """The same from a shorter file, for use at every site."""
    with _STATM.open() as line:
        return int(line.read().split()[1]) * _PAGE_BYTES


def peak_bytes() -> int:
    """The most that the resident set has been since `reset_peak` or the process's start."""
    return _status_bytes("VmHWM")


def reset_peak() -> None:
    """Start measuring the peak anew from the resident set of now."""
    _CLEAR_REFS.write_text("5")


def available_bytes() -> int:
    """Memory that this process could still take, within its control group too."""
    with Path("/proc/meminfo").open() as lines:
        free = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvail"))
    for limit_file, usage_file in _CGROUP_FILES:
        try:
            limit = Path(limit_file).read_text().strip()
            usage = int(Path(usage_file).read_text())
        except (OSError, ValueError):
            continue
        if limit != "max":
            free = min(free, max(0, int(limit) - usage))
    return free


def _status_bytes(field: str) -> int:
    with _STATUS.open() as lines:
        for line in lines:
            if line.startswith(field):
                return int(line.split()[1]) * 1024
    raise OSError(f"/proc/self/status has no {field}")
