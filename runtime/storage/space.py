"""Room for records in one arena file, which grows in steps and never shrinks."""

from pathlib import Path

from teraplan.errors import StorageError, StorageFullError
from teraplan.runtime.storage.arena import Arena
from teraplan.runtime.storage.chunk_io import FULL, remedy_of
from teraplan.runtime.storage.extents import GRANULE_BYTES, ExtentAllocator, round_up
from teraplan.units import format_nbytes


class Space:
    """Extents of `arena`. Not thread safe: the store locks."""

    def __init__(self, directory: Path, arena: Arena) -> None:
        self._directory = directory
        self._arena = arena
        self._extents = ExtentAllocator(max(GRANULE_BYTES, arena.block_bytes))

    @property
    def taken_bytes(self) -> int:
        """Bytes in extents of records."""
        return self._extents.taken_bytes

    @property
    def free_bytes(self) -> int:
        """Bytes of the file that no record has."""
        return self._extents.free_bytes

    def take(self, nbytes: int, label: str, owner: int) -> int:
        """Offset of a new extent for the record `label`, which belongs to `owner`.

        Raises:
            StorageFullError: the disk is full; nothing has changed.
            StorageError: the file cannot grow, or the disk does not answer (ETIMEDOUT).
        """
        missing = self._extents.missing_bytes(nbytes)
        if missing:
            self._grow(missing, nbytes, label)
        return self._extents.take(nbytes, owner)

    def give_back(self, owner: int) -> None:
        """Frees the extents of `owner`, if it has any."""
        self._extents.give_back(owner)

    def _grow(self, missing: int, nbytes: int, label: str) -> None:
        # A whole step if the disk has it, else exactly what is missing.
        whole = max(missing, round_up(self._arena.grow_bytes, self._extents.granule_bytes))
        cause: OSError | None = None
        for step in (whole, missing):
            try:
                self._arena.grow(self._extents.size_bytes, step)
            except OSError as error:
                if error.errno not in FULL:
                    raise self._cannot_grow(step, label, error) from error
                cause = error.with_traceback(None)  # else it holds this frame, which holds it
            else:
                self._extents.extend(step)
                return
        assert cause is not None, "the loop above returned, raised or set a cause"
        raise self._full(nbytes, label, cause) from cause

    def _cannot_grow(self, nbytes: int, label: str, cause: OSError) -> StorageError:
        error = StorageError(
            f"{label}: the spill file in {self._directory} cannot grow by "
            f"{format_nbytes(nbytes)}: {cause.strerror}"
        )
        error.errno = cause.errno
        return error

    def _full(self, nbytes: int, label: str, cause: OSError) -> StorageFullError:
        error = StorageFullError(
            f"{label}: needs {format_nbytes(nbytes)} in {self._directory}, where "
            f"{format_nbytes(self._arena.available_bytes(self._directory))} are "
            f"{self._arena.room} and "
            f"{format_nbytes(self.free_bytes)} in the spill file ({cause.strerror}); "
            f"{remedy_of(cause, self._arena)}"
        )
        error.errno = cause.errno
        return error
