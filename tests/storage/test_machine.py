"""Links, the facts of `teraplan doctor`, what is remembered, and the probe of kvikio."""

import json
import re
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from teraplan.runtime import links, machine_facts
from teraplan.runtime.process import process_memory
from teraplan.runtime.storage import Record, Storage, cache_directory, kvikio_probe
from teraplan.units import MIB
from teraplan.values.hardware import Link

LINK = Link(
    out_bytes_per_s=5,
    back_bytes_per_s=4,
    out_while_back_bytes_per_s=3,
    back_while_out_bytes_per_s=2,
    latency_ns=1,
)


def _measures(link: Link) -> Callable[..., Link]:
    def measure(directories: object, *, checksum: bool, encrypt: bool) -> Link:
        return link

    return measure


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "teraplan"


def test_a_measured_link_makes_sense(disk: Path) -> None:
    link = links.measure_storage([disk], nbytes=64 * MIB)
    assert 10**7 < link.out_bytes_per_s < 10**12
    assert 10**7 < link.back_bytes_per_s < 10**12
    assert 0 < link.out_while_back_bytes_per_s <= link.out_bytes_per_s
    assert 0 < link.back_while_out_bytes_per_s <= link.back_bytes_per_s
    assert 1_000 < link.latency_ns < 10**9
    assert not list(disk.glob("teraplan-*"))


@pytest.mark.parametrize("free_bytes", [11 * MIB, MIB])
def test_storage_with_little_room_is_measured_with_little(
    disk: Path, monkeypatch: pytest.MonkeyPatch, free_bytes: int
) -> None:
    most: list[int] = []
    put = Storage.put

    def counted(storage: Storage, *args: Any, **kwargs: Any) -> Record:  # noqa: ANN401
        record = put(storage, *args, **kwargs)
        most.append(storage.bytes_in_use)
        return record

    monkeypatch.setattr(Storage, "free_bytes", free_bytes)
    monkeypatch.setattr(Storage, "put", counted)
    assert 10**6 < links.storage_link([disk]).back_bytes_per_s < 10**12
    assert 0 < max(most) <= free_bytes


