"""Commands that look at this machine, with facts in the place of a machine."""

import sys
from pathlib import Path
from types import ModuleType

import pytest

from teraplan.cli import main
from teraplan.errors import StorageUnusableError
from teraplan.values.hardware import Link
from tests.cli.example_files import Captured, assert_one_line, loaded
from tests.report.example_plan import DISK, LINK
from tests.report.facts import Fact
from tests.report.golden import assert_golden


def install(monkeypatch: pytest.MonkeyPatch, name: str, **contents: object) -> None:
    """Puts a module of these contents in the place of `teraplan.runtime.NAME`."""
    module = ModuleType(f"teraplan.runtime.{name}")
    for key, value in contents.items():
        setattr(module, key, value)
    monkeypatch.setitem(sys.modules, module.__name__, module)


def test_doctor(monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    facts: tuple[Fact, ...] = (
        Fact(name="device", value="CPU", status="ok"),
        Fact(
            name="locked memory", value="8.00 MiB", status="warning", advice="ulimit -l unlimited"
        ),
        Fact(name="GPUDirect Storage", value="absent", status="note"),
    )
    asked: list[tuple[Path, ...]] = []

    def collect(directories: tuple[Path, ...]) -> tuple[Fact, ...]:
        asked.append(directories)
        return facts

    install(monkeypatch, "machine_facts", collect=collect)
    assert main(["doctor"]) == 0
    assert_golden("doctor.txt", capsys.readouterr().out.removesuffix("\n"))
    assert main(["doctor", "--strict", "--json", "--storage", "/a", "/b"]) == 1
    assert loaded(capsys)["num_warnings"] == 1
    assert asked == [(), (Path("/a"), Path("/b"))]
    assert main(["doctor", "--storage", "/a", "--storage", "/b", "/c"]) == 0
    assert asked[2:] == [(Path("/a"), Path("/b"), Path("/c"))]
    facts = facts[:1]
    assert main(["doctor", "--strict"]) == 0


def fast_host(device: str | None = None, *, refresh: bool) -> Link | None:
    return LINK


def test_probe(monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    refreshed: list[bool] = []

    def storage_link(directories: tuple[Path, ...], *, refresh: bool) -> Link:
        refreshed.append(refresh)
        return DISK

    install(monkeypatch, "links", host_link=fast_host, storage_link=storage_link)
    assert main(["probe", "--storage", "/a", "--refresh"]) == 0
    assert_golden("probe.txt", capsys.readouterr().out.removesuffix("\n"))
    assert main(["probe", "--storage", "/a", "--json"]) == 0
    assert loaded(capsys)["storage"]["latency_ns"] == 90_000
    assert refreshed == [True, False]
    for directories in (["/a", "/b"], ["/a", "--storage", "/b"]):
        assert main(["probe", "--storage", *directories, "--json"]) == 0
        assert list(loaded(capsys)) == ["/a", "/b", "host", "storage"]


def test_probe_without_accelerator(monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    def host_link(device: str | None = None, *, refresh: bool) -> Link | None:
        return LINK if device == "cpu" else None

    install(monkeypatch, "links", host_link=host_link, storage_link=None)
    assert main(["probe"]) == 0
    assert "Name directories with --storage" in capsys.readouterr().out
    assert main(["probe", "--json"]) == 0
    assert list(loaded(capsys)) == ["host"]


def test_an_error_of_the_storage_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    def storage_link(directories: tuple[Path, ...], *, refresh: bool) -> Link:
        raise StorageUnusableError("/a is read-only; name another directory")

    install(monkeypatch, "links", host_link=fast_host, storage_link=storage_link)
    assert main(["probe", "--storage", "/a"]) == 2
    assert_one_line(capsys, "teraplan probe: /a is read-only")
