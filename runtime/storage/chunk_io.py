"""Moves one chunk: checksum, transfer, comparison, and errors that name what failed."""

import errno
import logging
import os
import resource
from pathlib import Path

from teraplan.errors import IntegrityError, StorageError, StorageFullError
from teraplan.runtime.storage.arena import Arena
from teraplan.runtime.storage.transfers import Chunk
from teraplan.units import format_nbytes
from teraplan.values.run_record import Direction

_log = logging.getLogger(__name__)
FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_MAY_PASS = frozenset({errno.EIO, errno.EAGAIN, errno.ETIMEDOUT, errno.ENOMEM})
"""What is tried once more: a link that was reset or a device that was busy."""


def move(arena: Arena, chunk: Chunk, directory: Path, *, checksum: bool) -> None:
    """Writes or reads `chunk`, as its transfer says; once more if the first time fails.

    Raises:
        StorageError: the system calls failed; names tensor, directory, offset and cause.
        IntegrityError: the bytes differ from those that were written, also when read again.
    """
    if chunk.transfer.after is not None:
        chunk.transfer.after()
    try:
        _move_once(arena, chunk, directory, checksum=checksum)
    except IntegrityError:
        raise
    except OSError as error:
        named = _named(error, chunk, arena, directory)
        if chunk.failure or error.errno not in _MAY_PASS:
            raise named from error
        _log.warning("%s; trying once more", named)
        try:
            _move_once(arena, chunk, directory, checksum=checksum)
        except IntegrityError:
            raise
        except OSError as second:
            raise _named(second, chunk, arena, directory) from second


def _move_once(arena: Arena, chunk: Chunk, directory: Path, *, checksum: bool) -> None:
    if chunk.failure > 0 and chunk.failure not in _MAY_PASS:
        raise OSError(chunk.failure, os.strerror(chunk.failure))
    if chunk.transfer.direction is Direction.OUT:
        _write(arena, chunk, checksum=checksum)
    else:
        _read(arena, chunk, directory, checksum=checksum)


def copy_ends(chunk: Chunk) -> None:
    """Copies what of its record is no part of the body, out or back, if it is the first chunk."""
    if chunk.index:
        return
    if chunk.transfer.direction is Direction.OUT:
        chunk.record.keep_ends(chunk.record_address)
    else:
        chunk.record.restore_ends(chunk.record_address)


def _write(arena: Arena, chunk: Chunk, *, checksum: bool) -> None:
    copy_ends(chunk)
    if not chunk.nbytes:
        return
    if checksum:
        chunk.record.checksums[chunk.index] = arena.checksum(chunk.address, chunk.nbytes)
    arena.write(chunk.address, chunk.nbytes, chunk.place.offset)


def _read(arena: Arena, chunk: Chunk, directory: Path, *, checksum: bool) -> None:
    copy_ends(chunk)
    if not chunk.nbytes:
        return
    arena.read(chunk.address, chunk.nbytes, chunk.place.offset)
    if checksum:
        _verify(arena, chunk, directory)


def _verify(arena: Arena, chunk: Chunk, directory: Path) -> None:
    expected = chunk.record.checksums[chunk.index]
    found = arena.checksum(chunk.address, chunk.nbytes)
    if found == expected:
        return
    if not chunk.failure:  # a flip on the way back, not on the disk, is gone the second time
        _log.warning(
            "checksum of %s at offset %d in %s differs on the first read",
            *(chunk.transfer.label, chunk.place.offset, directory),
        )
        arena.read(chunk.address, chunk.nbytes, chunk.place.offset)
        found = arena.checksum(chunk.address, chunk.nbytes)
        if found == expected:
            return
    raise IntegrityError(
        f"{chunk.transfer.label}: {format_nbytes(chunk.nbytes)} at offset {chunk.place.offset} of "
        f"the spill file in {directory} came back changed (checksum {found:016x}, written "
        f"{expected:016x}); the disk, its driver or the memory is faulty, or the tensor was "
        "changed while it was being written"
    )


def _named(error: OSError, chunk: Chunk, arena: Arena, directory: Path) -> StorageError:
    is_write = chunk.transfer.direction is Direction.OUT
    if is_write and error.errno == errno.EINVAL and _is_cut(chunk):
        error = OSError(errno.EFBIG, os.strerror(errno.EFBIG))
    kind = StorageFullError if is_write and error.errno in FULL else StorageError
    text = error.strerror or str(error)
    cause = f"{errno.errorcode.get(error.errno or 0, 'error')}: {text}"
    named = kind(
        f"{chunk.transfer.label}: {'write' if is_write else 'read'} of "
        f"{format_nbytes(chunk.nbytes)} at offset {chunk.place.offset} of the spill file in "
        f"{directory} failed ({cause})"
        + (_full_advice(error, arena, directory) if kind is StorageFullError else "")
    )
    named.errno = error.errno
    return named


def _is_cut(chunk: Chunk) -> bool:
    """A limit that is no multiple of a block cuts a direct write to a length that is none."""
    limit, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    return limit != resource.RLIM_INFINITY and chunk.place.offset + chunk.nbytes > limit


def _full_advice(error: OSError, arena: Arena, directory: Path) -> str:
    free = format_nbytes(arena.available_bytes(directory))
    return f"; {free} are {arena.room}; {remedy_of(error, arena)}"


def remedy_of(error: OSError, arena: Arena) -> str:
    """What people can do where a file cannot grow."""
    if error.errno == errno.EDQUOT:
        return "your quota there is used up: delete files, or name another storage directory"
    if error.errno != errno.EFBIG:
        return arena.remedy
    limit, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    if limit == resource.RLIM_INFINITY:
        return "the file system has no larger files: name more storage directories"
    return (
        f"files of this process may have {format_nbytes(limit)}: raise that limit (ulimit -f), or "
        "name more storage directories"
    )
