"""Training state that leaves a GPU: what is away is read and written where it lies.

The device is `FakeCuda`: kernels run late, with the addresses that tensors had when they were
launched, and freed memory is overwritten in the order of its stream.
"""

import ctypes
import gc
import random
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from teraplan.errors import StorageFullError
from teraplan.runtime.state.arena import StateArena
from teraplan.runtime.state.block import Block, Place
from teraplan.step_trace import TensorKind
from teraplan.units import MIB
from tests.runtime.cuda_world import STAGING, World

NBYTES = MIB // 4
LIMIT = 4 * NBYTES


@pytest.fixture
def world() -> Iterator[World]:
    with World(host_bytes=STAGING + 64 * NBYTES) as opened:
        yield opened


@pytest.fixture
def arena(world: World) -> Iterator[StateArena]:
    arena = StateArena(world.device.state_memory(), LIMIT)
    yield arena
    arena.close()


def write(world: World, tensor: Tensor, value: int) -> None:
    """A kernel fills the tensor, where that is now."""
    address, nbytes = tensor.data_ptr(), tensor.nbytes
    world.cuda.run(lambda: ctypes.memset(address, value, nbytes))


def read(world: World, tensor: Tensor) -> int:
    """The value that a kernel finds in all of the tensor; -1 if there are several."""
    address, nbytes = tensor.data_ptr(), tensor.nbytes
    found: list[bytes] = []
    world.cuda.run(lambda: found.append(ctypes.string_at(address, nbytes)))
    world.cuda.record(world.cuda.current_stream()).synchronize()
    values = set(found[0])
    return values.pop() if len(values) == 1 else -1


def filled(world: World, arena: StateArena, number: int) -> tuple[Tensor, Block]:
    key = (TensorKind.PARAMETER, number)
    like = torch.empty(NBYTES, dtype=torch.uint8)
    block = arena.open(NBYTES, key, "parameter", shape=(NBYTES,), dtype="uint8")
    arena.use(block, writes=True, may_write=True)
    tensor = arena.place(block, like)
    write(world, tensor, number)
    arena.done(block, leaves=False)
    return tensor, block


def sent_out(arena: StateArena, block: Block) -> None:
    arena.send_out(block)
    arena.see_out(block)
    assert block.place is Place.AWAY


def test_what_is_away_is_right_for_whoever_reads_it(world: World, arena: StateArena) -> None:
    tensors = [filled(world, arena, number) for number in range(12)]
    views = [tensor.view(-1, 64)[1:3] for tensor, _ in tensors]
    places = [block.place for _, block in tensors]
    assert places.count(Place.AWAY) == 8
    assert arena.held_bytes == LIMIT
    assert arena.memory.held.peak_bytes <= LIMIT
    assert [read(world, tensor) for tensor, _ in tensors] == list(range(12))
    assert [read(world, view) for view in views] == list(range(12))
    for tensor, block in tensors:
        arena.use(block)
        assert block.place is Place.MEMORY
        assert tensor.data_ptr() == block.address
        arena.done(block, leaves=True)
    assert [read(world, tensor) for tensor, _ in tensors] == list(range(12))
    assert [read(world, view) for view in views] == list(range(12))


def test_what_is_written_where_it_lies_comes_back(world: World, arena: StateArena) -> None:
    tensor, block = filled(world, arena, 1)
    sent_out(arena, block)
    write(world, tensor, 7)
    arena.use(block)
    assert read(world, tensor) == 7
    write(world, tensor, 8)
    arena.user_may_have_run()
    arena.done(block, leaves=False)
    sent_out(arena, block)
    assert read(world, tensor) == 8


def test_unchanged_bytes_are_copied_once(world: World, arena: StateArena) -> None:
    tensor, block = filled(world, arena, 1)
    sent_out(arena, block)
    for _ in range(3):
        arena.use(block)
        arena.done(block, leaves=True)
        sent_out(arena, block)
    assert arena.log.traffic.to_host_bytes == NBYTES
    assert arena.log.traffic.from_host_bytes == 3 * NBYTES
    arena.use(block, may_write=True)
    write(world, tensor, 2)
    arena.done(block, leaves=True)
    sent_out(arena, block)
    assert arena.log.traffic.to_host_bytes == 2 * NBYTES
    assert read(world, tensor) == 2


def test_what_is_written_while_it_leaves_is_copied_again(world: World, arena: StateArena) -> None:
    tensor, block = filled(world, arena, 1)
    arena.send_out(block)
    world.cuda.finish()
    write(world, tensor, 9)  # by code that nobody tells of
    arena.user_may_have_run()
    arena.see_out(block)
    assert block.place is Place.AWAY
    assert read(world, tensor) == 9
    assert arena.log.traffic.to_host_bytes == 2 * NBYTES


def test_nothing_comes_while_code_runs_that_nobody_tells_of(
    world: World, arena: StateArena
) -> None:
    tensor, block = filled(world, arena, 1)
    sent_out(arena, block)
    arena.fetch(block)
    assert arena.held_bytes == NBYTES
    arena.user_may_run()
    assert tensor.data_ptr() == block.address
    write(world, tensor, 5)
    arena.user_may_have_run()
    sent_out(arena, block)
    assert read(world, tensor) == 5


def test_where_it_did_it_is_read_again(world: World, arena: StateArena) -> None:
    tensor, block = filled(world, arena, 1)
    sent_out(arena, block)
    arena.fetch(block)
    world.cuda.finish()
    write(world, tensor, 6)
    arena.user_may_have_run()
    arena.use(block)
    assert read(world, tensor) == 6


