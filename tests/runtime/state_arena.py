"""An arena over a real file, which ends with its test."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from teraplan.runtime.state.arena import StateArena
from teraplan.runtime.storage import Storage, default_directory


@contextmanager
def opened(limit_bytes: int) -> Iterator[StateArena]:
    with (
        tempfile.TemporaryDirectory(prefix="teraplan-test-", dir=default_directory()) as directory,
        Storage.open([Path(directory)]) as storage,
    ):
        yield StateArena(storage, limit_bytes)
