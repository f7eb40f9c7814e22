"""Training through the CUDA back end's transfers, with the CPU as the device that computes."""

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch

from bench.models import convnet, gpt
from teraplan import backend
from teraplan.config import Config
from teraplan.planners.updates.update_share import UpdateRates
from teraplan.runtime.cuda import device as cuda_device
from teraplan.runtime.cuda.log import DeviceLog
from teraplan.runtime.session import feedback
from teraplan.runtime.state.host_updates import host_choice, host_rates
from teraplan.runtime.state.host_updates.host_updates import HostUpdates
from teraplan.runtime.storage import Storage, default_directory
from teraplan.units import MIB
from teraplan.values.run_record import TransferRecord
from tests.end_to_end import hosting, moving
from tests.end_to_end.cuda_path import STAGING, CudaPath
from tests.end_to_end.training import Program, assert_same, tight, training, unlimited
from tests.end_to_end.training import moving as moving_activations
from tests.fakes.slow_link import link_of

GPT = gpt.GPTConfig(num_layers=2, width=64, context=64, vocab_size=64)


SLOW = [
    pytest.param("storage", marks=pytest.mark.slow),
    pytest.param("host", marks=[pytest.mark.slow, pytest.mark.exhaustive]),
]


@pytest.fixture(params=["both", *SLOW])
def tiers(request: pytest.FixtureRequest, cuda_path: Callable[[int], None]) -> str:
    """Sessions get a CudaPath with these tiers."""
    name = str(request.param)
    cuda_path({"storage": 0, "host": 64 * MIB, "both": MIB}[name])
    return name


def compare(program: Program, tiers: str) -> None:
    """Half the memory, the same bits, and the tiers that there are."""
    reference = unlimited(program)
    limited = moving_activations(program, reference, 0.5)
    assert_same(reference, limited)
    used = set(limited.final.bytes_out)
    assert used <= {"storage", "host"}
    assert used
    if tiers == "storage":
        assert used == {"storage"}


@pytest.mark.slow
def test_gpt(tiers: str) -> None:
    program = training(lambda: gpt.build(GPT), lambda step: gpt.batch(GPT, 8, step), steps=9)
    compare(program, tiers)


@pytest.mark.slow
@pytest.mark.parametrize("tiers", ["host"], indirect=True)
def test_waits_of_steps_without_a_plan_are_forgotten(
    tiers: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    order, take_transfers = DeviceLog.order, DeviceLog.take_transfers
    made, kept = 0, []

    def counted(log: DeviceLog, *args: Any) -> None:  # noqa: ANN401
        nonlocal made
        before = len(log._stalls)
        order(log, *args)
        made += len(log._stalls) - before

    def at_end_of_step(log: DeviceLog) -> tuple[TransferRecord, ...]:
        kept.append(len(log._stalls))
        return take_transfers(log)

    monkeypatch.setattr(DeviceLog, "order", counted)
    monkeypatch.setattr(DeviceLog, "take_transfers", at_end_of_step)
    program = training(lambda: gpt.build(GPT), lambda step: gpt.batch(GPT, 8, step), steps=12)
    tight(program, unlimited(program), 0.5, profile_steps=100)
    assert made >= 12
    assert 0 < max(kept) < made / 2


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

    def open_device(config: Config, place: torch.device) -> CudaPath:
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


@pytest.mark.slow
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
