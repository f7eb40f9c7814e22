"""What a directory lies on: file system, alignment that direct I/O needs, kind of disk.

Everything here is read from the kernel (statfs, statx, sysfs); nothing is guessed from names of
paths. tmpfs accepts O_DIRECT on current kernels, so "O_DIRECT could be opened" does not prove that
the bytes leave RAM: the file system's magic number does.
"""

import ctypes
import os
import re
from dataclasses import dataclass
from pathlib import Path

_NAMES = {
    0x01021994: "tmpfs",
    0x858458F6: "ramfs",
    0x6969: "nfs",
    0x65735546: "fuse",
    0xFF534D42: "cifs",
    0xFE534D42: "smb2",
    0x01021997: "9p",
    0x00C36400: "ceph",
    0x5346414F: "afs",
    0xEF53: "ext4",
    0x58465342: "xfs",
    0x9123683E: "btrfs",
    0x794C7630: "overlay",
    0x2FC12FC1: "zfs",
    0xF2F52010: "f2fs",
    0x0BD00BD0: "lustre",
    0x47504653: "gpfs",
    0xCA451A4E: "bcachefs",
}
_IN_RAM = frozenset({"tmpfs", "ramfs"})
# Parallel file systems (lustre, gpfs) are left out: they are built for this kind of traffic.
_OVER_NETWORK = frozenset({"nfs", "fuse", "cifs", "smb2", "9p", "ceph", "afs"})

_AT_EMPTY_PATH = 0x1000
_STATX_DIOALIGN = 0x2000
_FALLBACK_ALIGNMENT = 4096

_SYS = Path("/sys")
_PCI_ADDRESS = re.compile(r"[0-9a-f]{4}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")

_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskFacts:
    """What a directory lies on."""

    file_system: str
    device: str
    """Major and minor number of the block device, "254:0"; of an anonymous one for tmpfs."""
    disk: str
    """Name and kind of the disk from sysfs: "vda (virtual)", "nvme0n1 (nvme)", "" if unknown."""
    physical: frozenset[str] = frozenset()
    """Names of the disks that it is made of: one, or those below a RAID or a logical volume."""
    neighbourhood: tuple[str, ...] = ()
    """Of each physical disk on PCIe: "nvme0n1 at 0000:41:00.0, NUMA node 1, 16.0 GT/s PCIe x4"."""

    @property
    def in_ram(self) -> bool:
        """Whether files here are memory, not disk."""
        return self.file_system in _IN_RAM

    @property
    def over_network(self) -> bool:
        """Whether another machine or a user-space process serves the files."""
        return self.file_system in _OVER_NETWORK


@dataclass(frozen=True, slots=True, kw_only=True)
class DirectAlignment:
    """What O_DIRECT wants: memory addresses, and file offsets and lengths."""

    memory: int
    offset: int


def disk_facts(directory: Path) -> DiskFacts:
    """What `directory` lies on."""
    device = os.stat(directory).st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    link = _SYS / "dev" / "block" / number
    disks = _physical(link.resolve()) if link.exists() else []
    return DiskFacts(
        file_system=_file_system(directory),
        device=number,
        disk=", ".join(f"{block.name} ({_disk_kind(block)})" for block in disks),
        physical=frozenset(block.name for block in disks),
        neighbourhood=tuple(filter(None, map(_neighbourhood, disks))),
    )


def direct_alignment(fd: int) -> DirectAlignment | None:
    """Alignment of direct I/O on the regular file `fd`; None: the kernel says it has none.

    Kernels before 6.1 and file systems that do not tell get 4096, which satisfies every disk.
    """
    buffer = ctypes.create_string_buffer(256)
    statx = getattr(_libc, "statx", None)
    failed = statx is None or statx(fd, b"", _AT_EMPTY_PATH, _STATX_DIOALIGN, buffer) != 0
    if failed or not int.from_bytes(buffer.raw[0:4], "little") & _STATX_DIOALIGN:
        return DirectAlignment(memory=_FALLBACK_ALIGNMENT, offset=_FALLBACK_ALIGNMENT)
    memory = int.from_bytes(buffer.raw[0x98:0x9C], "little")
    offset = int.from_bytes(buffer.raw[0x9C:0xA0], "little")
    if memory == 0 or offset == 0:
        return None
    return DirectAlignment(memory=memory, offset=offset)


def available_bytes(directory: Path) -> int:
    """Bytes that this user may still write to the file system of `directory`.

    None in a directory that has disappeared, which is no error here: its file is still open.
    """
    try:
        facts = os.statvfs(directory)
    except OSError:
        return 0
    return facts.f_bavail * facts.f_frsize


def _file_system(directory: Path) -> str:
    buffer = ctypes.create_string_buffer(256)
    if _libc.statfs(os.fsencode(directory), buffer) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), str(directory))
    magic = int.from_bytes(buffer.raw[0:4], "little")
    return _NAMES.get(magic, f"0x{magic:x}")


def _physical(block: Path) -> list[Path]:
    """The disks that a block device is made of, in the order of their names."""
    below = block / "slaves"
    parts = sorted(below.iterdir()) if below.is_dir() else []
    if parts:
        return [disk for part in parts for disk in _physical(part.resolve())]
    return [block.parent if (block / "partition").exists() else block]


def _neighbourhood(block: Path) -> str:
    """Where a disk is on PCIe, "" if it is not."""
    addresses = _PCI_ADDRESS.findall(str(block))
    if not addresses:
        return ""
    device = _SYS / "bus" / "pci" / "devices" / addresses[-1]
    node, speed, width = (
        _sysfs_text(device / name)
        for name in ("numa_node", "current_link_speed", "current_link_width")
    )
    parts = [f"{block.name} at {addresses[-1]}"]
    if node and node != "-1":  # one node only, or a firmware that does not tell
        parts.append(f"NUMA node {node}")
    if speed and width:
        parts.append(f"{speed} x{width}")
    return ", ".join(parts)


def _sysfs_text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def _disk_kind(block: Path) -> str:
    if block.name.startswith("nvme"):
        return "nvme"
    if block.name.startswith(("vd", "xvd", "loop", "ram", "zram")):
        return "virtual"
    rotational = _sysfs_text(block / "queue" / "rotational")
    if not rotational:
        return "unknown"
    return "rotating" if rotational == "1" else "ssd"
