"""The CUDA back end over fake streams: order, back-pressure, and nothing left behind."""

import ctypes
import gc
import itertools
import random
import threading

import pytest
import torch

from teraplan.errors import DeadlineError, StorageError
from teraplan.runtime.device import Arrival, Copy
from teraplan.units import GIB, MIB
from teraplan.values.hardware import Tier
from teraplan.values.run_record import Direction
from tests.fakes.fake_cuda import FakeStream
from tests.runtime.cuda_world import LARGE, PHASES, World, content_of, until

CLOCKS_APART_NS = 10_000_000
"""Device and host are tied by an event that a busy machine may record late."""
BOTH = pytest.mark.parametrize("tier", [Tier.HOST, Tier.STORAGE])


@BOTH
@pytest.mark.parametrize("nbytes", [1, 4096, 100_000, MIB, LARGE])
def test_bytes_come_back(tier: Tier, nbytes: int) -> None:
    with World() as world:
        world.check(world.moved(3, nbytes, tier), 3, nbytes)


def test_bytes_come_back_by_gds() -> None:
    with World(direct=True) as world:
        assert world.device.staging is None
        copies = [world.moved(seed, 100_000 + seed) for seed in range(5)]
        for seed, copy in enumerate(copies):
            world.check(copy, seed, 100_000 + seed)
            copy.drop()
        until(lambda: world.storage.bytes_in_use == 0)


@BOTH
def test_the_copy_waits_for_the_computation_and_the_computation_for_the_copy(tier: Tier) -> None:
    with World() as world:
        tensor = world.tensor(1, 1000)
        world.cuda.compute.gate.clear()
        world.cuda.calls.clear()
        copy = world.out(tensor, tier)
        side = next(stream for call, stream in world.cuda.calls if call == "copy")
        calls = [call for call in world.cuda.calls if call[1] in ("compute", side)]
        assert calls[:2] == [("record", "compute"), ("wait", side)]
        assert calls.index(("copy", side)) > 1
        assert calls[-1] == ("record", side)
        world.cuda.calls.clear()
        assert copy.wait_out() == 0, "the host does not wait for the copy"
        assert ("wait", "compute") in world.cuda.calls
        world.cuda.compute.gate.set()


@BOTH
def test_memory_that_is_used_again_at_once_does_not_spoil_the_copy(tier: Tier) -> None:
    with World() as world:
        tensor = world.tensor(1, 100_000)
        address = tensor.data_ptr()
        side = world.copy_stream(Direction.OUT)
        side.gate.clear()
        copy = world.out(tensor, tier)
        copy.wait_out()
        del tensor
        gc.collect()
        other = world.tensor(2, 100_000)
        assert other.data_ptr() == address
        side.gate.set()
        world.check(copy, 1, 100_000)


@BOTH
def test_the_landing_is_filled_only_after_its_memory_is_free(tier: Tier) -> None:
    with World() as world:
        copy = world.moved(1, 100_000, tier)
        world.settle()
        earlier = world.tensor(2, 100_000)
        address, seen = earlier.data_ptr(), torch.empty(100_000, dtype=torch.uint8)
        world.cuda.compute.gate.clear()
        # A kernel has the address and keeps nothing alive.
        world.cuda.run(lambda: ctypes.memmove(seen.data_ptr(), address, 100_000))
        del earlier
        arrival = world.device.start_back(copy)
        threading.Timer(0.1, world.cuda.compute.gate.set).start()
        found = world.back(arrival, 100_000)
        assert torch.equal(seen, content_of(2, 100_000)), "overwritten too early"
        assert torch.equal(found, content_of(1, 100_000))


@BOTH
def test_what_is_asked_back_before_it_has_left(tier: Tier) -> None:
    with World() as world:
        side = world.copy_stream(Direction.OUT)
        side.gate.clear()
        copy = world.moved(1, 100_000, tier)
        arrival = world.device.start_back(copy)
        threading.Timer(0.1, side.gate.set).start()
        assert torch.equal(world.back(arrival, 100_000), content_of(1, 100_000))


