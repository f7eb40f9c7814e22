"""Reading of files that a user names, of which none can take all memory or wait for ever.

A device is refused, and so is what has too many bytes, known before or seen while it is read. A
pipe may be read, but one that nobody opens for writing is refused after a short while.
"""

import os
import select
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from teraplan.errors import FileFormatError

WRITER_WAIT_S = 3.0
"""How long a pipe may be without anybody who writes to it."""
_PIECE_NBYTES = 1 << 20


def pieces(path: Path, limit_nbytes: int) -> Iterator[bytes]:
    """The bytes of the file at `path`, in their order and few at a time.

    Raises:
        FileFormatError: it has more than `limit_nbytes`, is a device or a folder, a pipe without a
            writer, or cannot be read.
    """
    total_nbytes = 0
    try:
        with open(path, "rb", opener=_open_at_once) as file:
            for piece in _pieces_of(file, path, limit_nbytes):
                total_nbytes += len(piece)
                if total_nbytes > limit_nbytes:
                    raise FileFormatError(f"{path}: has more than {limit_nbytes} bytes")
                yield piece
    except OSError as error:
        raise FileFormatError(f"{path}: cannot be read: {error.strerror}") from error


def _open_at_once(path: str, flags: int) -> int:
    """Without it, opening a pipe waits until somebody writes to it."""
    return os.open(path, flags | os.O_NONBLOCK)


def _pieces_of(file: BinaryIO, path: Path, limit_nbytes: int) -> Iterator[bytes]:
    found = os.fstat(file.fileno())
    if stat.S_ISCHR(found.st_mode) or stat.S_ISBLK(found.st_mode):
        raise FileFormatError(f"{path}: is a device, not a file")
    if found.st_size > limit_nbytes:
        raise FileFormatError(
            f"{path}: has {found.st_size} bytes; files over {limit_nbytes} are not read"
        )
    if stat.S_ISFIFO(found.st_mode):
        yield _first_of_pipe(file.fileno(), path)
    os.set_blocking(file.fileno(), True)
    while piece := file.read(_PIECE_NBYTES):
        yield piece


def _first_of_pipe(fd: int, path: Path) -> bytes:
    """What a pipe has once somebody writes to it, perhaps nothing yet."""
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    events = poll.poll(WRITER_WAIT_S * 1000)
    try:
        piece = os.read(fd, _PIECE_NBYTES)
    except BlockingIOError:  # there is a writer that takes its time
        return b""
    if not piece and not events:
        raise FileFormatError(f"{path}: is a pipe, and nobody writes to it")
    return piece
