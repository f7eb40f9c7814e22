"""One tensor in host pool and storage at once, on the CPU: real bytes, a real disk, real faults."""

import errno
import time
from collections.abc import Iterator

import pytest
import torch

from teraplan.errors import StorageFullError
from teraplan.runtime.cpu.device import CpuDevice
from teraplan.runtime.device import Copy
from teraplan.runtime.engine.mover import Mover
from teraplan.runtime.engine.saved import Saved
from teraplan.runtime.process.pages import round_up
from teraplan.runtime.storage import Storage, default_directory
from teraplan.units import MIB
from teraplan.values.hardware import Tier
from teraplan.values.run_record import Direction
from tests.fakes.faulty_calls import Fault, injected

NBYTES = 5 * MIB + 1234
HOST_BUDGET = 4 * MIB


def hosted(device: CpuDevice) -> int:
    """Bytes of records in host memory, once what is dropped has been written."""
    host = device.tiers.host
    assert host is not None
    end = time.monotonic() + 5
    while any(store.pending_bytes for store in host.traffic.stores) and time.monotonic() < end:
        time.sleep(0.001)
    return host.bytes_in_use


@pytest.fixture
def device() -> Iterator[CpuDevice]:
    storage = Storage.open([default_directory()], deadline_s=20.0)
    device = CpuDevice(storage=storage, host_bytes=HOST_BUDGET)
    yield device
    assert hosted(device) == 0
    assert storage.bytes_in_use == 0
    device.close()


def numbers(device: CpuDevice, *, pooled: bool, shift: int = 0) -> torch.Tensor:
    """Random bytes in a storage of their own, which begins `shift` bytes behind some block."""
    if pooled:
        memory = torch.empty(NBYTES, dtype=torch.uint8)
        assert device.pool.owns(memory.data_ptr())
    else:
        whole = bytearray(NBYTES + 64)
        memory = torch.frombuffer(whole, dtype=torch.uint8, offset=shift, count=NBYTES)
    random = torch.Generator().manual_seed(3)
    return memory.copy_(torch.randint(0, 256, (NBYTES,), dtype=torch.uint8, generator=random))


def back(device: CpuDevice, copy: Copy) -> torch.Tensor:
    storage, offset, _ = device.start_back(copy, urgent=True).wait()
    return torch.empty(0, dtype=torch.uint8).set_(storage, offset, (copy.nbytes,), (1,))


@pytest.mark.parametrize("pooled", [False, True])
@pytest.mark.parametrize("shift", [0, 16])
@pytest.mark.parametrize("host_bytes", [1, 4096, 100_001, 4 * MIB])
def test_every_byte_comes_back(
    device: CpuDevice, pooled: bool, shift: int, host_bytes: int
) -> None:
    tensor = numbers(device, pooled=pooled, shift=shift)
    expected = tensor.clone()
    copy = device.start_out(tensor, Tier.STORAGE, "t", host_bytes=host_bytes)
    assert hosted(device) == round_up(host_bytes)
    copy.wait_out()
    tensor.zero_()
    for _ in range(2):  # a copy lasts
        torch.testing.assert_close(back(device, copy), expected, rtol=0, atol=0)
    told = {(r.tier, r.direction): r.nbytes for r in device.take_transfers()}
    assert told == {
        (tier, direction): nbytes
        for direction in Direction
        for tier, nbytes in ((Tier.HOST, host_bytes), (Tier.STORAGE, NBYTES - host_bytes))
    }
    copy.drop()
    copy.drop()
    assert hosted(device) == 0


def test_the_host_tier_has_no_room_for_its_part(device: CpuDevice) -> None:
    tensor = numbers(device, pooled=True)
    with pytest.raises(
        StorageFullError,
        match=r"t: needs 4.01 MiB in host memory, where 4.00 MiB are left of host_b",
    ):
        device.start_out(tensor, Tier.STORAGE, "t", host_bytes=HOST_BUDGET + 12_000)


def test_storage_has_no_room_for_its_part(device: CpuDevice) -> None:
    tensor = numbers(device, pooled=True)
    with (
        injected(Fault(call="grow", what=errno.ENOSPC, at=1, times=1 << 30)),
        pytest.raises(StorageFullError),
    ):
        device.start_out(tensor, Tier.STORAGE, "t", host_bytes=MIB)
    assert hosted(device) == 0


def saved_of(tensor: torch.Tensor) -> Saved:
    return Saved(
        name="t",
        nbytes=tensor.nbytes,
        address=0,
        tensor=tensor,
        version=tensor._version,
        order=0,
        saved_version=tensor._version,
        saved_by=0,
        tokens=1,
    )


def moving(device: CpuDevice) -> tuple[Mover, Saved, torch.Tensor]:
    """A saved tensor, what has it, and its values."""
    mover = Mover(device)
    saved = saved_of(numbers(device, pooled=True))
    assert saved.tensor is not None
    mover.add(saved)
    return mover, saved, saved.tensor.clone()


@pytest.mark.parametrize("host_bytes", [MIB, HOST_BUDGET + MIB])
def test_a_tensor_leaves_in_two_parts_or_whole_where_one_has_no_room(
    device: CpuDevice, host_bytes: int
) -> None:
    mover, saved, expected = moving(device)
    mover.start_leaving(saved, Tier.STORAGE, host_bytes)
    mover.finish_leaving(saved)
    assert not saved.resident
    assert mover.managed_bytes == 0
    assert hosted(device) == (MIB if host_bytes == MIB else 0)
    assert not mover.faults, "storage has room for all of it"
    mover.start_back(saved)
    mover.finish_back(saved)
    found = saved.tensor
    assert found is not None
    torch.testing.assert_close(
        found[saved.offset : saved.offset + NBYTES], expected, rtol=0, atol=0
    )
    mover.forget(saved)


@pytest.mark.parametrize("at", range(1, 4))
def test_a_failed_write_leaves_the_tensor_whole_and_nothing_behind(
    device: CpuDevice, at: int
) -> None:
    mover, saved, expected = moving(device)
    with injected(Fault(call="write", what=errno.EIO, at=at, times=1 << 30)) as calls:
        mover.start_leaving(saved, Tier.STORAGE, MIB)
        mover.finish_leaving(saved)
    if calls.num_injected:  # the host tier, where it went next, is too small for all of it
        assert mover.faults
        assert saved.copy is None
        assert hosted(device) == 0
        torch.testing.assert_close(saved.tensor, expected, rtol=0, atol=0)
    mover.forget(saved)
