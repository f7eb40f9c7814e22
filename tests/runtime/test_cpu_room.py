"""Room that a CPU device keeps between two sites, where training state moves."""

from collections.abc import Iterator

import pytest
import torch

from teraplan.runtime.cpu.device import CpuDevice
from teraplan.runtime.process import process_memory
from teraplan.units import MIB
from tests.runtime import state_arena


@pytest.fixture
def device() -> Iterator[CpuDevice]:
    """Beside state that moves, with 64 MiB of which nobody has any."""
    with state_arena.opened(4 * MIB) as arena:
        opened = CpuDevice(storage=state_arena.pages_of(arena).tiers.storage, host_bytes=0)
        opened.keeps_beside(arena.memory)
        torch.ones(64 * MIB // 4)
        yield opened
        opened.close()


def _given_back(device: CpuDevice, *, free_bytes: int) -> int:
    """At a site, by a process that holds what it may, but for what two readings differ by."""
    waiting_bytes = device.pool.waiting_bytes
    device.keep_under(process_memory.resident_bytes() + MIB // 2, 0, free_bytes)
    return waiting_bytes - device.pool.waiting_bytes


def test_room_is_kept_free_only_where_that_is_asked_for(device: CpuDevice) -> None:
    assert _given_back(device, free_bytes=0) <= MIB
    assert 15 * MIB <= _given_back(device, free_bytes=16 * MIB) <= 18 * MIB


def test_state_gets_room_and_tensors_are_made_of_what_waits(device: CpuDevice) -> None:
    _given_back(device, free_bytes=0)
    before = device.pool.waiting_bytes
    device.make_room_for_tensors(16 * MIB)
    assert device.pool.waiting_bytes == before
    device.make_room(16 * MIB)
    assert 15 * MIB <= before - device.pool.waiting_bytes <= 18 * MIB
