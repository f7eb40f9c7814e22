import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from teraplan.runtime.process.pinned_pool import PinnedPool
from teraplan.runtime.storage import Record, Storage, default_directory, posix_arena
from teraplan.runtime.storage import directories as directories_module

Bytes = NDArray[np.uint8]
PAGE = 4096


@pytest.fixture(scope="session")
def disk() -> Iterator[Path]:
    """An empty directory on a real disk, wherever pytest's own temporary directory is."""
    directory = Path(tempfile.mkdtemp(prefix="teraplan-test-", dir=default_directory()))
    yield directory
    shutil.rmtree(directory)


def _memory(nbytes: int, skew: int = 0, seed: int | None = None) -> Bytes:
    # Page aligned plus `skew`: addresses as torch's allocator gives them are 64 modulo 4096.
    whole = np.zeros(nbytes + 2 * PAGE, dtype=np.uint8)
    start = (skew - whole.ctypes.data) % PAGE
    part: Bytes = whole[start : start + nbytes]
    if seed is not None:
        part[:] = np.random.default_rng(seed).integers(0, 256, nbytes, dtype=np.uint8)
    return part


@pytest.fixture(scope="session")
def memory() -> Callable[..., Bytes]:
    """`memory(nbytes, skew, seed)`: bytes at an address of `skew` modulo 4096."""
    return _memory


@pytest.fixture(scope="session")
def read_back() -> Callable[[Storage, Record], Bytes]:
    """`read_back(storage, record)`: what a `get` into fresh memory brings."""

    def read(storage: Storage, record: Record) -> Bytes:
        landing = _memory(record.nbytes, record.address_remainder)
        transfer = storage.get(record, landing.ctypes.data, owner=landing)
        storage.wait(transfer, what="the test")
        return landing

    return read


def _none(fd: int) -> None:
    """What a kernel says about a file that has no direct I/O."""


@pytest.fixture(params=["posix", "without Python", "buffered", "kvikio-host", "host memory"])
def open_storage(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, disk: Path
) -> Callable[..., Storage]:
    """`open_storage(**options)`: a storage in `disk`, once for each back end that works here."""
    path: str = request.param
    if path == "buffered":
        monkeypatch.setattr(posix_arena, "direct_alignment", _none)
        path = "posix"
    elif path == "kvikio-host":
        reason = directories_module.why_not(path, disk)
        if reason:
            pytest.skip(f"kvikio does not work here: {reason}")

    def open_it(where: Sequence[Path] = (disk,), *, deadline_s: float = 20.0) -> Storage:
        if path == "host memory":
            return Storage.in_memory(PinnedPool(8 << 30, pin=None), deadline_s=deadline_s)
        if path == "without Python":
            storage = Storage.open(where, deadline_s=deadline_s, without_python=True)
            assert storage.traffic.stores[0].uses_lane or len(where) > 1
            return storage
        return Storage.open(where, deadline_s=deadline_s, path=path)

    return open_it


@pytest.fixture(autouse=True)
def nothing_leaks() -> Iterator[None]:
    """Every test here has to leave as many descriptors and storage threads as it found."""
    before = _descriptors()
    yield
    after = _descriptors()
    assert after <= before, f"left open: {after - before}"


def _descriptors() -> set[str]:
    found = set()
    for number in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{number}")
        except OSError:
            continue
        if "(deleted)" in target:  # how an unnamed file of ours looks
            found.add(f"{number} {target}")
    return found
