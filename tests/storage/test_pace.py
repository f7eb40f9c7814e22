"""Storage that is driven no faster than a plan says: the same bytes, in no less time."""

import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from teraplan.runtime.storage import Record, Storage
from teraplan.runtime.storage.pace import Pace
from teraplan.runtime.storage.transfers import CHUNK_BYTES
from teraplan.units import MIB
from teraplan.values.run_record import Direction
from tests.fakes.slow_link import link_of

Bytes = NDArray[np.uint8]
ONE_AT_ONCE = link_of(40 * MIB)
"""Half of that in each direction while both are busy."""
TENSOR_BYTES = 20 * MIB
LEAST_S = (TENSOR_BYTES - CHUNK_BYTES) / ONE_AT_ONCE.out_bytes_per_s
"""Then the last chunk has its turn, and the disk is fast."""


def _seconds(what: Callable[[], object]) -> float:
    began_s = time.monotonic()
    what()
    return time.monotonic() - began_s


@pytest.mark.slow
@pytest.mark.parametrize("num_stores", [1, 2])
def test_bytes_take_as_long_as_the_pace_says(
    disk: Path, memory: Callable[..., Bytes], read_back: Callable[..., Bytes], num_stores: int
) -> None:
    """All directories together: two are no faster than one."""
    directories = [disk / f"paced{index}" for index in range(num_stores)]
    for directory in directories:
        directory.mkdir(exist_ok=True)
    tensor = memory(TENSOR_BYTES, 64, seed=1)
    with Storage.open(directories) as storage:
        storage.keep_to(ONE_AT_ONCE)
        records: list[Record] = []

        def write() -> None:
            records.append(storage.put(tensor.ctypes.data, tensor.nbytes, owner=tensor, label="a"))
            storage.wait(records[0].write, what="the test")

        assert _seconds(write) >= LEAST_S
        back: list[Bytes] = []
        assert _seconds(lambda: back.append(read_back(storage, records[0]))) >= LEAST_S
        assert np.array_equal(back[0], tensor)
        storage.keep_to(None)
        assert np.array_equal(read_back(storage, records[0]), tensor)


def test_directions_share_what_the_pace_has_for_both() -> None:
    pace = Pace()
    pace.keep_to(ONE_AT_ONCE)
    for direction in (Direction.OUT, Direction.BACK):
        pace.wait(direction, 4 * MIB)  # the first has its turn at once: 0.1 s alone
    assert _seconds(lambda: pace.wait(Direction.BACK, 1)) >= 0.15, "half of the speed"


@pytest.mark.parametrize("end", ["closed", "no limit any more", "long enough"])
def test_nobody_waits_for_ever(end: str) -> None:
    pace = Pace()
    pace.keep_to(link_of(2))
    pace.wait(Direction.OUT, MIB)  # the next one's turn is in six days
    waiting = threading.Thread(target=pace.wait, args=(Direction.OUT, MIB))
    waiting.start()
    if end == "closed":
        pace.close()
    elif end == "no limit any more":
        pace.keep_to(None)
    waiting.join(20.0)
    assert not waiting.is_alive()
