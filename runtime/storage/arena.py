"""One arena file as the queue sees it: blocks go out, blocks come back, the file grows.

The base class is all that a back end has to be; the queue, the extents, the checksums' bookkeeping
and the errors' wording are shared.
"""

import errno
import logging
import os
from abc import ABC, abstractmethod
from functools import partial
from os import posix_fallocate
from pathlib import Path

from teraplan.runtime.storage.bounded_call import BoundedCall
from teraplan.runtime.storage.file_system import available_bytes
from teraplan.runtime.storage.lane import Lane
from teraplan.runtime.storage.memory import digest
from teraplan.units import MIB

_log = logging.getLogger(__name__)
_CANNOT_FALLOCATE = frozenset({errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS})


class ShortTransferError(OSError):
    """The file ended before all bytes came back; in an OSError's clothes for the worker."""

    def __init__(self, expected: int, got: int) -> None:
        super().__init__(errno.EIO, f"the file ended after {got} of {expected} bytes")


class Arena(ABC):
    """A growing file. Methods may be called from several threads at once.

    Attributes:
        path: how bytes reach the disk, as shown to people: "posix O_DIRECT".
        memory_alignment: addresses of chunks are multiples of it.
        block_bytes: file offsets and lengths of chunks are multiples of it.
        takes_device_memory: addresses are those of the accelerator, not of the host.
        grow_bytes: what the file grows by at least, if there is so much.
        room: what people call the space that the file grows into: "free on disk".
        remedy: what people can do where the file cannot grow.
        patience_s: how long a disk may take to make the file longer.
    """

    path: str
    memory_alignment: int
    block_bytes: int
    takes_device_memory: bool = False
    grow_bytes: int = 256 * MIB
    room: str = "free on disk"
    remedy: str = "free space there, or name another storage directory"
    patience_s: float = 60.0

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._growth = BoundedCall()

    @property
    def hangs(self) -> bool:
        """True if the disk does not answer, and may still do something with the file."""
        return self._growth.hangs

    def stop_growing(self) -> bool:
        """See that the file does not grow any more; False if the disk does not answer."""
        return self._growth.end()

    @abstractmethod
    def write(self, address: int, nbytes: int, offset: int) -> None:
        """Writes all of memory [address, +nbytes) to the file at `offset`, or raises OSError."""

    @abstractmethod
    def read(self, address: int, nbytes: int, offset: int) -> None:
        """Reads all of `nbytes` at `offset` of the file into memory, or raises OSError."""

    def lane(self) -> Lane | None:
        """Moves the same bytes without Python's lock; None where that cannot be."""
        return None

    def checksum(self, address: int, nbytes: int) -> int:
        """64-bit fingerprint of memory [address, address + nbytes)."""
        return digest(address, nbytes)

    def grow(self, size_bytes: int, nbytes: int) -> None:
        """Makes the file of `size_bytes` longer by `nbytes`, with blocks behind it.

        Raises:
            OSError: ENOSPC, EDQUOT or EFBIG; the file is then as before. ETIMEDOUT: the disk does
                not answer.
        """
        self._growth.make(partial(self._grow, size_bytes, nbytes), self.patience_s)

    def _grow(self, size_bytes: int, nbytes: int) -> None:
        try:
            posix_fallocate(self.fd, size_bytes, nbytes)
        except OSError as error:
            if error.errno not in _CANNOT_FALLOCATE:
                os.ftruncate(self.fd, size_bytes)  # a part may have been reserved
                raise
            _log.debug("file system cannot preallocate; a full disk will show in a write")
            os.ftruncate(self.fd, size_bytes + nbytes)

    def available_bytes(self, directory: Path) -> int:
        """How much longer the file, which is in `directory`, can get."""
        return available_bytes(directory)

    def close(self) -> None:
        """Closes, and as the file has no name thereby deletes it. Call it with no I/O running."""
        os.close(self.fd)

    def forget(self) -> None:
        """In a forked child: closes the child's own copy of the descriptor, nothing else."""
        os.close(self.fd)
