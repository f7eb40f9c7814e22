"""Memory limits of the control groups that this process is in, each within the one above it.

    /proc/self/cgroup      0::/user.slice/job      or, version 1, 4:memory:/job
    /sys/fs/cgroup         user.slice/job/memory.max, user.slice/memory.max

A container may not see the groups that it is in from outside; those that it does see count.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

_OF_PROCESS = Path("/proc/self/cgroup")
_ROOT = Path("/sys/fs/cgroup")


@dataclass(frozen=True, slots=True)
class _Version:
    """Where one of the two versions of Linux's interface has its numbers."""

    folder: str
    limit: str
    usage: str
    cache: str
    """In `memory.stat`: pages of files that are given back when memory is short."""


_FIRST = _Version("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
_SECOND = _Version("", "memory.max", "memory.current", "inactive_file")


@dataclass(frozen=True, slots=True)
class GroupMemory:
    """What one control group may take, and takes."""

    limit_bytes: int
    usage_bytes: int
    """Without what is given back when memory is short."""

    @property
    def free_bytes(self) -> int:
        """What is left."""
        return max(0, self.limit_bytes - self.usage_bytes)


def limited_groups(of_process: Path = _OF_PROCESS, root: Path = _ROOT) -> Iterator[GroupMemory]:
    """Those of this process's groups, from its own one up, whose memory is limited."""
    for version, group in _groups(of_process):
        for parent in (group, *group.parents):
            found = _read(root / version.folder / parent.relative_to("/"), version)
            if found is not None:
                yield found


def _groups(of_process: Path) -> Iterator[tuple[_Version, PurePosixPath]]:
    """The process's group in each version that counts memory."""
    try:
        lines = of_process.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            yield _SECOND, PurePosixPath(path)
        elif "memory" in controllers.split(","):
            yield _FIRST, PurePosixPath(path)


def _read(folder: Path, version: _Version) -> GroupMemory | None:
    """None if it has no limit, or cannot be seen."""
    try:
        limit = (folder / version.limit).read_text().strip()
        usage_bytes = int((folder / version.usage).read_text())
        fields = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return None
    if limit == "max":
        return None
    cache_bytes = int(fields.get(version.cache, 0))
    return GroupMemory(int(limit), max(0, usage_bytes - cache_bytes))
