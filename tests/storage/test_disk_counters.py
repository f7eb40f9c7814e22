"""What disks tell about themselves. Stand-ins for smartctl print reports in its documented form."""

import json
import os
import re
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from teraplan.runtime import machine_facts
from teraplan.runtime.storage import disk_counters as counters_module
from teraplan.runtime.storage.disk_counters import DiskCounters, disk_counters
from teraplan.runtime.storage.file_system import disk_facts

Install = Callable[[str], None]
NVME = {
    "smartctl": {"exit_status": 0},
    "smart_status": {"passed": True},
    "nvme_smart_health_information_log": {
        "critical_warning": 0,
        "percentage_used": 3,
        "data_units_written": 62_786_553,
        "media_errors": 0,
    },
}
WORN = NVME | {
    "smart_status": {"passed": False},
    "nvme_smart_health_information_log": {
        "percentage_used": 104,
        "data_units_written": 10,
        "media_errors": 7,
    },
}
SATA = {
    "logical_block_size": 4096,
    "endurance_used": {"current_percent": 12},
    "ata_smart_attributes": {
        "table": [
            {"id": 5, "name": "Reallocated_Sector_Ct", "raw": {"value": 1}},
            {"id": 241, "name": "Total_LBAs_Written", "raw": {"value": 1000}},
        ]
    },
}
REFUSED = {"smartctl": {"messages": [{"string": "Unable to detect device type"}]}}


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """`install(script)`: this is smartctl from now on."""

    def put(script: str) -> None:
        program = tmp_path / "smartctl"
        program.write_text(f"#!/bin/sh\n{script}\n")
        program.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
        counters_module._counters.cache_clear()

    return put


def _prints(report: object, status: int = 0) -> str:
    return f"cat <<'END'\n{json.dumps(report)}\nEND\nexit {status}"


def test_an_nvme_disk_tells_its_wear(install: Install) -> None:
    install(_prints(NVME, 4))  # a bit for some attribute is no failure of smartctl
    found = disk_counters("nvme0n1")
    assert found.written_bytes == 62_786_553 * 512_000
    assert found.used_share == 0.03
    assert not found.is_failing
    assert not found.why_no_smart
    assert "3% of its rated life used, 29.24 TiB written in its life" in str(found)


def test_a_sata_disk_counts_in_its_own_blocks(install: Install) -> None:
    install(_prints(SATA))
    found = disk_counters("sda")
    assert found.written_bytes == 1000 * 4096
    assert found.used_share == 0.12


def test_a_disk_is_asked_once_a_minute(install: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = [600.0]
    monkeypatch.setattr(time, "monotonic", lambda: now_s[0])
    install(_prints(NVME))
    first = disk_counters("nvme0n1")
    now_s[0] += 59
    assert disk_counters("nvme0n1") is first
    now_s[0] += 1
    assert disk_counters("nvme0n1") is not first


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        (_prints(REFUSED, 2), "Unable to detect device type|only root may ask the disk"),
        (_prints({}, 1), "cannot open the disk|only root may ask the disk"),
        (_prints({"device": {}}), "has none that are known here"),
        ("echo no JSON", "smartctl failed: "),
        ("sleep 60", "did not end within 0 s"),
    ],
)
def test_a_disk_that_does_not_tell_is_said(
    install: Install, monkeypatch: pytest.MonkeyPatch, script: str, reason: str
) -> None:
    if "sleep" in script:
        monkeypatch.setattr(counters_module, "_TIME_LIMIT_S", 0.2)
    install(script)
    found = disk_counters("sda")
    assert found.written_bytes is None
    assert re.search(reason, found.why_no_smart), found.why_no_smart


def test_without_smartctl_the_kernel_still_counts(
    disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "which", lambda name, path=None: None)
    counters_module._counters.cache_clear()
    for name in disk_facts(disk).physical:
        found = disk_counters(name)
        assert found.why_no_smart == "smartctl is not installed"
        assert found.written_since_boot_bytes is not None
        assert "written since boot, no SMART counters: smartctl is not" in str(found)


def test_the_kernels_count_grows_with_what_is_written(disk: Path) -> None:
    names = disk_facts(disk).physical
    before = {name: counters_module._written_since_boot(name) for name in names}
    with open(disk / "file", "wb") as file:
        file.write(os.urandom(1 << 20))
        file.flush()
        os.fsync(file.fileno())
    os.unlink(disk / "file")
    for name in names:
        after, was = counters_module._written_since_boot(name), before[name]
        assert after is not None
        assert was is not None
        assert after >= was + (1 << 20)


@pytest.mark.parametrize(("report", "status"), [(NVME, "ok"), (WORN, "warning")])
def test_the_doctor_shows_it_and_warns_of_a_worn_disk(
    install: Install, disk: Path, report: object, status: str
) -> None:
    if not disk_facts(disk).physical:
        pytest.skip("the kernel does not say what the directory lies on")
    install(_prints(report))
    facts = {fact.name: fact for fact in machine_facts._directory(disk)}
    wear = facts[f"{disk}: wear"]
    assert wear.status == status
    assert bool(wear.advice) == (status == "warning")


def test_a_failing_disk_says_so_first() -> None:
    found = DiskCounters(disk="sda", is_failing=True, used_share=1.04, media_errors=7)
    assert str(found) == (
        "sda: reports that it is failing, 104% of its rated life used, 7 media errors"
    )
