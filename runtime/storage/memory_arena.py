"""A file in the memory of the host that no page of this process is mapped to.

What lies in it is no part of the process's resident set, so that on a CPU, whose device memory is
that set, it can be another tier. The kernel may swap it out; under a cgroup's limit it counts.
"""

import errno
import os
from pathlib import Path
from typing import Protocol, final

from teraplan.runtime.storage.arena import Arena, ShortTransferError
from teraplan.runtime.storage.memory import view


class Room(Protocol):
    """Host memory that the file may take."""

    @property
    def free_bytes(self) -> int:
        """So much is left."""
        ...

    def give_up(self, nbytes: int) -> bool:
        """Take so much for good; False if there is not so much left."""
        ...


@final
class MemoryArena(Arena):
    """Never longer than it may be: a page of it takes memory from its first write on, for good."""

    path = "host memory"
    grow_bytes = 0
    room = "left of host_budget"
    remedy = "raise host_budget"
    memory_alignment = 1
    block_bytes = 1

    def __init__(self, room: Room) -> None:
        super().__init__(os.memfd_create("teraplan-host", os.MFD_CLOEXEC))
        self._room = room

    def write(self, address: int, nbytes: int, offset: int) -> None:
        """Copies from tensor memory."""
        done = 0
        while done < nbytes:
            done += os.pwrite(self.fd, view(address + done, nbytes - done), offset + done)

    def read(self, address: int, nbytes: int, offset: int) -> None:
        """Copies into tensor memory."""
        done = 0
        while done < nbytes:
            got = os.preadv(self.fd, [view(address + done, nbytes - done)], offset + done)
            if not got:
                raise ShortTransferError(nbytes, done)
            done += got

    def grow(self, size_bytes: int, nbytes: int) -> None:
        """See `Arena.grow`."""
        if not self._room.give_up(nbytes):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        os.ftruncate(self.fd, size_bytes + nbytes)

    def available_bytes(self, directory: Path) -> int:
        """How much longer the file may get."""
        return self._room.free_bytes
