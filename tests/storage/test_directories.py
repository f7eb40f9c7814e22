"""Which directories are taken, which are refused, and what is said about them."""

import errno
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

from teraplan.errors import ConfigError, FallbackRefusedError, StorageUnusableError
from teraplan.runtime.storage import (
    Storage,
    default_directory,
    directories,
    file_system,
    kvikio_arena,
    posix_arena,
)
from teraplan.runtime.storage.kvikio_probe import KvikioFacts
from tests.fakes.faulty_calls import Fault, injected

SHM = Path("/dev/shm")
needs_tmpfs = pytest.mark.skipif(
    not SHM.is_dir() or file_system.disk_facts(SHM).file_system != "tmpfs",
    reason="needs a tmpfs at /dev/shm",
)


def _no_alignment(fd: int) -> None:
    """What a kernel says about a file that has no direct I/O."""


def _nfs(directory: Path) -> str:
    return "nfs"


def _tmpfs(directory: Path) -> str:
    return "tmpfs"


def test_a_missing_directory_is_named(disk: Path) -> None:
    with pytest.raises(StorageUnusableError, match=r"absent cannot be used: No such file"):
        Storage.open([disk, disk / "absent"])


def test_a_file_is_no_directory(disk: Path) -> None:
    (disk / "file").touch()
    with pytest.raises(StorageUnusableError, match="file is not a directory"):
        Storage.open([disk / "file"])
    with pytest.raises(StorageUnusableError, match="Not a directory"):
        Storage.open([disk / "file" / "below"])


def test_a_disk_that_fails_at_once_is_refused(disk: Path) -> None:
    with (
        injected(Fault(call="write", what=errno.EIO, at=1)),
        pytest.raises(StorageUnusableError, match=r"the first block in .* failed: Input/output"),
    ):
        Storage.open([disk])


def test_a_read_only_file_system_is_refused() -> None:
    read_only = [
        Path(line.split()[4])
        for line in Path("/proc/self/mountinfo").read_text().splitlines()
        if "ro" in line.split()[5].split(",") and Path(line.split()[4]).is_dir()
    ]
    if not read_only:
        pytest.skip("nothing is mounted read-only here")
    with pytest.raises(StorageUnusableError, match="read-only file system; name another one"):
        Storage.open([read_only[0]])


def test_a_directory_without_permission_is_refused(disk: Path) -> None:
    closed = disk / "closed"
    closed.mkdir(mode=0o500)
    program = (
        "import pathlib, sys, os\n"
        "from teraplan.errors import StorageUnusableError\n"
        "from teraplan.runtime.storage import Storage\n"
        "if os.geteuid() == 0: os.seteuid(65534)\n"
        "try: Storage.open([pathlib.Path(sys.argv[1])])\n"
        "except StorageUnusableError as error: print(error)\n"
    )
    closed.parent.chmod(0o755)
    done = subprocess.run(
        [sys.executable, "-c", program, str(closed)], capture_output=True, text=True, timeout=60
    )
    assert "permission denied; change its mode or name another one" in done.stdout, done.stderr


