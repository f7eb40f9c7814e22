"""One tensor in both tiers of a CUDA device, over fake streams."""

import errno
import gc

import pytest
import torch

from teraplan.errors import StorageError, StorageFullError
from teraplan.runtime.device import Copy
from teraplan.units import MIB
from teraplan.values.hardware import Tier
from teraplan.values.run_record import Direction
from tests.fakes.fake_cuda import FakeStream
from tests.runtime.cuda_world import LARGE, PHASES, World, content_of, until


def _split(world: World, seed: int, nbytes: int, host_bytes: int) -> Copy:
    return world.out(world.tensor(seed, nbytes), Tier.STORAGE, host_bytes)


@pytest.mark.parametrize("direct", [False, True])
@pytest.mark.parametrize("host_bytes", [1, 4096, 100_000, MIB, LARGE - 1])
def test_both_parts_come_back_into_one_memory(host_bytes: int, direct: bool) -> None:
    with World(direct=direct) as world:
        copy = _split(world, 1, LARGE, host_bytes)
        copy.wait_out()
        assert copy.nbytes == LARGE
        world.check(copy, 1, LARGE)
        records = world.device.take_transfers()
        world.settle()
        records += world.device.take_transfers()
        told = {(r.tier, r.direction): r.nbytes for r in records}
        for direction in (Direction.OUT, Direction.BACK):
            assert told[Tier.HOST, direction] == host_bytes
            assert told[Tier.STORAGE, direction] == LARGE - host_bytes
        copy.drop()
        until(lambda: world.storage.bytes_in_use == 0)
        until(lambda: world.device.pool.free_bytes == world.device.pool.limit_bytes)


def test_the_host_part_does_not_wait_for_storage() -> None:
    with World() as world:
        world.storage_gate.clear()
        copy = _split(world, 1, LARGE, 3 * MIB)
        until(lambda: world.num_writes > 0)
        world.cuda.finish()
        records = world.device.take_transfers()
        assert [(r.tier, r.nbytes) for r in records] == [(Tier.HOST, 3 * MIB)]
        world.storage_gate.set()
        copy.wait_out()
        world.check(copy, 1, LARGE)


@pytest.mark.parametrize("phase", PHASES)
def test_dropping_a_split_tensor_at_any_time_leaves_nothing_behind(phase: str) -> None:
    with World() as world:
        world.drop_when(phase, lambda: _split(world, 1, LARGE, 2 * MIB))
        until(lambda: world.device.pool.free_bytes == world.device.pool.limit_bytes)
        until(lambda: world.storage.bytes_in_use == 0)
        until(lambda: world.cuda.allocated("current") == 0)


def test_no_room_in_the_host_tier_leaves_nothing_of_the_other_part() -> None:
    with World() as world:
        kept = world.moved(1, 7 * MIB, Tier.HOST)
        tensor = world.tensor(2, LARGE)
        with pytest.raises(StorageFullError, match=r"do not fit in the host tier"):
            world.out(tensor, Tier.STORAGE, 2 * MIB)
        world.settle()
        until(lambda: world.storage.bytes_in_use == 0)
        whole = world.out(tensor)  # it is whole, and leaves as one
        whole.wait_out()
        world.check(whole, 2, LARGE)
        kept.drop()


def test_a_full_disk_leaves_a_split_tensor_whole() -> None:
    with World() as world:
        put = world.storage.put

        def full(*_: object, **__: object) -> None:
            raise StorageFullError("no space left")

        world.storage.put = full  # type: ignore[assignment,method-assign]
        tensor = world.tensor(1, LARGE)
        copy = world.out(tensor, Tier.STORAGE, MIB)
        world.settle()
        with pytest.raises(StorageFullError, match="no space left"):
            copy.wait_out()
        copy.drop()
        until(lambda: world.device.pool.free_bytes == world.device.pool.limit_bytes)
        world.storage.put = put  # type: ignore[method-assign]
        whole = world.out(tensor)
        whole.wait_out()
        world.check(whole, 1, LARGE)


def test_a_failed_read_of_one_part_reaches_who_waits() -> None:
    with World() as world:
        copy = _split(world, 1, LARGE, 2 * MIB)
        copy.wait_out()
        world.settle()

        def fail(*_: object) -> None:
            raise OSError(errno.EIO, "broken")

        world.arena.read = fail  # type: ignore[assignment,method-assign]
        arrival = world.device.start_back(copy)
        with pytest.raises(StorageError, match="broken"):
            arrival.wait()
        del arrival
        copy.drop()
        world.settle()
        world.device.take_transfers()  # the log holds on to what has failed
        gc.collect()
        until(lambda: world.device.pool.free_bytes == world.device.pool.limit_bytes)
        until(lambda: world.cuda.allocated("current") == 0)


def test_a_split_landing_of_another_stream_is_not_given_back_too_early() -> None:
    with World() as world:
        copy = _split(world, 1, LARGE, MIB)
        copy.wait_out()
        arrival = world.device.start_back(copy)
        other = FakeStream("other")
        world.cuda.streams.append(other)
        world.cuda.use(other)
        world.cuda.used.clear()
        assert torch.equal(world.back(arrival, LARGE), content_of(1, LARGE))
        assert set(world.cuda.used) == {"other"}
