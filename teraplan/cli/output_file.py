"""Output files, written whole or not at all."""

import contextlib
import os
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from teraplan.errors import ConfigError


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
    """A file beside `path` to write to; it takes the place of `path` when the block ends well.

    Raises:
        ConfigError: if it cannot be written there.
    """
    with writing(path):
        handle, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".part", dir=path.parent)
    os.close(handle)
    part = Path(name)
    try:
        with writing(path):
            yield part
            umask = os.umask(0)
            os.umask(umask)
            part.chmod(0o666 & ~umask)
            part.replace(path)
    finally:
        with contextlib.suppress(FileNotFoundError):
            part.unlink()


def write_whole(path: Path, data: bytes) -> None:
    """Writes `data` to `path`, whole or not at all.

    Raises:
        ConfigError: if it cannot be written there.
    """
    with whole_file(path) as part:
        part.write_bytes(data)