@pytest.mark.parametrize(
    ("names", "path", "message"),
    [([], "auto", "no storage directory was named"), ([Path("/")], "fast", "'fast' is no storage")],
)
def test_wrong_options_are_config_errors(names: list[Path], path: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Storage.open(names, path=path)


@needs_tmpfs
def test_ram_is_not_a_disk(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING), Storage.open([SHM]) as storage:
        (info,) = storage.stores
    assert info.file_system == "tmpfs"
    assert "is RAM" in info.path
    assert len(info.fallbacks) == 1
    assert [record.message for record in caplog.records] == [f"storage: {info.fallbacks[0]}"]
    with pytest.raises(FallbackRefusedError, match="/dev/shm is on tmpfs, which is RAM"):
        Storage.open([SHM], strict=True)


def test_buffered_io_is_said_and_refused_when_strict(
    disk: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(posix_arena, "direct_alignment", _no_alignment)
    with caplog.at_level(logging.WARNING), Storage.open([disk]) as storage:
        (info,) = storage.stores
    assert info.path == "posix buffered"
    assert "uses buffered I/O: the kernel reports no direct I/O" in info.fallbacks[0]
    assert info.fallbacks[0] in caplog.text
    with pytest.raises(FallbackRefusedError, match="uses buffered I/O"):
        Storage.open([disk], strict=True)


def test_a_network_file_system_is_said(
    disk: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(file_system, "_file_system", _nfs)
    with caplog.at_level(logging.WARNING), Storage.open([disk]) as storage:
        assert "is on nfs, not on a local disk" in storage.stores[0].fallbacks[0]
    with pytest.raises(FallbackRefusedError, match="is on nfs"):
        Storage.open([disk], strict=True)


def test_directories_on_one_disk_are_said(disk: Path, caplog: pytest.LogCaptureFixture) -> None:
    other = disk / "same"
    other.mkdir(exist_ok=True)
    with (
        caplog.at_level(logging.WARNING),
        Storage.open([disk, other]) as both,
        Storage.open([disk]) as one,
    ):
        assert abs(both.free_bytes - one.free_bytes) < 1 << 30, "one disk was counted twice"
    assert "are on the same disk" in caplog.text


def test_the_default_directory_is_on_a_disk_and_works(monkeypatch: pytest.MonkeyPatch) -> None:
    if SHM.is_dir():
        monkeypatch.setenv("TMPDIR", str(SHM))
    directory = default_directory()
    assert not file_system.disk_facts(directory).in_ram
    with Storage.open([directory]) as storage:
        assert storage.stores[0].free_bytes > 0


def test_no_default_directory_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_system, "_file_system", _tmpfs)
    with pytest.raises(StorageUnusableError, match="is a writable directory on a local disk"):
        default_directory()


def test_alignment_is_what_the_kernel_says(disk: Path) -> None:
    fd = os.open(disk, os.O_TMPFILE | os.O_RDWR, 0o600)
    try:
        alignment = file_system.direct_alignment(fd)
    finally:
        os.close(fd)
    assert alignment is not None
    assert 4096 % alignment.memory == 0
    assert alignment.offset % 512 == 0


def test_a_path_that_does_not_work_here_is_refused_with_its_reason(
    disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def probe(directory: Path) -> KvikioFacts:
        return KvikioFacts(version="", why_no_host="no libcuda", why_no_gds="no nvidia-fs")

    monkeypatch.setattr(directories, "probe", probe)
    with pytest.raises(StorageUnusableError, match=r"kvikio-host cannot be used .*: no libcuda"):
        Storage.open([disk], path="kvikio-host")
    with pytest.raises(StorageUnusableError, match=r"kvikio-gds cannot be used .*: no nvidia-fs"):
        Storage.open([disk], path="kvikio-gds")
    with Storage.open([disk], device_memory=True) as storage:  # auto: GDS was not proved
        assert not storage.takes_device_memory
        assert storage.stores[0].path == "posix O_DIRECT"


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("posix_io.hpp:173: POSIX error on pwrite: No space left on device", errno.ENOSPC),
        ("posix_io.hpp:173: POSIX error on pread: Input/output error", errno.EIO),
        ("posix_io.hpp:173: POSIX error on pread: EOF", errno.EIO),
        ("something nobody has seen", errno.EIO),
    ],
)
def test_words_of_kvikio_become_error_numbers(text: str, code: int) -> None:
    error = kvikio_arena._with_errno(RuntimeError(text), 10)
    assert error.errno == code


def test_disks_below_a_volume_and_their_place_on_pcie(
    tmp_path: Path, disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pci = tmp_path / "devices/pci0000:40/0000:40:01.1/0000:41:00.0/nvme/nvme0"
    whole, volume = pci / "nvme0n1", tmp_path / "devices/virtual/block/dm-0"
    part = whole / "nvme0n1p2"
    for folder in (part, volume / "slaves", tmp_path / "dev/block"):
        folder.mkdir(parents=True)
    (part / "partition").write_text("2")
    (volume / "slaves" / "nvme0n1p2").symlink_to(part)
    number = os.stat(disk).st_dev
    link = tmp_path / f"dev/block/{os.major(number)}:{os.minor(number)}"
    link.symlink_to(volume)
    device = tmp_path / "bus/pci/devices/0000:41:00.0"
    device.mkdir(parents=True)
    for name, text in (
        ("numa_node", "1\n"),
        ("current_link_speed", "16.0 GT/s PCIe\n"),
        ("current_link_width", "4\n"),
    ):
        (device / name).write_text(text)
    monkeypatch.setattr(file_system, "_SYS", tmp_path)
    facts = file_system.disk_facts(disk)
    assert facts.physical == {"nvme0n1"}
    assert facts.disk == "nvme0n1 (nvme)"
    assert facts.neighbourhood == ("nvme0n1 at 0000:41:00.0, NUMA node 1, 16.0 GT/s PCIe x4",)
    (device / "numa_node").write_text("-1\n")
    (device / "current_link_width").unlink()
    assert file_system.disk_facts(disk).neighbourhood == ("nvme0n1 at 0000:41:00.0",)
