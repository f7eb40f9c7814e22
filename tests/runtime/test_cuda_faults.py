"""The CUDA back end over fake streams: what is full, fails or hangs is named."""

import errno
import threading

import pytest

from teraplan.errors import DeadlineError, FallbackRefusedError, StorageError, StorageFullError
from teraplan.runtime.cuda.device import CudaDevice
from teraplan.runtime.storage import Storage, default_directory
from teraplan.units import MIB
from teraplan.values.hardware import Tier
from teraplan.values.run_record import Direction
from tests.fakes.fake_cuda import FakeCuda
from tests.runtime.cuda_world import LARGE, STAGING, World, until


def test_a_full_host_tier_says_so_and_takes_nothing() -> None:
    with World() as world:
        kept = world.moved(1, 7 * MIB, Tier.HOST)
        with pytest.raises(StorageFullError, match=r"do not fit in the host tier.*host_budget"):
            world.out(world.tensor(2, 2 * MIB), Tier.HOST)
        world.check(kept, 1, 7 * MIB)
        kept.drop()
        world.check(world.moved(3, 8 * MIB, Tier.HOST), 3, 8 * MIB)


def test_the_host_budget_is_a_ceiling() -> None:
    with World(host_bytes=STAGING + 3 * MIB) as world:
        world.moved(1, 3 * MIB, Tier.HOST)
        world.moved(2, LARGE)
        world.settle()
        assert sum(world.cuda.pinned.values()) == STAGING + 3 * MIB


def test_a_full_disk_is_an_error_of_that_tensor() -> None:
    with World() as world:

        def full(*_: object, **__: object) -> None:
            raise StorageFullError("no space left")

        world.storage.put = full  # type: ignore[assignment,method-assign]
        copy = world.moved(1, 5000)
        world.settle()
        with pytest.raises(StorageFullError, match="no space left"):
            world.device.start_back(copy).wait()
        copy.drop()


def test_a_failed_read_reaches_who_waits() -> None:
    with World() as world:
        copy = world.moved(1, LARGE)
        world.settle()

        def fail(*_: object) -> None:
            raise OSError(errno.EIO, "broken")

        world.arena.read = fail  # type: ignore[assignment,method-assign]
        with pytest.raises(StorageError, match="broken"):
            world.device.start_back(copy).wait()
        copy.drop()
        world.settle()


def test_an_error_of_the_device_reaches_who_waits() -> None:
    with World() as world:
        world.cuda.error_after_copy = "an illegal memory access"
        copy = world.out(world.tensor(1, 5000))
        world.cuda.error_after_copy = ""
        world.settle()
        with pytest.raises(StorageError, match="illegal memory access"):
            copy.wait_out()
        copy.drop()


def test_a_device_that_hangs_is_named() -> None:
    with World(deadline_s=1.0) as world:
        copies = [world.moved(seed, 2 * MIB) for seed in range(2)]
        world.settle()
        side = world.copy_stream(Direction.BACK)
        side.gate.clear()
        arrivals = [world.device.start_back(copy) for copy in copies]
        with pytest.raises(DeadlineError, match=r"t2097152 did not come back, and nothing moved"):
            arrivals[1].wait()
        side.gate.set()


def test_pageable_memory_is_named_and_refused_when_strict() -> None:
    with World(why_not_pinned="not permitted") as world:
        assert any("not permitted" in fallback for fallback in world.device.fallbacks)
        world.check(world.moved(1, LARGE), 1, LARGE)
    cuda = FakeCuda(why_not_pinned="not permitted")
    before = threading.active_count()
    with pytest.raises(FallbackRefusedError, match="not permitted"):
        CudaDevice(
            cuda,
            Storage.open([default_directory()]),
            host_bytes=0,
            strict=True,
            staging_bytes=STAGING,
        )
    until(lambda: threading.active_count() <= before + 1 + 4)  # but the fake's own streams
    cuda.close()
