"""Small facts about this machine that are slow to find out, kept in the user's cache directory.

One JSON file per fact, written to a temporary file and renamed, so that several processes may do it
at once. A file that is old, of another version or about something else is as good as none.
"""

import contextlib
import hashlib
import json
import logging
import os
import stat
import tempfile
import time
from pathlib import Path

_log = logging.getLogger(__name__)


def cache_home() -> Path | None:
    """The user's cache directory ($XDG_CACHE_HOME or ~/.cache), None without a home."""
    named = os.environ.get("XDG_CACHE_HOME")
    if named:
        return Path(named)
    try:
        return Path.home() / ".cache"
    except RuntimeError:  # a container's user that is in no passwd file
        return None


def load(key: str, *, version: int, max_age_s: float) -> dict[str, object] | None:
    """What was kept under `key`, None if there is nothing that can be used."""
    path = _path(key)
    if path is None:
        return None
    try:
        content = json.loads(path.read_text())
        is_usable = (
            content["version"] == version
            and content["key"] == key
            and 0 <= time.time() - content["time_s"] <= max_age_s
        )
        facts = content["facts"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return facts if is_usable and isinstance(facts, dict) else None


def keep(key: str, facts: dict[str, object], *, version: int) -> None:
    """Keeps `facts` under `key`; without a writable cache directory it is only logged."""
    path = _path(key)
    if path is None:
        return
    content = {"version": version, "key": key, "time_s": time.time(), "facts": facts}
    try:
        fd, name = tempfile.mkstemp(dir=path.parent, prefix=".new-")
        try:
            with open(fd, "w") as file:
                json.dump(content, file, indent=1, sort_keys=True)
            os.replace(name, path)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(name)
            raise
    except OSError as error:
        _log.debug("could not keep %s: %s", key, error)


def boot_id() -> str:
    """What changes with every boot of this machine."""
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return "unknown"


def _path(key: str) -> Path | None:
    home = cache_home()
    if home is None:
        return None
    directory = home / "teraplan"
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        facts = directory.lstat()
    except OSError as error:
        _log.debug("no cache directory: %s", error)
        return None
    if not stat.S_ISDIR(facts.st_mode) or facts.st_uid != os.geteuid():
        _log.debug("%s belongs to somebody else and is not used", directory)
        return None
    return directory / f"{hashlib.sha256(key.encode()).hexdigest()[:24]}.json"