def test_tensors_of_one_block_move_together(world: World, arena: StateArena) -> None:
    key = (TensorKind.PARAMETER, 0)
    block = arena.open(NBYTES, key, "parameters", shape=(NBYTES,), dtype="uint8")
    block.is_open = True
    arena.use(block, writes=True, may_write=True)
    parts = [arena.place(block, torch.empty(1000), offset) for offset in (0, 4096, 8192)]
    block.filled_bytes = 8192 + 4000
    arena.close_block(block)
    for value in range(3):
        write(world, parts[value], value)
    arena.done(block, leaves=False)
    sent_out(arena, block)
    assert [read(world, part) for part in parts] == [0, 1, 2]
    del parts[1]
    arena.use(block)
    assert [read(world, part) for part in parts] == [0, 2]
    parts.clear()
    arena.done(block, leaves=False)
    assert not arena.blocks
    assert arena.held_bytes == 0


def test_what_has_no_room_on_the_host_stays(world: World, arena: StateArena) -> None:
    taken = world.device.pool.try_take(world.device.pool.free_bytes)
    tensor, block = filled(world, arena, 3)
    with pytest.raises(StorageFullError, match=r"parameter 3 \(262144\): .* raise host_budget"):
        arena.send_out(block)
    assert taken is not None
    del taken
    assert read(world, tensor) == 3
    sent_out(arena, block)
    assert read(world, tensor) == 3


def test_what_lies_on_the_host_is_room_for_the_next_plan(world: World, arena: StateArena) -> None:
    before = world.device.hardware().host_capacity_bytes
    kept, block = filled(world, arena, 1)
    sent_out(arena, block)
    world.settle()
    assert world.device.pool.in_use_bytes == kept.nbytes
    assert world.device.hardware().host_capacity_bytes == before


def test_second_copies_give_way(world: World, arena: StateArena) -> None:
    first, here = filled(world, arena, 1)
    sent_out(arena, here)
    arena.use(here)
    arena.done(here, leaves=False)
    world.settle()
    taken = world.device.pool.try_take(world.device.pool.free_bytes)
    other, block = filled(world, arena, 2)
    sent_out(arena, block)
    assert here.record is None
    assert [read(world, first), read(world, other)] == [1, 2]
    del taken
    sent_out(arena, here)
    assert [read(world, first), read(world, other)] == [1, 2]


def test_kernels_are_shown_pinned_memory_only() -> None:
    with World(host_bytes=STAGING + 64 * NBYTES, why_not_pinned="no more locked memory") as world:
        assert world.device.why_state_stays.endswith("are pageable: no more locked memory")
        arena = StateArena(world.device.state_memory(), LIMIT)
        tensor, block = filled(world, arena, 3)
        with pytest.raises(StorageFullError, match=r"host_budget \(.* no more locked memory\)"):
            arena.send_out(block)
        assert read(world, tensor) == 3
        arena.close()


@pytest.mark.parametrize("place", Place)
def test_memory_of_what_ends_is_free_at_once(world: World, arena: StateArena, place: Place) -> None:
    tensor, block = filled(world, arena, 1)
    if place is not Place.MEMORY:
        sent_out(arena, block)
    if place is Place.COMING:
        arena.fetch(block)
    assert block.place is place
    del tensor
    world.cuda.finish()
    arena.prefetch()
    assert not arena.blocks
    assert arena.held_bytes == 0
    del block
    world.settle()
    assert world.device.pool.in_use_bytes == 0
    assert world.cuda.memory("allocated", "current") == 0


def test_tensors_outlive_the_session(world: World, arena: StateArena) -> None:
    tensors = [filled(world, arena, number) for number in range(8)]
    world.settle()
    arena.close()
    world.device.close()
    assert [read(world, tensor) for tensor, _ in tensors] == list(range(8))
    assert world.cuda.pinned, "kernels may still read what lies on the host"
    tensors.clear()
    del arena
    gc.collect()
    assert not world.cuda.pinned
    assert world.cuda.memory("allocated", "current") == 0


@pytest.mark.parametrize("seed", range(8))
def test_any_order_of_uses_and_writes(seed: int) -> None:
    """What a kernel finds is always what was written there last, wherever it was then."""
    with World(seed=seed, host_bytes=STAGING + 64 * NBYTES, slowest_s=0.001) as world:
        use_in_any_order(world, random.Random(seed))


def use_in_any_order(world: World, chosen: random.Random) -> None:
    arena = StateArena(world.device.state_memory(), LIMIT)
    tensors = [filled(world, arena, number) for number in range(10)]
    values = list(range(10))
    for _ in range(300):
        number = chosen.randrange(10)
        tensor, block = tensors[number]
        action = chosen.choice(
            ["graph", "update", "user writes", "read", "out", "gone", "fetch", "limit", "new"]
        )
        if action in ("graph", "update"):
            writes = action == "update"
            arena.use(block, writes=writes, may_write=writes)
            assert block.place is Place.MEMORY
            if writes:
                values[number] = chosen.randrange(256)
                write(world, tensor, values[number])
            arena.done(block, leaves=chosen.random() < 0.5)
        elif action == "user writes":
            if chosen.random() < 0.5:
                arena.user_may_run()
            values[number] = chosen.randrange(256)
            write(world, tensor, values[number])
            arena.user_may_have_run()
        elif action == "read":
            assert read(world, tensor) == values[number]
        elif action == "out":
            arena.send_out(block)
        elif action == "gone":
            arena.see_out(block)
        elif action == "fetch":
            arena.fetch(block)
        elif action == "limit":
            arena.keep_to(chosen.randrange(1, 5) * NBYTES)
        else:
            tensors[number] = filled(world, arena, number)
            values[number] = number
    assert [read(world, tensor) for tensor, _ in tensors] == values
    assert arena.overrun_bytes == 0
    arena.close()
