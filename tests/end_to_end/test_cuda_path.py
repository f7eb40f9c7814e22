"""Training through the CUDA back end's transfers, with the CPU as the device that computes.

Everything between the engine and CUDA's calls is the real thing: staging, pinned pools, events,
threads. The computation runs on the host, so a stream that it must not overtake blocks it.
"""

import ctypes
import dataclasses
from collections.abc import Iterable, Iterator
from typing import Any

import pytest
import torch

from bench.models import convnet, gpt
from teraplan import backend
from teraplan.config import Config
from teraplan.hardware import Hardware
from teraplan.planners.update_share import UpdateRates
from teraplan.runtime import cuda_device, feedback
from teraplan.runtime.cpu_device import CpuDevice
from teraplan.runtime.cuda_device import CudaDevice
from teraplan.runtime.device import Beside
from teraplan.runtime.pinned_pool import PinnedPool
from teraplan.runtime.state import host_choice, host_rates
from teraplan.runtime.state.host_updates import HostUpdates
from teraplan.runtime.storage import Storage, default_directory
from teraplan.units import MIB
from tests.end_to_end import hosting, moving
from tests.end_to_end.training import (
    UNLIMITED,
    Program,
    assert_same,
    run,
    tight,
    training,
    unlimited,
)
from tests.fakes.fake_cuda import FakeCuda, HostStream
from tests.fakes.slow_link import link_of

GPT = gpt.GPTConfig(num_layers=2, width=64, context=64, vocab_size=64)
STAGING = 8 * MIB


class CudaOnHost(FakeCuda):
    """Device memory is what PyTorch allocates on the CPU."""

    def __init__(self) -> None:
        super().__init__(slowest_s=0.001)
        self.compute.close()
        self.compute = HostStream("compute")
        self.streams[0] = self.compute

    def empty(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8)

    def pin(self, address: int, nbytes: int) -> str:
        ctypes.memset(address, 0, nbytes)  # as pinning does: the pages are there from now on
        return super().pin(address, nbytes)


_MEMORY = (
    "capacity_bytes",
    "state_bytes",
    "measure_exactly",
    "run_fast",
    "resident_bytes",
    "take_peak",
    "keep_under",
    "let_go",
    "hold_less",
    "peak_bytes",
)


class _Beside:
    """Memory of moving training state, which here is memory of tensors, too."""

    def __init__(self, beside: Beside) -> None:
        self._beside = beside

    @property
    def held_bytes(self) -> int:
        return self._beside.held_bytes

    def take_peak(self) -> int:
        return self._beside.take_peak()

    coming_bytes = 0
    waited_ns = 0

    @property
    def total_bytes(self) -> int:
        return self._beside.total_bytes + self._beside.held_bytes

    def holds(self, address: int) -> bool | None:
        return None


class _Pools(PinnedPool):
    """Host memory, which is no memory of the device although tensors lie over it."""

    def __init__(self, pools: Iterable[PinnedPool]) -> None:
        super().__init__(0, pin=None)
        self.mapped_bytes = sum(pool.mapped_bytes for pool in pools)


class CudaPath(CudaDevice):
    """Counts memory as the CPU device does, and moves bytes as the CUDA device does."""

    def __init__(self, storage: Storage, host_bytes: int) -> None:
        self.cpu = CpuDevice(storage=storage, host_bytes=0)
        super().__init__(CudaOnHost(), storage, host_bytes=host_bytes, staging_bytes=STAGING)
        self.pool.prepare()
        self.cpu.host_pool = _Pools(self._pools())
        for name in _MEMORY:
            setattr(self, name, getattr(self.cpu, name))

    def keeps_beside(self, beside: Beside) -> None:
        self.cpu.keeps_beside(_Beside(beside))

    def hardware(self) -> Hardware:
        found = super().hardware()
        return dataclasses.replace(found, device_capacity_bytes=self.cpu.capacity_bytes())

    def close(self) -> None:
        super().close()
        self.cpu.close()
        assert isinstance(self.cuda, FakeCuda)
        self.cuda.close()


SLOW = [pytest.param(tier, marks=pytest.mark.slow) for tier in ("storage", "host")]


