"""An arena over real files, which ends with its test."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from teraplan.runtime.cpu.page_memory import PageMemory
from teraplan.runtime.process.pinned_pool import PinnedPool
from teraplan.runtime.state.memory.arena import StateArena
from teraplan.runtime.storage import Storage, default_directory
from teraplan.runtime.storage.tiers import Tiers


@contextmanager
def opened(limit_bytes: int, host_bytes: int = 0) -> Iterator[StateArena]:
    with (
        tempfile.TemporaryDirectory(prefix="teraplan-test-", dir=default_directory()) as directory,
        Storage.open([Path(directory)]) as storage,
    ):
        room = PinnedPool(host_bytes, pin=None)
        host = Storage.in_memory(room) if host_bytes else None
        yield StateArena(PageMemory(Tiers(storage, host)), limit_bytes)
        if host is not None:
            host.close()


def pages_of(arena: StateArena) -> PageMemory:
    """Where an arena of the CPU has its blocks."""
    assert isinstance(arena.memory, PageMemory)
    return arena.memory
