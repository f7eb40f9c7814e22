"""The CUDA back end and its calls on a real GPU. Written without one at hand: not run yet."""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from teraplan.runtime.cuda.device import CudaDevice
from teraplan.runtime.cuda.torch_runtime import TorchCuda
from teraplan.runtime.device import Arrival
from teraplan.runtime.process.pinned_pool import PinnedPool
from teraplan.runtime.storage import Storage, default_directory
from teraplan.runtime.storage.directories import why_not
from teraplan.units import MIB
from teraplan.values.hardware import Tier

pytestmark = pytest.mark.gpu
NUMBERS = 20 * MIB // 4
BOTH = pytest.mark.parametrize("tier", [Tier.HOST, Tier.STORAGE])


@pytest.fixture
def device() -> Iterator[CudaDevice]:
    storage = Storage.open([default_directory()])
    opened = CudaDevice(TorchCuda(), storage, host_bytes=512 * MIB, staging_bytes=64 * MIB)
    yield opened
    opened.close()
    opened.close()


def numbers(seed: int) -> torch.Tensor:
    return torch.arange(NUMBERS, dtype=torch.int32, device="cuda").mul_(seed + 1)


def back(arrival: Arrival) -> torch.Tensor:
    storage, offset, _ = arrival.wait()
    whole = torch.empty(0, dtype=torch.uint8, device="cuda")
    whole.set_(storage, 0, (storage.nbytes(),), (1,))
    return whole[offset : offset + NUMBERS * 4].view(torch.int32)


def test_pinned_memory_is_exact_and_pinned() -> None:
    cuda = TorchCuda()
    pool = PinnedPool(33 * MIB, pin=cuda.pin, unpin=cuda.unpin, slab_bytes=16 * MIB)
    pool.prepare()
    assert pool.mapped_bytes == 33 * MIB
    assert not pool.why_not_pinned
    lease = pool.try_take(5 * MIB)
    assert lease is not None
    assert lease.parts[0].tensor.is_pinned()
    pool.close()
    assert not lease.parts[0].tensor.is_pinned()


def test_a_refused_registration_leaves_no_error_behind() -> None:
    cuda = TorchCuda()
    assert cuda.pin(4096, 4096), "nothing is mapped there"
    torch.ones(10, device="cuda").sum().item()


def test_memory_of_the_computing_stream_is_free_at_once() -> None:
    cuda = TorchCuda()
    block = cuda.empty(8 * MIB)
    address = block.data_ptr()
    cuda.used_by(block, cuda.current_stream())
    del block
    assert cuda.empty(8 * MIB).data_ptr() == address


@BOTH
def test_memory_that_is_overwritten_at_once(device: CudaDevice, tier: Tier) -> None:
    """Every freed block is allocated and filled with something else while its copy runs."""
    copies = []
    for seed in range(12):
        tensor = numbers(seed)
        copy = device.start_out(tensor, tier, f"t{seed}")
        copy.wait_out()
        del tensor
        copies.append(copy)
        torch.empty(NUMBERS, dtype=torch.int32, device="cuda").fill_(-1)
    arrivals = {seed: device.start_back(copies[seed]) for seed in range(4)}
    for seed, copy in enumerate(copies):
        arrival = arrivals.pop(seed, None) or device.start_back(copy, urgent=True)
        found = back(arrival)
        torch.testing.assert_close(found, numbers(seed), rtol=0, atol=0)
        copy.drop()
        del found, arrival
        torch.empty(NUMBERS, dtype=torch.int32, device="cuda").fill_(-1)


@BOTH
def test_the_host_is_not_blocked_by_the_computation(device: CudaDevice, tier: Tier) -> None:
    tensor = numbers(3)
    device.start_out(tensor, tier, "first").wait_out()  # pinning and threads are there now
    torch.cuda.synchronize()
    tensor = numbers(4)
    torch.cuda._sleep(2_000_000_000)  # type: ignore[no-untyped-call]  # about a second
    began = time.perf_counter()
    copy = device.start_out(tensor, tier, "second")
    copy.wait_out()
    assert time.perf_counter() - began < 0.3
    torch.testing.assert_close(back(device.start_back(copy)), numbers(4), rtol=0, atol=0)


def test_transfers_are_timed_in_the_host_s_time(device: CudaDevice) -> None:
    began_ns = time.perf_counter_ns()
    copy = device.start_out(numbers(1), Tier.HOST, "t")
    copy.wait_out()
    device.start_back(copy).wait()
    torch.cuda.synchronize()
    ended_ns = time.perf_counter_ns()
    out, home = device.take_transfers()
    slack_ns = 1_000_000
    assert began_ns - slack_ns < out.start_ns < out.end_ns <= home.end_ns < ended_ns + slack_ns


def test_peak_counts_every_tensor(device: CudaDevice) -> None:
    device.take_peak()
    before = device.resident_bytes()
    tensor = numbers(1)
    del tensor
    assert device.take_peak() - before >= NUMBERS * 4


def test_gds_where_it_is_proved() -> None:
    directory = Path(default_directory())
    reason = why_not("kvikio-gds", directory)
    if reason:
        pytest.skip(reason)
    storage = Storage.open([directory], path="kvikio-gds")
    device = CudaDevice(TorchCuda(), storage, host_bytes=0)
    try:
        assert device.staging is None
        copies = [device.start_out(numbers(seed), Tier.STORAGE, f"t{seed}") for seed in range(4)]
        for seed, copy in enumerate(copies):
            copy.wait_out()
            found = back(device.start_back(copy))
            torch.testing.assert_close(found, numbers(seed), rtol=0, atol=0)
            copy.drop()
    finally:
        device.close()
