"""How much memory a process really takes, by the operating system's or the driver's own account."""

import re
from pathlib import Path

import torch


class PeakMeter:
    """Measures the peak of the memory of a device since `reset`, less what was taken at `start`.

    On a CPU it is the resident set of the whole process, which nothing can hide from; on an
    accelerator it is what its allocator gave out.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._peak = 0
        self._start = self._now()

    def reset(self) -> None:
        """Forget the peak so far."""
        self._peak = 0
        if self._device.type == "cpu":
            Path("/proc/self/clear_refs").write_text("5")
        else:
            torch.accelerator.reset_peak_memory_stats()

    def update(self) -> None:
        """Take the peak since the last reset, whoever made it, into account."""
        peak = (
            _status_bytes("VmHWM")
            if self._device.type == "cpu"
            else torch.accelerator.max_memory_allocated()
        )
        self._peak = max(self._peak, peak)

    @property
    def peak_bytes(self) -> int:
        """The peak at the last `update`, less what there was before."""
        return self._peak - self._start

    def _now(self) -> int:
        if self._device.type == "cpu":
            return _status_bytes("VmRSS")
        return torch.accelerator.memory_allocated()


def _status_bytes(field: str) -> int:
    status = Path("/proc/self/status").read_text()
    found = re.search(rf"^{field}:\s+(\d+) kB", status, re.MULTILINE)
    if found is None:
        raise SystemExit(f"/proc/self/status has no {field}; this demonstration needs Linux")
    return int(found[1]) * 1024