def test_storage_without_room_is_told_of_and_not_remembered(
    disk: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(Storage, "free_bytes", MIB // 2)
    for _ in range(2):
        caplog.clear()
        assert links.storage_link([disk]).out_bytes_per_s == 500_000_000
        assert "512.00 KiB are free, too little to measure how fast storage is" in caplog.text


def test_measuring_takes_little_memory(disk: Path) -> None:
    """A model may be in memory, within its budget."""
    links.measure_storage([disk], nbytes=MIB)  # the first time loads code

    def measure_disk() -> None:
        links.measure_storage([disk], nbytes=64 * MIB)

    for measure in (measure_disk, links._measure_memory):
        process_memory.reset_peak()
        before = process_memory.resident_bytes()
        measure()
        assert process_memory.peak_bytes() - before < 56 * MIB


def test_a_link_is_measured_once_and_on_request(
    disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured = []

    def measure(directories: object, *, checksum: bool, encrypt: bool) -> Link:
        measured.append(directories)
        return LINK

    monkeypatch.setattr(links, "measure_storage", measure)
    for _ in range(2):
        assert links.storage_link([disk]) == LINK
    assert len(measured) == 1
    links.storage_link([disk], refresh=True)
    links.storage_link([disk, disk])  # other directories are another link
    assert len(measured) == 3


@pytest.mark.parametrize("damage", ["", "{", "[]", '{"version": 1}', "old", "fields", "version"])
def test_a_damaged_or_old_memory_is_measured_again(
    disk: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch, damage: str
) -> None:
    monkeypatch.setattr(links, "measure_storage", _measures(LINK))
    links.storage_link([disk])
    (path,) = own_cache.iterdir()
    content = json.loads(path.read_text())
    if damage == "old":
        content["time_s"] = time.time() - 365 * 24 * 3600
    elif damage == "fields":
        del content["facts"]["latency_ns"]
    elif damage == "version":
        content["version"] += 1
    known = damage in {"old", "fields", "version"}
    path.write_text(json.dumps(content) if known else damage)
    other = Link(**(asdict(LINK) | {"latency_ns": 99}))
    monkeypatch.setattr(links, "measure_storage", _measures(other))
    assert links.storage_link([disk]) == other
    assert links.storage_link([disk]) == other


def test_the_memory_is_private_and_leaves_no_temporary_files(own_cache: Path) -> None:
    cache_directory.keep("key", {"a": 1}, version=1)
    assert own_cache.stat().st_mode & 0o777 == 0o700
    (path,) = own_cache.iterdir()
    assert path.stat().st_mode & 0o777 == 0o600
    assert cache_directory.load("key", version=1, max_age_s=10) == {"a": 1}
    assert cache_directory.load("other", version=1, max_age_s=10) is None


def test_without_a_usable_cache_nothing_is_remembered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    cache_directory.keep("key", {"a": 1}, version=1)
    assert cache_directory.load("key", version=1, max_age_s=10) is None


def test_a_copy_within_memory_is_the_host_link_of_a_cpu() -> None:
    link = links.host_link("cpu")
    assert link is not None
    assert link.out_bytes_per_s > 10**8
    assert link == links.host_link("cpu")


def test_facts_name_what_is_there_and_what_is_wrong(disk: Path) -> None:
    facts = {fact.name: fact for fact in machine_facts.collect([disk, disk / "absent"])}
    for name in ("torch", "memory", "cgroup limit", "locked memory", "kvikio", str(disk)):
        assert facts[name].value
    assert "posix O_DIRECT" in facts[str(disk)].value
    assert facts[str(disk)].status == "ok"
    absent = facts[f"{disk}/absent"]
    assert absent.status == "warning"
    assert "No such file" in absent.advice
    assert machine_facts.collect()


def _fake_kvikio(directory: Path, source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    package = directory / "kvikio"
    package.mkdir()
    (package / "__init__.py").write_text(source)
    monkeypatch.syspath_prepend(str(directory))
    for name in [name for name in sys.modules if name.split(".")[0] == "kvikio"]:
        monkeypatch.delitem(sys.modules, name)


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("while True: pass", r"hung and was ended after 0\.5 s"),
        ("import os; os.kill(os.getpid(), 11)", "crashed with SIGSEGV"),
        ("raise ImportError('libcuda.so.1: cannot open')", "libcuda.so.1: cannot open"),
        ("print('no JSON')", "has no attribute 'CuFile'"),
    ],
)
def test_the_probe_survives_whatever_kvikio_does(
    disk: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, reason: str
) -> None:
    _fake_kvikio(tmp_path, source, monkeypatch)
    hangs = "hung" in reason
    monkeypatch.setitem(kvikio_probe.TIME_LIMITS_S, "host", 0.5 if hangs else 20.0)
    started = time.perf_counter()
    facts = kvikio_probe.probe(disk)
    assert time.perf_counter() - started < 15
    assert re.search(reason, facts.why_no_host)
    assert facts.why_no_gds
    assert "kvikio" not in sys.modules
    works = kvikio_probe._Answer(reason="", version="1")
    monkeypatch.setattr(kvikio_probe, "_run", lambda *_: works)
    found = kvikio_probe.probe(disk)
    assert found == facts or hangs, "the second time it is remembered"
    assert not (hangs and found.why_no_host), "what took too long is tried again"


@pytest.mark.slow
def test_gds_has_time_for_torch_and_cuda(
    disk: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _fake_kvikio(tmp_path, "import time; time.sleep(1.5)", monkeypatch)
    monkeypatch.setattr(kvikio_probe, "_gds_is_hopeless", lambda: "")
    monkeypatch.setitem(kvikio_probe.TIME_LIMITS_S, "host", 0.5)
    facts = kvikio_probe.probe(disk)
    assert "hung" in facts.why_no_host
    assert facts.why_no_gds
    assert "hung" not in facts.why_no_gds
    assert kvikio_probe.TIME_LIMITS_S["gds"] >= 60
