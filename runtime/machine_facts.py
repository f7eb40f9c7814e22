"""What about this machine matters for moving tensors: the lines of `teraplan doctor`.

Nothing is assumed to exist: a fact that cannot be found out says so, and the rest goes on.
"""

import ctypes.util
import os
import platform
import resource
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

import torch

from teraplan.errors import StorageError
from teraplan.runtime.cpu import allocator as cpu_allocator
from teraplan.runtime.process.control_groups import limited_groups
from teraplan.runtime.storage import default_directory
from teraplan.runtime.storage.directories import open_directory
from teraplan.runtime.storage.disk_counters import DiskCounters, disk_counters
from teraplan.runtime.storage.file_system import available_bytes, direct_alignment
from teraplan.runtime.storage.kvikio_probe import probe
from teraplan.units import GIB, format_nbytes

_LITTLE_SPACE_BYTES = 16 * GIB
_WORN_SHARE = 0.9


class Status(StrEnum):
    """How good a fact is."""

    OK = "ok"
    NOTE = "note"
    WARNING = "warning"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fact:
    """One thing that was found out about the machine."""

    name: str
    value: str
    status: Status = Status.OK
    advice: str = ""
    """What to do about it, "" if nothing."""


def collect(directories: Sequence[Path] = ()) -> tuple[Fact, ...]:
    """Facts about software, accelerators, memory, and `directories` (or the default one).

    Takes seconds at most; the probe of kvikio is bounded and remembered per boot.
    """
    return (*_software(), *_accelerators(), *_memory(), *_direct_paths(directories))


def _software() -> Iterator[Fact]:
    yield Fact(name="system", value=f"{platform.system()} {platform.release()}")
    yield Fact(name="python", value=platform.python_version())
    yield Fact(name="torch", value=torch.__version__)


def _accelerators() -> Iterator[Fact]:
    if not torch.accelerator.is_available():
        advice = ""
        if Path("/dev/nvidia0").exists() or Path("/dev/kfd").exists():
            advice = (
                "a GPU is there, but this torch does not see it: check torch's build and driver"
            )
        status = Status.WARNING if advice else Status.NOTE
        value = "none; the CPU is the device"
        yield Fact(name="accelerator", value=value, status=status, advice=advice)
        return
    for index in range(torch.accelerator.device_count()):
        yield Fact(name=f"accelerator {index}", value=_device_text(index))
    yield _driver()


def _device_text(index: int) -> str:
    """Not run on a GPU yet."""
    found = torch.accelerator.current_accelerator()
    assert found is not None, "an accelerator is available and has a type"
    module = torch.get_device_module(found)
    properties = module.get_device_properties(index)
    return f"{found.type} {properties.name}, {format_nbytes(properties.total_memory)}"


def _driver() -> Fact:
    try:
        text = Path("/proc/driver/nvidia/version").read_text().splitlines()[0]
    except (OSError, IndexError):
        return Fact(name="driver", value="unknown", status=Status.NOTE)
    return Fact(name="driver", value=text.removeprefix("NVRM version:").strip())


def _memory() -> Iterator[Fact]:
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    yield Fact(name="memory", value=format_nbytes(total))
    yield _cgroup(total)
    yield _locked_memory()
    yield _huge_pages()
    yield _memory_of_tensors()


def _memory_of_tensors() -> Fact:
    name = "memory of CPU tensors"
    refusal = cpu_allocator.install()
    if not refusal:
        return Fact(name=name, value="a pool of large blocks")
    return Fact(
        name=name,
        value="the C library's heap",
        status=Status.WARNING,
        advice=f"the heap keeps much of what is freed; a pool needs a C++ compiler: {refusal}",
    )


def _cgroup(total: int) -> Fact:
    limit = min((group.limit_bytes for group in limited_groups()), default=total)
    if limit >= total:
        return Fact(name="cgroup limit", value="none")
    advice = "budgets count against this limit, not against the machine's memory"
    value = format_nbytes(limit)
    return Fact(name="cgroup limit", value=value, status=Status.NOTE, advice=advice)


