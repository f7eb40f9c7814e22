"""When the resident memory has to be read again."""

import mmap
from collections.abc import Iterator

import pytest
import torch

from teraplan.runtime.cpu.device import CpuDevice
from teraplan.runtime.cpu.resident_memory import ResidentMemory
from teraplan.runtime.process import process_memory
from teraplan.runtime.storage import Storage
from teraplan.units import MIB

FAR = 1 << 50
LONG = 64


@pytest.fixture
def settled() -> ResidentMemory:
    """Read twice, with no block of the pool made in between."""
    memory = ResidentMemory()
    for _ in range(2):
        assert memory.read(3) == pytest.approx(process_memory.resident_bytes(), abs=4 * MIB)
    return memory


def _check_two_readings_are_needed(memory: ResidentMemory, num_blocks: int) -> None:
    for _ in range(2):
        assert not memory.is_surely_under(FAR, num_blocks)
        memory.read(num_blocks)
    assert memory.is_surely_under(FAR, num_blocks)


def test_nothing_is_known_before_two_readings() -> None:
    _check_two_readings_are_needed(ResidentMemory(), 0)


def test_a_new_block_is_waited_for_until_it_has_been_touched(settled: ResidentMemory) -> None:
    assert settled.is_surely_under(FAR, 3)
    _check_two_readings_are_needed(settled, 4)


def test_near_the_limit_it_is_read_at_each_site(settled: ResidentMemory) -> None:
    now = settled.read(3)
    assert settled.is_surely_under(now + 2 * MIB, 3)
    assert not settled.is_surely_under(now + 2 * MIB - 1, 3)


def test_after_some_sites_it_is_read_in_any_case(settled: ResidentMemory) -> None:
    known = [settled.is_surely_under(FAR, 3) for _ in range(LONG)]
    assert known == sorted(known, reverse=True)
    assert 1 < sum(known) < LONG // 2


@pytest.fixture
def device(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CpuDevice]:
    """With 64 MiB that wait for a tensor."""
    with Storage.open([tmp_path_factory.mktemp("spill")]) as storage:
        opened = CpuDevice(storage=storage, host_bytes=0)
        torch.ones(64 * MIB // 4)
        yield opened
        opened.close()


def test_what_others_take_is_given_up_by_the_pool_some_sites_later(device: CpuDevice) -> None:
    limit = process_memory.resident_bytes() + 8 * MIB
    for _ in range(LONG):
        device.keep_under(limit, 0)
    before = device.pool.waiting_bytes
    given_up = most = 0
    with mmap.mmap(-1, 32 * MIB) as taken:
        taken.write(b"x" * len(taken))
        for _ in range(LONG):
            device.keep_under(limit, 0)
            given_up = before - device.pool.waiting_bytes
            most = max(most, process_memory.resident_bytes() + given_up)
        needed = most - limit  # the 24 MiB of above, and what other tests' threads take meanwhile
        assert needed >= 20 * MIB
        assert needed - 4 * MIB <= given_up <= needed + 4 * MIB
    assert process_memory.resident_bytes() <= limit