def test_host_memory_is_free_only_when_the_copy_to_it_has_ended() -> None:
    with World() as world:
        side = world.copy_stream(Direction.OUT)
        side.gate.clear()
        world.moved(1, MIB, Tier.HOST).drop()
        assert world.device.pool.free_bytes == 7 * MIB
        side.gate.set()
        until(lambda: world.device.pool.free_bytes == 8 * MIB)


def test_a_slot_is_free_when_its_write_has_ended_and_no_earlier() -> None:
    with World() as world:
        world.storage_gate.clear()
        copy = world.moved(1, MIB)
        until(lambda: world.num_writes == 1)
        world.cuda.finish()
        assert world.slots_in_use == MIB
        world.storage_gate.set()
        world.settle()
        assert world.slots_in_use == 0
        world.check(copy, 1, MIB)


def test_what_comes_back_during_its_write_is_copied_from_host_memory() -> None:
    with World() as world:
        world.storage_gate.clear()
        copy = world.moved(1, MIB)
        world.check(copy, 1, MIB)
        assert world.device.stores()[0].read_bytes == 0
        copy.drop()
        world.storage_gate.set()
        world.settle()
        until(lambda: world.storage.bytes_in_use == 0)


def test_back_pressure_delays_the_wait_and_never_the_start() -> None:
    with World(deadline_s=1.0) as world:
        world.storage_gate.clear()
        first = world.moved(1, 2 * MIB)  # all slots
        late = world.tensor(2, MIB)
        second = world.out(late)
        assert world.slots_in_use == 2 * MIB
        with pytest.raises(
            DeadlineError, match=r"t1048576 did not leave.* 0 B are free, 1 tensors"
        ):
            second.wait_out()
        world.storage_gate.set()
        until(lambda: _wait_out(second))
        world.cuda.run(lambda: late.fill_(0))
        world.check(first, 1, 2 * MIB)
        world.check(second, 2, MIB)


def _wait_out(copy: Copy) -> bool:
    try:
        copy.wait_out()
    except DeadlineError:
        return False
    return True


def test_writes_cannot_take_the_memory_of_reads() -> None:
    with World() as world:
        early = world.moved(1, 4 * MIB)
        world.settle()
        world.storage_gate.clear()
        held = [world.out(world.tensor(seed, MIB)) for seed in range(2, 4)]
        stuck = [world.out(world.tensor(seed, 4 * MIB)) for seed in range(4, 6)]
        until(lambda: world.num_writes == 6)  # two of three workers are held
        world.check(early, 1, 4 * MIB)
        world.storage_gate.set()
        for seed, copy in enumerate(held + stuck, 2):
            copy.wait_out()
            world.check(copy, seed, copy.nbytes)


def test_an_urgent_tensor_overtakes_those_in_line() -> None:
    with World() as world:
        copies = [world.moved(seed, 2 * MIB) for seed in range(6)]
        world.settle()
        side = world.copy_stream(Direction.BACK)
        side.gate.clear()
        arrivals = [world.device.start_back(copy) for copy in copies]
        staging = world.device.staging
        assert staging is not None
        until(lambda: len(staging._stuck_back) >= 4)
        threading.Timer(0.05, side.gate.set).start()
        arrivals[-1].wait()
        assert staging._stuck_back, "the others are still in line"
        for seed, arrival in enumerate(arrivals[:-1]):
            assert torch.equal(world.back(arrival, 2 * MIB), content_of(seed, 2 * MIB))


@BOTH
@pytest.mark.parametrize("phase", PHASES)
def test_dropping_at_any_time_leaves_nothing_behind(tier: Tier, phase: str) -> None:
    with World() as world:
        addresses: list[int] = []

        def start() -> Copy:
            tensor = world.tensor(1, LARGE)
            addresses.append(tensor.data_ptr())
            return world.out(tensor, tier)

        world.drop_when(phase, start)
        assert world.device.pool.in_use_bytes == 0 or world.device.pool.free_bytes == 8 * MIB
        until(lambda: world.storage.bytes_in_use == 0)
        until(lambda: world.cuda.allocated("current") == 0)
        assert [world.tensor(2, LARGE).data_ptr()] == addresses or phase == "coming back"


