"""What a disk counts about itself: what was written to it in its life, and how worn it is.

    /sys/block/NAME/stat        anybody may read it: bytes written since boot, by everybody
    smartctl --json /dev/NAME   where it is installed and allowed: bytes of the disk's life, wear

The two NVMe figures are those of the SMART log (NVM Express Base Specification, log page 02h): data
units are 1000 times 512 bytes, and "percentage used" may exceed 100. A SATA disk tells its wear
through smartctl 7.4 and newer, and its writes where the attribute counts logical blocks.
"""

import json
import os
import shutil
import subprocess
import time
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from teraplan.units import format_nbytes

_SYS_BLOCK = Path("/sys/block")
_SECTOR_BYTES = 512
"""Unit of /sys/block/NAME/stat, whatever the disk's own sectors (Documentation/block/stat.rst)."""
_SECTORS_WRITTEN = 6
_NVME_UNIT_BYTES = 512_000
_TIME_LIMIT_S = 5.0
_FRESH_FOR_S = 60
_NOT_INSTALLED = "smartctl is not installed"
_NO_ROOT = "only root may ask the disk"


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskCounters:
    """Counters of one physical disk; None where the disk or the kernel does not tell."""

    disk: str
    written_since_boot_bytes: int | None = None
    written_bytes: int | None = None
    """In the disk's life."""
    used_share: float | None = None
    """Of the writes that the disk is rated for; may exceed 1."""
    media_errors: int | None = None
    is_failing: bool = False
    """The disk itself says so."""
    why_no_smart: str = ""
    """Why it does not tell about its life, "" if it does."""

    def __str__(self) -> str:
        parts: list[str] = []
        if self.is_failing:
            parts.append("reports that it is failing")
        if self.used_share is not None:
            parts.append(f"{self.used_share:.0%} of its rated life used")
        if self.written_bytes is not None:
            parts.append(f"{format_nbytes(self.written_bytes)} written in its life")
        if self.written_since_boot_bytes is not None:
            parts.append(f"{format_nbytes(self.written_since_boot_bytes)} written since boot")
        if self.media_errors:
            parts.append(f"{self.media_errors} media errors")
        if self.why_no_smart:
            parts.append(f"no SMART counters: {self.why_no_smart}")
        return f"{self.disk}: " + ", ".join(parts)


def disk_counters(disk: str) -> DiskCounters:
    """What the disk of this name ("nvme0n1") counts, at most a minute old.

    Takes some ten milliseconds with smartctl, and at most five seconds if the disk does not answer.
    """
    return _counters(disk, int(time.monotonic()) // _FRESH_FOR_S)


@lru_cache(maxsize=64)
def _counters(disk: str, minute: int) -> DiskCounters:
    since_boot = _written_since_boot(disk)
    report, why_not = _smart_report(disk)
    if not why_not and not _has_counters(report):
        why_not = "the disk has none that are known here"
    return DiskCounters(
        disk=disk,
        written_since_boot_bytes=since_boot,
        written_bytes=_written(report),
        used_share=_used_share(report),
        media_errors=_nvme(report).get("media_errors"),
        is_failing=report.get("smart_status", {}).get("passed") is False,
        why_no_smart=why_not,
    )


def _written_since_boot(disk: str) -> int | None:
    try:
        fields = (_SYS_BLOCK / disk / "stat").read_text().split()
        return int(fields[_SECTORS_WRITTEN]) * _SECTOR_BYTES
    except (OSError, IndexError, ValueError):
        return None


def _smart_report(disk: str) -> tuple[dict[str, Any], str]:
    """What smartctl says about the disk, or why it says nothing."""
    program = shutil.which("smartctl") or shutil.which("smartctl", path="/usr/sbin:/sbin")
    if program is None:
        return {}, _NOT_INSTALLED
    command = [program, "--json", "--info", "--health", "--attributes", f"/dev/{disk}"]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_TIME_LIMIT_S, check=False
        )
        report = json.loads(done.stdout)
    except subprocess.TimeoutExpired:
        return {}, f"smartctl did not end within {_TIME_LIMIT_S:.0f} s"
    except (OSError, ValueError) as error:
        return {}, f"smartctl failed: {error}"
    # The lowest two bits: it was not understood, or could not open the disk. Others are findings.
    if done.returncode & 0b11:
        return {}, _NO_ROOT if os.geteuid() else _message(report)
    return report, ""


def _message(report: dict[str, Any]) -> str:
    messages = report.get("smartctl", {}).get("messages", [])
    texts = [message["string"] for message in messages if "string" in message]
    return "; ".join(texts) or "smartctl cannot open the disk"


def _has_counters(report: dict[str, Any]) -> bool:
    return _written(report) is not None or _used_share(report) is not None


def _nvme(report: dict[str, Any]) -> dict[str, Any]:
    log: dict[str, Any] = report.get("nvme_smart_health_information_log", {})
    return log


def _written(report: dict[str, Any]) -> int | None:
    if "data_units_written" in _nvme(report):
        return int(_nvme(report)["data_units_written"]) * _NVME_UNIT_BYTES
    for attribute in report.get("ata_smart_attributes", {}).get("table", []):
        if attribute["name"] == "Total_LBAs_Written":  # others count in units of their makers
            return int(attribute["raw"]["value"]) * int(report.get("logical_block_size", 512))
    return None


def _used_share(report: dict[str, Any]) -> float | None:
    if "percentage_used" in _nvme(report):
        return int(_nvme(report)["percentage_used"]) / 100
    percent = report.get("endurance_used", {}).get("current_percent")
    return None if percent is None else int(percent) / 100
