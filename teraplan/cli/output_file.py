"""Output files, written whole or not at all."""

from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from teraplan.errors import ConfigError
from teraplan.files.whole_file import whole_file as whole_file_at


@contextmanager
def writing(path: Path) -> Generator[None, None, None]:
    """Within this `path` is written.

    Raises:
        ConfigError: if it cannot be.
    """
    try:
        yield
    except OSError as error:
        raise ConfigError(
            f"{path}: cannot be written: {error.strerror}; choose another place with -o"
        ) from error


@contextmanager
def whole_file(path: Path) -> Generator[Path, None, None]:
    """A file to write to; it takes the place of `path` when the block ends well.

    Raises:
        ConfigError: if it cannot be written there.
    """
    with writing(path), whole_file_at(path) as part:
        yield part


def write_whole(path: Path, data: bytes) -> None:
    """Writes `data` to `path`, whole or not at all.

    Raises:
        ConfigError: if it cannot be written there.
    """
    with whole_file(path) as part:
        part.write_bytes(data)