def _locked_memory() -> Fact:
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if limit == resource.RLIM_INFINITY:
        return Fact(name="locked memory", value="unlimited")
    advice = ""
    if torch.accelerator.is_available() and os.geteuid() != 0:
        advice = "pinned host memory may fail; raise `ulimit -l`"
    status = Status.NOTE if advice else Status.OK
    return Fact(name="locked memory", value=format_nbytes(limit), status=status, advice=advice)


def _huge_pages() -> Fact:
    try:
        text = Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text()
        value = text[text.index("[") + 1 : text.index("]")]
    except (OSError, ValueError):
        return Fact(name="huge pages", value="unknown", status=Status.NOTE)
    return Fact(name="huge pages", value=value)


def _direct_paths(directories: Sequence[Path]) -> Iterator[Fact]:
    yield _gds_parts()
    try:
        chosen = [Path(directory) for directory in directories] or [default_directory()]
    except StorageError as error:
        yield Fact(name="storage", value="none", status=Status.WARNING, advice=str(error))
        return
    yield from _kvikio(chosen[0])
    for directory in chosen:
        yield from _directory(directory)


def _gds_parts() -> Fact:
    library = ctypes.util.find_library("cufile") or "no cuFile library"
    parts = {
        "nvidia-fs": Path("/proc/driver/nvidia-fs"),
        "/run/udev": Path("/run/udev"),
        "/proc/modules": Path("/proc/modules"),
    }
    found = [f"{name} {'there' if path.exists() else 'missing'}" for name, path in parts.items()]
    return Fact(name="GPUDirect Storage", value=", ".join([library, *found]), status=Status.NOTE)


def _kvikio(directory: Path) -> Iterator[Fact]:
    try:
        facts = probe(directory)
    except OSError as error:
        yield Fact(name="kvikio", value="not tried", status=Status.NOTE, advice=str(error))
        return
    host = "works" if not facts.why_no_host else f"does not work ({facts.why_no_host})"
    gds = "works" if not facts.why_no_gds else f"is not used ({facts.why_no_gds})"
    if not facts.version:
        yield Fact(name="kvikio", value="not installed", status=Status.NOTE)
        return
    status = Status.OK if not facts.why_no_gds else Status.NOTE
    yield Fact(
        name="kvikio", value=f"{facts.version}; host memory {host}; GDS {gds}", status=status
    )


def _directory(directory: Path) -> Iterator[Fact]:
    name = str(directory)
    try:
        opened = open_directory(directory, path="posix", strict=False)
        alignment = direct_alignment(opened.arena.fd)
        opened.arena.close()
        free = available_bytes(directory)
    except StorageError as error:
        yield Fact(name=name, value="cannot be used", status=Status.WARNING, advice=str(error))
        return
    disk = opened.disk
    where = f"{disk.file_system}, {disk.disk or f'device {disk.device}'}"
    yield Fact(
        name=name,
        value=opened.arena.path if disk.in_ram else f"{opened.arena.path} on {where}",
        status=Status.WARNING if opened.fallbacks else Status.OK,
        advice="\n".join(opened.fallbacks),
    )
    if alignment is not None:
        value = f"memory {alignment.memory} B, file {alignment.offset} B"
        yield Fact(name=f"{name}: direct I/O alignment", value=value)
    is_little = free < _LITTLE_SPACE_BYTES
    yield Fact(
        name=f"{name}: free",
        value=format_nbytes(free),
        status=Status.WARNING if is_little else Status.OK,
        advice="little room for spilled tensors; name a larger disk" if is_little else "",
    )
    for neighbourhood in disk.neighbourhood:
        yield Fact(name=f"{name}: PCIe", value=neighbourhood)
    for physical in sorted(disk.physical):
        yield _wear(name, disk_counters(physical))
    if "rotating" in disk.disk:
        advice = "a rotating disk moves some 0.2 GB/s; name a directory on an SSD"
        yield Fact(name=f"{name}: disk", value=disk.disk, status=Status.WARNING, advice=advice)


def _wear(name: str, counters: DiskCounters) -> Fact:
    is_worn = counters.is_failing or (counters.used_share or 0.0) >= _WORN_SHARE
    status = Status.NOTE if counters.why_no_smart else Status.OK
    return Fact(
        name=f"{name}: wear",
        value=str(counters),
        status=Status.WARNING if is_worn else status,
        advice="the disk is near its end; what is spilled there wears it further"
        if is_worn
        else "",
    )
