"""Files of /proc/self that stay open: to open one takes 80 us, and a free descriptor."""

import contextlib
import errno
import os
import weakref

from teraplan.errors import MappingError


class ProcFile:
    """One file, opened when it is first used. A forked child has its own."""

    def __init__(self, path: str, flags: int = os.O_RDONLY) -> None:
        self.path, self._flags = path, flags
        self._fd = -1
        _files.add(self)

    @property
    def fd(self) -> int:
        """Its descriptor.

        Raises:
            MappingError: it cannot be opened.
        """
        if self._fd < 0:
            try:
                self._fd = os.open(self.path, self._flags | os.O_CLOEXEC)
            except OSError as error:
                few = error.errno in (errno.EMFILE, errno.ENFILE)
                advice = "; raise the limit of open files (ulimit -n)" if few else ""
                raise self._error(error, "opened", advice) from error
        return self._fd

    def _error(self, error: OSError, done: str, advice: str = "") -> MappingError:
        what = f"{self.path}, which tells of this process's memory, cannot be {done}"
        return MappingError(error.errno, f"{what}: {error.strerror}{advice}")

    def read(self, nbytes: int, offset: int = 0) -> bytes:
        """As `os.pread`.

        Raises:
            MappingError: it cannot be read, or opened.
        """
        fd = self.fd
        try:
            return os.pread(fd, nbytes, offset)
        except OSError as error:
            raise self._error(error, "read") from error

    def read_all(self) -> str:
        """All of it, however long. Names of files in it may be in any encoding."""
        parts: list[bytes] = []
        while part := self.read(1 << 16, sum(map(len, parts))):
            parts.append(part)
        return b"".join(parts).decode(errors="surrogateescape")

    def write(self, text: bytes) -> None:
        """As `os.pwrite`, at the beginning."""
        os.pwrite(self.fd, text, 0)

    def close(self) -> None:
        """It will be opened anew."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


_files: "weakref.WeakSet[ProcFile]" = weakref.WeakSet()


def open_all() -> None:
    """Open those that there are now, while there are descriptors; who needs another hears of it."""
    for file in list(_files):
        with contextlib.suppress(MappingError):
            _ = file.fd


def _forget_in_child() -> None:  # they would tell of the parent
    for file in list(_files):
        file.close()


os.register_at_fork(after_in_child=_forget_in_child)