@BOTH
def test_a_landing_that_nobody_takes_is_not_written_to_after_its_end(tier: Tier) -> None:
    with World() as world:
        copy = world.moved(1, 100_000, tier)
        world.settle()
        side = world.copy_stream(Direction.BACK)
        side.gate.clear()
        arrival = world.device.start_back(copy)
        if tier is Tier.STORAGE:
            until(lambda: ("copy", side.name) in world.cuda.calls[-3:])
        del arrival
        copy.drop()
        gc.collect()
        other = world.tensor(2, 100_000)
        side.gate.set()
        world.settle()
        assert torch.equal(other, content_of(2, 100_000))


def test_memory_of_another_stream_is_not_given_back_too_early() -> None:
    with World() as world:
        copy = world.moved(1, 5000, Tier.HOST)
        staged = world.moved(2, 5000)
        arrivals = [world.device.start_back(c) for c in (copy, staged)]
        other = FakeStream("other")
        world.cuda.streams.append(other)
        world.cuda.use(other)
        for seed, arrival in enumerate(arrivals, 1):
            world.cuda.used.clear()
            assert torch.equal(world.back(arrival, 5000), content_of(seed, 5000))
            assert world.cuda.used == ["other"]


def test_transfers_and_waits_of_the_device_are_timed() -> None:
    with World(slowest_s=0.02) as world:
        names = [(Tier.HOST, 2 * MIB), (Tier.STORAGE, LARGE)]
        for tier, nbytes in names:
            copy = world.moved(1, nbytes, tier)
            world.settle()
            world.check(copy, 1, nbytes)
        world.settle()
        records = world.device.take_transfers()
        assert [(r.tier, r.nbytes, r.direction) for r in records] == [
            (tier, nbytes, direction) for tier, nbytes in names for direction in Direction
        ]
        assert all(0 < r.start_ns < r.end_ns for r in records)
        assert all(
            a.start_ns < b.start_ns and a.end_ns <= b.start_ns + CLOCKS_APART_NS
            for a, b in itertools.pairwise(records)
        )
        assert {r.store for r in records if r.tier is Tier.HOST} == {""}
        assert all(r.store for r in records if r.tier is Tier.STORAGE)
        assert not world.device.take_transfers()
        stalls = world.device.take_stalls()
        assert {label for label, _, _ in stalls} == {f"t{n}" for _, n in names}
        assert all(length_ns >= 0 for _, _, length_ns in stalls)


def test_marks_measure_the_computation() -> None:
    with World() as world:
        start = world.device.mark()
        world.cuda.run(lambda: threading.Event().wait(0.05))
        assert world.device.elapsed_ns(start, world.device.mark()) > 40_000_000


def test_memory_is_what_the_allocator_counts() -> None:
    with World() as world:
        device = world.device
        held = world.tensor(1, MIB)
        assert device.state_bytes() == device.resident_bytes() == MIB
        device.take_peak()
        del held
        assert device.take_peak() == MIB
        assert device.take_peak() == 0


def steps_that_give_memory_back(world: World, steps: range, cached_bytes: int) -> list[int]:
    """Of 40 sites each, under 1 GiB, if they need so much more at every site."""
    found = []
    for step in steps:
        for _ in range(40):
            world.cuda.cached_bytes, world.cuda.calls[:] = cached_bytes, []
            world.device.keep_under(GIB - 8 * MIB, 8 * MIB)
            found += [step] * world.cuda.calls.count(("empty_cache", ""))
        world.device.take_transfers()
    return found


