"""Training state that leaves a GPU: what is away is read and written where it lies.

The device is `FakeCuda`: kernels run late, with the addresses that tensors had when they were
launched, and freed memory is overwritten in the order of its stream.
"""

import ctypes
import errno
import gc
import random
import re
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from teraplan.errors import StorageError, StorageFullError
from teraplan.runtime.cuda.storage_pointers import why_not
from teraplan.runtime.state.memory.arena import StateArena
from teraplan.runtime.state.memory.block import Block, Place
from teraplan.units import MIB
from teraplan.values.step_trace import TensorKind
from tests.fakes.faulty_calls import Fault, injected
from tests.runtime.cuda_world import STAGING, World, until

pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not())

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


def filled(
    world: World, arena: StateArena, number: int, kind: TensorKind = TensorKind.PARAMETER
) -> tuple[Tensor, Block]:
    like = torch.empty(NBYTES, dtype=torch.uint8)
    block = arena.open(NBYTES, (kind, number), str(kind), shape=(NBYTES,), dtype="uint8")
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
    arena.send_out(block)
    assert re.fullmatch(r"parameter 3 \(262144\): .* raise host_budget", arena.why_stayed)
    with pytest.raises(StorageFullError, match=r"parameter 3 \(262144\): .* raise host_budget"):
        arena.keep_to(0)
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
        tensor, _ = filled(world, arena, 3)
        with pytest.raises(StorageFullError, match=r"host_budget \(.* no more locked memory\)"):
            arena.keep_to(0)
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
    until(lambda: world.device.pool.in_use_bytes == 0)  # a thread that moved it may have it still
    assert world.cuda.allocated("current") == 0


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
    assert world.cuda.allocated("current") == 0


@pytest.fixture(params=["staged", "direct"])
def short_of_host(request: pytest.FixtureRequest) -> Iterator[World]:
    """A device with host memory for two tensors; storage takes device memory, or staged pieces."""
    direct = request.param == "direct"
    host_bytes = 2 * NBYTES + (0 if direct else STAGING)
    with World(host_bytes=host_bytes, direct=direct) as opened:
        yield opened


def stored(world: World, arena: StateArena, number: int) -> tuple[Tensor, Block]:
    """Optimizer state that has left for storage."""
    tensor, block = filled(world, arena, number, TensorKind.OPTIMIZER_STATE)
    arena.see_out(block, host_bytes=0)
    assert block.place is Place.AWAY
    return tensor, block


def test_what_is_in_storage_raises_and_comes_back(short_of_host: World) -> None:
    world = short_of_host
    arena = StateArena(world.device.state_memory(), LIMIT)
    tensor, block = stored(world, arena, 7)
    view = tensor.view(-1, 64)[1:3]
    assert arena.held_bytes == 0
    for use in (tensor.sum, view.zero_, tensor.data_ptr, tensor.tolist):
        with pytest.raises(RuntimeError, match=r"^optimizer_state 7 .*optimizer\.state_dict\(\)"):
            use()
    shown = arena.memory.readable(tensor)
    assert shown.shape == tensor.shape
    assert (shown == 7).all()
    shown.fill_(1)
    arena.fetch(block)
    arena.user_may_run()
    with pytest.raises(RuntimeError, match="is in storage"):
        tensor.sum()
    arena.use(block, writes=True, may_write=True)
    assert [read(world, tensor), read(world, view)] == [7, 7]
    write(world, tensor, 8)
    arena.done(block, leaves=False)
    arena.see_out(block, host_bytes=0)
    assert (shown == 1).all()
    assert (arena.memory.readable(tensor) == 8).all()
    arena.close()
    assert read(world, tensor) == 8


def test_a_view_keeps_what_it_shows(short_of_host: World) -> None:
    world = short_of_host
    arena = StateArena(world.device.state_memory(), LIMIT)
    tensor, block = stored(world, arena, 7)
    shown = arena.memory.readable(tensor)
    in_use = world.storage.bytes_in_use
    del tensor, block
    others = [stored(world, arena, number) for number in range(4)]
    assert (shown == 7).all()
    assert world.storage.bytes_in_use == in_use + 4 * NBYTES
    del shown, others
    arena.prefetch()
    until(lambda: world.storage.bytes_in_use == 0)
    arena.close()


