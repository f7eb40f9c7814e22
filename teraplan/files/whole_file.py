"""Files that are written whole or not at all."""

import contextlib
import errno
import os
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def whole_file(path: Path, mode: int = 0o666) -> Iterator[Path]:
    """A file to write to; it takes the place of `path` when the block ends well.

    A link stays one, and what it names is replaced. What is no file, such as a pipe or a device,
    stays what it is: there what was written is written once more. `mode` is that of a new file,
    less the umask; one that was there keeps its own.

    Raises:
        OSError: it cannot be written there.
    """
    there = path.stat().st_mode if path.exists() else None
    special = there is not None and not stat.S_ISREG(there)
    target = path if special else Path(os.path.realpath(path))  # a pipe's name leads nowhere
    part = _part(path, None if special else target.parent)
    try:
        yield part
        if special:
            with target.open("wb") as file:
                file.write(part.read_bytes())
            return
        umask = os.umask(0)
        os.umask(umask)
        part.chmod(mode & ~umask if there is None else stat.S_IMODE(there))
        part.replace(target)
    finally:
        with contextlib.suppress(FileNotFoundError):
            part.unlink()


def require_place(path: Path) -> None:
    """Does nothing if a file can be written there; nothing is left, and what is there stays.

    Raises:
        OSError: it cannot.
    """
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if not path.exists() or path.is_file():
        _part(path, Path(os.path.realpath(path)).parent).unlink()


def _part(path: Path, directory: Path | None) -> Path:
    """A new empty file beside `path`, or where such files go."""
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".part", dir=directory)
    os.close(handle)
    return Path(name)
