"""The file that spilled bytes lie in: private, without a name, gone with its process.

Where the file system can (O_TMPFILE) the file never has a name; else it is made with a random name
in a fresh private directory and unlinked before a byte is written. Either way `kill -9` leaves
nothing behind, and no other user can open it. `/proc/self/fd/N` still opens it again, which is how
libraries that want a path (kvikio) get at it.
"""

import contextlib
import errno
import os
import secrets
import stat
import tempfile
import time
from os import open as open_file
from pathlib import Path

from teraplan.errors import StorageUnusableError

_PREFIX = "teraplan-"
_STALE_AFTER_S = 60.0
_NO_UNNAMED_FILES = frozenset({errno.EOPNOTSUPP, errno.EISDIR, errno.ENOENT, errno.EINVAL})


def check_directory(directory: Path) -> None:
    """Nothing, if files can be made in `directory`.

    Raises:
        StorageUnusableError: it is missing, not a directory, or may not be written.
    """
    try:
        mode = os.stat(directory).st_mode
    except OSError as error:
        raise StorageUnusableError(
            f"storage directory {directory} cannot be used: {error.strerror}; "
            "make it or name another one"
        ) from error
    if not stat.S_ISDIR(mode):
        raise StorageUnusableError(f"storage directory {directory} is not a directory")
    if os.statvfs(directory).f_flag & os.ST_RDONLY:
        raise StorageUnusableError(
            f"storage directory {directory} is on a read-only file system; name another one"
        )
    if not os.access(directory, os.W_OK | os.X_OK, effective_ids=True):
        raise StorageUnusableError(
            f"storage directory {directory} cannot be written by user {os.geteuid()}: "
            "permission denied; change its mode or name another one"
        )


def open_unnamed(directory: Path) -> int:
    """Descriptor of a new empty file in `directory` that has no name (any more), mode 0600.

    Raises:
        StorageUnusableError: no file can be made there.
    """
    flags = os.O_RDWR | os.O_CLOEXEC
    try:
        try:
            return open_file(directory, flags | os.O_TMPFILE, 0o600)
        except OSError as error:
            if error.errno not in _NO_UNNAMED_FILES:
                raise
        return _open_and_unlink(directory, flags)
    except OSError as error:
        raise StorageUnusableError(
            f"no file can be made in storage directory {directory}: {error.strerror}; "
            "name another one"
        ) from error


def _open_and_unlink(directory: Path, flags: int) -> int:
    sweep(directory)
    private = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=directory))  # mode 0700
    name = private / secrets.token_hex(16)
    try:
        fd = open_file(name, flags | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        os.unlink(name)
    finally:
        # NFS keeps an unlinked open file as .nfs*: the directory then stays for the next sweep.
        with contextlib.suppress(OSError):
            os.rmdir(private)
    return fd


def sweep(directory: Path) -> None:
    """Removes what a run that died between making and unlinking its file left in `directory`.

    A live run needs the name for microseconds only, so what is a minute old is dead.
    """
    for entry in directory.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):
            facts = entry.lstat()
            is_ours = stat.S_ISDIR(facts.st_mode) and facts.st_uid == os.geteuid()
            if is_ours and time.time() - facts.st_mtime > _STALE_AFTER_S:
                for left in entry.iterdir():
                    left.unlink()
                entry.rmdir()