def test_a_part_in_host_memory_comes_back_too(short_of_host: World) -> None:
    world = short_of_host
    arena = StateArena(world.device.state_memory(), LIMIT)
    tensor, block = filled(world, arena, 7, TensorKind.OPTIMIZER_STATE)
    arena.see_out(block, host_bytes=NBYTES // 3)
    assert 0 < arena.log.traffic.to_host_bytes <= NBYTES // 3
    assert arena.log.traffic.to_host_bytes + arena.log.traffic.written_bytes == NBYTES
    assert (arena.memory.readable(tensor) == 7).all()
    arena.use(block)
    assert read(world, tensor) == 7
    arena.done(block, leaves=False)
    arena.close()


def test_a_failed_write_frees_no_memory(short_of_host: World) -> None:
    """What host memory has no room for, either, stays whole; what it has goes there."""
    fail_to_write(short_of_host)
    short_of_host.device.take_transfers()  # with their errors, and those with frames
    gc.collect()


def fail_to_write(world: World) -> None:
    arena = StateArena(world.device.state_memory(), LIMIT)
    tensors = [filled(world, arena, number, TensorKind.OPTIMIZER_STATE) for number in range(3)]
    with injected(Fault(call="write", what=errno.EIO, at=1, times=1000)):
        for _, block in tensors[:2]:
            arena.see_out(block, host_bytes=0)
            assert block.place is Place.AWAY
        with pytest.raises(StorageError):
            arena.see_out(tensors[2][1], host_bytes=0)
        assert tensors[2][1].place is Place.MEMORY
    assert [read(world, tensor) for tensor, _ in tensors] == [0, 1, 2]
    arena.close()


def test_after_its_update_a_gradient_may_go_to_storage(short_of_host: World) -> None:
    world = short_of_host
    arena = StateArena(world.device.state_memory(), LIMIT)
    taken = world.device.pool.try_take(2 * NBYTES)
    tensor, block = filled(world, arena, 5, TensorKind.GRADIENT)
    arena.send_out(block)
    assert "host_budget" in arena.why_stayed
    block.num_spent = 1
    arena.see_out(block)
    with pytest.raises(RuntimeError, match=r"^gradient 5 .* before optimizer\.step\(\)"):
        tensor.sum()
    arena.use(block)
    assert read(world, tensor) == 5
    arena.done(block, leaves=False)
    arena.close()
    del taken


@pytest.mark.parametrize("way", ["host", "staged", "direct"])
@pytest.mark.parametrize(
    "seed", [0, 1, *(pytest.param(s, marks=pytest.mark.slow) for s in range(2, 8))]
)
def test_any_order_of_uses_and_writes(seed: int, way: str) -> None:
    """What a kernel finds is always what was written there last, wherever it was then."""
    host_bytes = 64 * NBYTES + (0 if way == "direct" else STAGING)
    direct = way == "direct"
    with World(seed=seed, host_bytes=host_bytes, slowest_s=0.001, direct=direct) as world:
        Walk(world, random.Random(seed), stores=way != "host").go()


class Walk:
    """Ten tensors in any order of actions; with `stores`, half of them may go to storage."""

    def __init__(self, world: World, chosen: random.Random, *, stores: bool) -> None:
        self.world, self.chosen, self.stores = world, chosen, stores
        self.arena = StateArena(world.device.state_memory(), LIMIT)
        self.tensors = [self.made(number) for number in range(10)]
        self.values = list(range(10))

    def made(self, number: int) -> tuple[Tensor, Block]:
        stored = self.stores and number >= 5
        kind = TensorKind.OPTIMIZER_STATE if stored else TensorKind.PARAMETER
        tensor, block = filled(self.world, self.arena, number, kind)
        if stored:
            self.arena.see_out(block, host_bytes=0)
        return tensor, block

    def found(self, number: int) -> int:
        tensor = self.tensors[number][0]
        shown = self.arena.memory.readable(tensor)
        if shown is tensor:
            return read(self.world, tensor)
        assert (shown == shown[0]).all()
        return int(shown[0])

    def go(self) -> None:
        actions = (self.graph, self.update, self.user_writes, self.check, self.leave, self.new)
        for _ in range(300):
            act = self.chosen.choice((*actions, self.gone, self.fetch, self.limit))
            act(self.chosen.randrange(10))
        self.end()

    def graph(self, number: int, *, writes: bool = False) -> None:
        tensor, block = self.tensors[number]
        self.arena.use(block, writes=writes, may_write=writes)
        assert block.place is Place.MEMORY
        if writes:
            self.write(tensor, number)
        self.arena.done(block, leaves=self.chosen.random() < 0.5)

    def update(self, number: int) -> None:
        self.graph(number, writes=True)

    def write(self, tensor: Tensor, number: int) -> None:
        self.values[number] = self.chosen.randrange(256)
        write(self.world, tensor, self.values[number])

    def user_writes(self, number: int) -> None:
        tensor = self.tensors[number][0]
        if self.chosen.random() < 0.5:
            self.arena.user_may_run()
        if self.arena.memory.readable(tensor) is tensor:
            self.write(tensor, number)
        self.arena.user_may_have_run()

    def check(self, number: int) -> None:
        assert self.found(number) == self.values[number]

    def leave(self, number: int) -> None:
        self.arena.send_out(self.tensors[number][1], self.chosen.choice([0, NBYTES // 2, NBYTES]))

    def gone(self, number: int) -> None:
        self.arena.see_out(self.tensors[number][1])

    def fetch(self, number: int) -> None:
        self.arena.fetch(self.tensors[number][1])

    def limit(self, number: int) -> None:
        self.arena.keep_to((1 + number % 4) * NBYTES)

    def new(self, number: int) -> None:
        self.tensors[number], self.values[number] = self.made(number), number

    def end(self) -> None:
        """All is as it should be, also after the arena's end."""
        assert [self.found(number) for number in range(10)] == self.values
        assert self.arena.overrun_bytes == 0
        traffic = self.arena.log.traffic
        assert bool(traffic.written_bytes and traffic.read_bytes) == self.stores
        self.arena.close()
        assert [read(self.world, tensor) for tensor, _ in self.tensors] == self.values