@pytest.fixture(params=["both", *SLOW])
def tiers(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Sessions get a CudaPath with these tiers."""
    host_bytes = {"storage": 0, "host": 64 * MIB, "both": MIB}[request.param]

    def open_device(config: Config, device_type: str) -> CudaPath:
        assert device_type == "cpu"
        return CudaPath(Storage.open([default_directory()]), STAGING + host_bytes)

    monkeypatch.setattr(backend, "open_device", open_device)
    yield request.param


def compare(program: Program, tiers: str) -> None:
    """Half the memory, the same bits, and the tiers that there are."""
    reference = unlimited(program)
    limited = tight(program, reference, 0.5)
    assert_same(reference, limited)
    used = set(limited.final.bytes_out)
    assert used <= {"storage", "host"}
    assert used
    if tiers == "storage":
        assert used == {"storage"}


def test_gpt(tiers: str) -> None:
    program = training(lambda: gpt.build(GPT), lambda step: gpt.batch(GPT, 8, step), steps=9)
    compare(program, tiers)


@pytest.mark.slow
def test_convnet(tiers: str) -> None:
    config = convnet.ConvNetConfig(num_stages=2, blocks_per_stage=1, image_size=16)
    program = training(
        lambda: convnet.build(config), lambda step: convnet.batch(config, 64, step), steps=6
    )
    compare(program, tiers)


@pytest.mark.slow
@pytest.mark.parametrize("tiers", ["storage"], indirect=True)
def test_computed_again(tiers: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The computation's stream computes what copies on other streams have brought."""
    monkeypatch.setattr(cuda_device, "storage_link", lambda *_, **__: link_of(4_000_000))
    monkeypatch.setattr(feedback, "_MAX_CORRECTIONS", 0)
    monkeypatch.setattr(feedback, "_COMPARED_AFTER", ())
    config = dataclasses.replace(GPT, num_layers=3, width=128)
    program = training(lambda: gpt.build(config), lambda step: gpt.batch(config, 16, step), steps=9)
    reference = unlimited(program)
    limited = tight(program, reference, 0.7, recompute="auto")
    assert_same(reference, limited)
    assert limited.final.recomputed_bytes > 0
    assert limited.final.recomputed_ns > 0
    assert limited.final.bytes_out


@pytest.fixture
def _much_host_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sessions get a CudaPath with host memory, and several buckets of updates there."""

    def open_device(config: Config, device_type: str) -> CudaPath:
        return CudaPath(Storage.open([default_directory()]), STAGING + 64 * MIB)

    monkeypatch.setattr(backend, "open_device", open_device)
    monkeypatch.setattr(host_choice, "BUCKET_BYTES", 200_000)


@pytest.mark.usefixtures("_much_host_memory")
@pytest.mark.parametrize("make", [moving.adamw, pytest.param(moving.sgd, marks=pytest.mark.slow)])
def test_updates_on_the_host(make: moving.Optimizers) -> None:
    """Gradients and parameters travel on streams of their own, beside the device's updates."""
    program = moving.training(make, accumulate=2, clip=0.01)
    hosting.check(program, share=1.0, updates=6, host_budget=None)


@pytest.mark.slow
@pytest.mark.usefixtures("_much_host_memory")
def test_updates_on_the_host_under_a_tight_budget() -> None:
    program = training(lambda: gpt.build(GPT), lambda step: gpt.batch(GPT, 8, step), steps=12)
    reference = unlimited(program)
    limited = tight(program, reference, 0.5, host_updates=0.5)
    assert_same(reference, limited)
    assert limited.final.bytes_out
    assert limited.final.host_updates > 1


@pytest.mark.usefixtures("_much_host_memory")
def test_rates_decide_what_the_host_updates(monkeypatch: pytest.MonkeyPatch) -> None:
    """With places of equal speed half of the bytes; measured once there is state."""
    measured: list[UpdateRates] = []
    measure = host_rates.measure

    def equal(*args: Any, **kwargs: Any) -> UpdateRates:  # noqa: ANN401
        measured.append(measure(*args, **kwargs))
        return UpdateRates(device_bytes_per_s=1e6, host_bytes_per_s=1e6)

    monkeypatch.setattr(host_rates, "measure", equal)
    program = moving.training(moving.adamw)
    reference = hosting.plain(program)
    found = hosting.hosted(program, share="auto", host_budget=None)
    assert_same(reference, found)
    assert [s.host_updates for s in found.statuses] == [0] + [4] * (len(found.statuses) - 1)
    (rates,) = measured
    assert 1e7 < rates.device_bytes_per_s < 1e13
    assert 1e7 < rates.host_bytes_per_s < 1e13


@pytest.mark.slow
@pytest.mark.usefixtures("_much_host_memory")
def test_state_that_does_not_fit_goes_to_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    expect = HostUpdates.expect
    monkeypatch.setattr(HostUpdates, "expect", lambda self, _: expect(self, 700_000))
    slow = UpdateRates(device_bytes_per_s=1e12, host_bytes_per_s=1e6)
    monkeypatch.setattr(host_rates, "measure", lambda *_: slow)
    program = moving.training(moving.adamw)
    reference = hosting.plain(program)
    found = hosting.hosted(program, share="auto", host_budget=None)
    assert_same(reference, found)
    assert {s.host_updates for s in found.statuses} == {3}
    assert found.statuses[-1].host_state_bytes >= 700_000


def check_moving(program: Program, *, budget: int = moving.BUDGET, **options: object) -> None:
    """The same bits with parameters, gradients and optimizer state in host memory for the most."""
    reference = run(program, device_budget=UNLIMITED, training_state="stays", **options)
    limited = moving.run_least(program, budget, **options)
    assert_same(reference, limited)
    arena = moving.moving().arena
    traffic = arena.log.traffic
    assert traffic.from_host_bytes > arena.total_bytes, "little had to come back"
    assert traffic.written_bytes == 0
    assert arena.overrun_bytes == 0
    assert limited.final.phase == "planned"


@pytest.mark.usefixtures("_much_host_memory")
@pytest.mark.parametrize("kernels", ["aot_eager", "inductor"])
def test_training_state_in_host_memory(kernels: str) -> None:
    check_moving(moving.training(moving.adamw), kernels=kernels)
