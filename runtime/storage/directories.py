"""Opens the arena of a directory by the best way it allows, and says what it had to settle for."""

import logging
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path

from teraplan.errors import FallbackRefusedError, StorageUnusableError
from teraplan.runtime.storage.arena import Arena
from teraplan.runtime.storage.arena_file import check_directory, open_unnamed
from teraplan.runtime.storage.cache_directory import cache_home
from teraplan.runtime.storage.encrypted_arena import EncryptedArena
from teraplan.runtime.storage.file_system import DiskFacts, available_bytes, disk_facts
from teraplan.runtime.storage.kvikio_arena import KvikioGdsArena, KvikioHostArena
from teraplan.runtime.storage.kvikio_probe import probe
from teraplan.runtime.storage.memory_arena import MemoryArena, Room
from teraplan.runtime.storage.posix_arena import BufferedArena, DirectArena

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenedDirectory:
    """A directory whose arena is open."""

    directory: Path
    arena: Arena
    disk: DiskFacts
    fallbacks: tuple[str, ...]
    """What is not as it should be here, one sentence each."""


def open_directory(
    directory: Path, *, path: str, strict: bool, encrypt_for: int = 0
) -> OpenedDirectory:
    """An open arena in `directory`. `path` is "posix", "kvikio-host" or "kvikio-gds".

    What is written is encrypted if `encrypt_for`, the number of workers that will use it, is given.

    Raises:
        StorageUnusableError: no file can be made there, or kvikio does not work here.
        FallbackRefusedError: `strict`, and it would not be direct I/O on a disk.
    """
    check_directory(directory)
    reason = why_not(path, directory)
    if reason:
        raise StorageUnusableError(f"{path} cannot be used for {directory}: {reason}")
    disk = disk_facts(directory)
    fallbacks = _about_disk(directory, disk)
    _refuse_if(strict, fallbacks)
    fd = open_unnamed(directory)
    try:
        arena, refusal = _open_arena(fd, path)
        if refusal:
            fallbacks += (f"{directory} uses buffered I/O: {refusal}",)
        _refuse_if(strict, fallbacks)
        if disk.in_ram:
            arena.path = f"posix in {disk.file_system}, which is RAM"
        if encrypt_for:
            arena = EncryptedArena(arena, num_workers=encrypt_for)
    except BaseException as error:
        os.close(fd)
        if type(error) is OSError:
            raise StorageUnusableError(
                f"the first block in storage directory {directory} failed: {error.strerror}; "
                "name another one"
            ) from error
        raise
    return OpenedDirectory(directory=directory, arena=arena, disk=disk, fallbacks=fallbacks)


def open_memory(room: Room) -> OpenedDirectory:
    """Host memory as if it were a directory, as much as `room` has."""
    disk = DiskFacts(file_system="memory", device="", disk="")
    return OpenedDirectory(
        directory=Path("host memory"), arena=MemoryArena(room), disk=disk, fallbacks=()
    )


def why_not(path: str, directory: Path) -> str:
    """Why the back end `path` cannot be used for `directory`, "" if it can."""
    if path == "posix":
        return ""
    facts = probe(directory)
    return facts.why_no_gds if path == "kvikio-gds" else facts.why_no_host


def _refuse_if(strict: bool, fallbacks: tuple[str, ...]) -> None:
    if strict and fallbacks:
        raise FallbackRefusedError("; ".join(fallbacks))


def _open_arena(fd: int, path: str) -> tuple[Arena, str]:
    """The arena, and why it is not direct I/O ("" if it is)."""
    if path == "kvikio-host":
        host = KvikioHostArena.open(fd)
        return host, "" if host.is_direct else "kvikio reports no direct I/O for this file"
    if path == "kvikio-gds":
        return KvikioGdsArena.open(fd), ""
    opened = DirectArena.try_open(fd)
    if isinstance(opened, str):
        return BufferedArena(fd), opened
    return opened, ""


def _about_disk(directory: Path, disk: DiskFacts) -> tuple[str, ...]:
    if disk.in_ram:
        return (
            f"{directory} is on {disk.file_system}, which is RAM: what is spilled there saves no "
            "memory; name a directory on a disk",
        )
    if disk.over_network:
        return (
            f"{directory} is on {disk.file_system}, not on a local disk: it may be slow or stall; "
            "name a directory on a local disk",
        )
    return ()


def default_directory() -> Path:
    """A directory on a real disk for spill files: the one with the most free space.

    Candidates are $TMPDIR, /var/tmp, /tmp, the user's cache directory and the current directory;
    of several on one disk the first is taken.

    Raises:
        StorageUnusableError: none of them is writable and on a disk.
    """
    usable: dict[str, Path] = {}
    for candidate in _candidates():
        try:
            check_directory(candidate)
            disk = disk_facts(candidate)
        except OSError as error:
            _log.debug("not a default storage directory: %s", error)
            continue
        if not disk.in_ram and not disk.over_network:
            usable.setdefault(disk.device, candidate)
    if not usable:
        names = ", ".join(str(candidate) for candidate in _candidates())
        raise StorageUnusableError(
            f"none of {names} is a writable directory on a local disk; name a storage directory"
        )
    return max(usable.values(), key=available_bytes)


def _candidates() -> tuple[Path, ...]:
    named = Path(os.environ.get("TMPDIR") or tempfile.gettempdir())
    home = cache_home()
    here = Path(os.path.abspath(os.curdir)) if os.path.exists(os.curdir) else None
    last = tuple(path for path in (home, here) if path is not None)
    return (named, Path("/var/tmp"), Path("/tmp"), *last)