def test_memory_that_comes_back_is_given_back_ever_more_rarely() -> None:
    with World() as world:
        assert not steps_that_give_memory_back(world, range(9), GIB)
        given = steps_that_give_memory_back(world, range(9, 300), GIB + 100 * MIB)
        assert given == [9, 10, 12, 16, 24, 40, 72, 136, 200, 264]
        assert not steps_that_give_memory_back(world, range(300, 500), GIB)
        given = steps_that_give_memory_back(world, range(500, 510), GIB + 100 * MIB)
        assert given == [500, 501, 503, 507]


@pytest.mark.parametrize(
    ("cached_bytes", "split_bytes"),
    [(2 * GIB, 2 * GIB - 60 * MIB), (2 * GIB, GIB + GIB // 2 + MIB), (GIB - MIB, 0)],
)
def test_nothing_is_given_back_where_it_brings_little(cached_bytes: int, split_bytes: int) -> None:
    with World() as world:
        world.cuda.split_bytes = split_bytes
        assert not steps_that_give_memory_back(world, range(3), cached_bytes)


def test_the_allocator_is_asked_at_few_sites() -> None:
    with World() as world:
        for _ in range(400):
            world.device.keep_under(GIB, 0)
        assert world.cuda.calls.count(("reserved", "")) == 50


def test_hardware_counts_staging_as_host_memory() -> None:
    with World() as world:
        hardware = world.device.hardware()
        assert 7.9 * MIB < hardware.host_capacity_bytes <= 8 * MIB
        assert hardware.host_link is not None
        assert hardware.storage_link is not None


def test_closing_with_everything_under_way() -> None:
    world = World()
    world.storage_gate.clear()
    copies = [world.out(world.tensor(seed, LARGE)) for seed in range(3)]
    world.moved(4, MIB, Tier.HOST)
    threading.Timer(0.1, world.storage_gate.set).start()
    with world:
        world.device.close()
        world.device.close()
        for copy in copies[1:]:
            with pytest.raises(StorageError, match="closed"):
                copy.wait_out()
    for copy in copies:
        copy.drop()


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(s, marks=pytest.mark.slow) for s in range(1, 6))]
)
def test_any_order_ends_with_the_right_bytes(seed: int) -> None:
    """Little memory, random sizes, tiers and drops; a dead-lock would be a DeadlineError."""
    choose = random.Random(seed)
    with World(seed=seed, slowest_s=0.002) as world:
        alive: list[tuple[Copy, int, int, Arrival | None]] = []
        arrival: Arrival | None = None
        for number in range(60):
            tier = choose.choice([Tier.STORAGE, Tier.STORAGE, Tier.HOST])
            nbytes = choose.choice([700, 70_000, 3 * MIB, LARGE])
            action = choose.random()
            if action < 0.5 or not alive:
                if tier is Tier.HOST and world.device.pool.free_bytes < nbytes + 1024:
                    tier = Tier.STORAGE
                host_bytes = 0
                if tier is Tier.STORAGE and world.device.pool.free_bytes > nbytes > MIB:
                    host_bytes = choose.choice([0, 4096, MIB])
                copy = world.out(world.tensor(number, nbytes), tier, host_bytes)
                if choose.random() < 0.9:
                    copy.wait_out()
                    arrival = world.device.start_back(copy) if choose.random() < 0.3 else None
                    alive.append((copy, number, nbytes, arrival))
                else:
                    copy.drop()
                continue
            copy, content, nbytes, arrival = alive.pop(choose.randrange(len(alive)))
            if action < 0.9:
                arrival = arrival or world.device.start_back(copy, urgent=choose.random() < 0.5)
                found = world.back(arrival, nbytes)
                assert torch.equal(found, content_of(content, nbytes))
            arrival = None
            copy.drop()
        while alive:
            copy, _, _, arrival = alive.pop()
            copy.drop()
        arrival = None
        world.settle()
        gc.collect()
        until(lambda: world.storage.bytes_in_use == 0)
        until(lambda: world.cuda.allocated("current") == 0)
        assert world.device.pool.free_bytes == 8 * MIB
