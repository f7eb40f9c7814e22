"""Tensors that leave and keep their addresses, over a real file."""

import ctypes
import errno
import gc
import mmap
import os
import threading
import time
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from teraplan.errors import IntegrityError, StorageError
from teraplan.runtime.cpu.pool import CpuPool
from teraplan.runtime.cpu.trimmer import Trimmer
from teraplan.runtime.process import pages, process_memory
from teraplan.runtime.state.memory import digests, timeline
from teraplan.runtime.state.memory.arena import StateArena
from teraplan.runtime.state.memory.block import Block, Key, Place
from teraplan.runtime.state.memory.departures import departures
from teraplan.runtime.state.memory.timeline import NEVER, Timeline
from teraplan.runtime.storage.memory import digest
from teraplan.runtime.storage.tiers import Return
from teraplan.units import MIB
from teraplan.values.step_trace import TensorKind
from tests.fakes.faulty_calls import Fault, injected
from tests.runtime import state_arena
from tests.runtime.state_arena import pages_of

A, B, C = ((TensorKind.PARAMETER, number) for number in range(3))
G = (TensorKind.GRADIENT, 0)


@pytest.fixture(params=["storage", pytest.param("host memory", marks=pytest.mark.slow), "both"])
def arena(request: pytest.FixtureRequest) -> Iterator[StateArena]:
    """What leaves it goes to storage, to host memory, or to that as long as there is room."""
    host_bytes = {"storage": 0, "host memory": 256 * MIB, "both": 3 * MIB}
    with state_arena.opened(4 * MIB, host_bytes[request.param]) as arena:
        yield arena


def filled(arena: StateArena, number: int, nbytes: int = MIB) -> tuple[Tensor, Block]:
    return placed(arena, torch.full((nbytes // 4,), float(number)), (TensorKind.PARAMETER, number))


def placed(arena: StateArena, value: Tensor, key: Key) -> tuple[Tensor, Block]:
    what, shape = str(key[0]), tuple(value.shape)
    block = arena.open(value.nbytes, key, what, shape=shape, dtype="float32")
    return arena.place(block, value).copy_(value), block


def out_bytes(arena: StateArena) -> int:
    """That have left, for whichever tier."""
    return arena.log.traffic.written_bytes + arena.log.traffic.to_host_bytes


def test_what_is_away_is_read_at_its_address(arena: StateArena) -> None:
    tensors = [filled(arena, number)[0] for number in range(12)]
    assert arena.held_bytes <= 4 * MIB
    assert arena.memory.held.peak_bytes <= 4 * MIB
    for number, tensor in enumerate(tensors):
        assert torch.equal(tensor, torch.full_like(tensor, float(number)))


def test_what_is_needed_together_comes_together(arena: StateArena) -> None:
    tensors = [filled(arena, number) for number in range(12)]
    blocks = [block for _, block in tensors]
    here = next(block for block in blocks if block.place is Place.MEMORY)
    away = [block for block in blocks if block.place is Place.AWAY][:3]
    assert len(away) == 3
    arena.bring_all([here, *away])
    assert here.place is Place.MEMORY
    assert all(block.place is Place.COMING for block in away)
    for block in (here, *away):
        arena.use(block)
    assert arena.held_bytes <= 4 * MIB
    assert arena.overrun_bytes == 0


def test_unchanged_bytes_are_written_once(arena: StateArena) -> None:
    tensors = [filled(arena, number) for number in range(12)]
    for _ in range(3):
        for _, block in tensors:
            arena.use(block)
            arena.done(block, leaves=True)
    assert out_bytes(arena) == 12 * MIB
    traffic = arena.log.traffic
    assert traffic.read_bytes + traffic.from_host_bytes >= 2 * 12 * MIB


def test_any_change_is_written_whoever_makes_it(arena: StateArena) -> None:
    tensor, block = filled(arena, 1)
    arena.use(block)
    arena.done(block, leaves=True)
    arena.user_may_have_run()
    arena.use(block)
    tensor.numpy()[-1] = 5.0  # no counter of torch's sees it
    arena.done(block, leaves=True)
    while block.place is not Place.AWAY:
        arena.prefetch() if block.leaving else arena.done(block, leaves=True)
        time.sleep(0.001)
    assert tensor[-1] == 5.0
    arena.use(block)
    assert tensor[-1] == 5.0
    assert out_bytes(arena) == 2 * MIB


def away(arena: StateArena, number: int) -> tuple[Tensor, Block]:
    tensor, block = filled(arena, number)
    arena.use(block)
    arena.done(block, leaves=True)
    for other in range(100, 106):
        filled(arena, other)
    while block.place is not Place.AWAY:
        filled(arena, 200)
    return tensor, block


def test_what_is_written_while_away_comes_back(arena: StateArena) -> None:
    tensor, block = away(arena, 1)
    tensor[7] = 3.0
    arena.use(block)
    assert tensor[7] == 3.0
    assert block.changed, "the record does not hold it"


def test_a_write_after_the_read_has_begun_wins(arena: StateArena) -> None:
    tensor, block = away(arena, 1)
    arena._start_back(block)
    assert isinstance(block.arrival, Return)
    pages_of(arena).tiers.wait(block.arrival.reads, what="the test")
    tensor[7] = 3.0
    arena.use(block)
    assert tensor[7] == 3.0


def test_bytes_that_the_disk_changes_are_an_error(arena: StateArena) -> None:
    kept, block = away(arena, 1)
    ((fd, offset, nbytes),) = pages_of(arena).pieces(block)
    assert nbytes == kept.nbytes
    with mmap.mmap(-1, mmap.PAGESIZE) as page:  # direct I/O takes whole pages only
        page[0] = 9
        os.pwritev(fd, [page], offset)
    said = (
        r"parameter 1 \(262144\): 1.00 MiB came back changed twice .* at offset \d+ of the spill "
    )
    with pytest.raises(IntegrityError, match=said):
        arena.use(block)


def test_bytes_that_change_on_their_way_are_read_again(arena: StateArena) -> None:
    tensor, block = away(arena, 1)
    arena._start_back(block)
    assert isinstance(block.arrival, Return)
    pages_of(arena).tiers.wait(block.arrival.reads, what="the test")
    before = arena.log.traffic
    ctypes.memset(block.landing + 5, 9, 1)
    arena.use(block)
    assert (tensor == 1).all()
    assert not block.changed
    again = arena.log.traffic - before
    assert again.read_bytes + again.from_host_bytes == tensor.nbytes


NO_WRITE = Fault(call="write", what=errno.EIO, at=1, times=1000)


def test_what_could_not_be_written_beside_a_use_does_not_leave() -> None:
    with state_arena.opened(4 * MIB) as arena:
        tensor, block = filled(arena, 3)
        with injected(NO_WRITE):
            arena.send_out(block)
            arena.use(block)  # before anybody hears of it
            while block.record is None or not block.record.done:
                time.sleep(0.001)
            assert block.record.failed
            arena.done(block, leaves=False)
        arena.see_out(block)
        assert block.place is Place.AWAY
        assert (tensor == 3).all()
        arena.use(block)
        assert (tensor == 3).all()


def test_a_write_that_failed_is_an_error_once() -> None:
    with state_arena.opened(4 * MIB) as arena:
        tensor, block = filled(arena, 3)
        with injected(NO_WRITE), pytest.raises(StorageError, match=r"parameter 3 .*EIO"):
            arena.see_out(block)
        assert arena.in_use_bytes == block.nbytes
        arena.use(block)
        arena.done(block, leaves=True)
        arena.see_out(block)
        assert arena.in_use_bytes == 0
        assert (tensor == 3).all()


def test_what_no_store_takes_goes_to_host_memory() -> None:
    with state_arena.opened(4 * MIB, host_bytes=4 * MIB) as arena:
        tensor, block = filled(arena, 3)
        with injected(NO_WRITE):
            arena.see_out(block, host_bytes=0)
        assert block.place is Place.AWAY
        assert block.record is not None
        assert block.record.takes_host
        assert (tensor == 3).all()


@pytest.mark.parametrize("host_bytes", [1, pages.PAGE_BYTES, 100_001, 2 * MIB])
def test_a_part_in_host_memory_ends_at_any_byte(host_bytes: int) -> None:
    """Also behind the block: the plan may be of a larger tensor that was in its place."""
    with state_arena.opened(4 * MIB, host_bytes=4 * MIB) as arena:
        tensor, block = filled(arena, 3)
        arena.see_out(block, host_bytes=host_bytes)
        assert block.place is Place.AWAY
        assert (tensor == 3).all(), "it is read where it lies"
        arena.use(block)
        assert (tensor == 3).all()


def test_ended_tensors_give_their_memory_back(arena: StateArena) -> None:
    kept = [filled(arena, number) for number in range(12)]
    assert len(arena.blocks) == 12
    del kept
    gc.collect()
    for _ in range(100):
        arena.prefetch()
        if not arena.blocks:
            break
        time.sleep(0.01)
    assert not arena.blocks
    assert pages_of(arena).tiers.storage.bytes_in_use == 0


def test_memory_that_it_does_not_need_is_others_and_the_other_way_round(
    arena: StateArena,
) -> None:
    pool = arena.memory.held.spare = CpuPool()
    kept = [filled(arena, number) for number in range(4)]
    blocks = [block for _, block in kept]
    arena.keep_to(MIB)
    assert (arena.held_bytes, pool.waiting_bytes) == (MIB, 3 * MIB)
    before = process_memory.resident_bytes()
    arena.keep_to(4 * MIB)
    for block in blocks:
        arena.fetch(block)
    assert (arena.held_bytes, pool.waiting_bytes) == (4 * MIB, 0)
    assert arena.memory.coming_bytes == 0, "what they come into is touched"
    for block in blocks:
        arena.use(block)
        arena.done(block, leaves=False)
    assert [tensor.mean().item() for tensor, _ in kept] == [0, 1, 2, 3]
    assert process_memory.resident_bytes() - before < MIB
    arena.close()
    kept.clear()
    gc.collect()
    assert pool.waiting_bytes == 0, "its last memory goes to the system"


def test_reading_everything_that_is_away_fills_no_memory(arena: StateArena) -> None:
    tensors = [filled(arena, number, 8 * MIB)[0] for number in range(24)]
    trimmer = Trimmer(pages_of(arena))
    before = process_memory.mapped_file_bytes()
    most = 0
    for number, tensor in enumerate(tensors):
        assert tensor.sum().item() == number * tensor.numel()
        time.sleep(0.02)
        most = max(most, process_memory.mapped_file_bytes() - before)
    trimmer.close()
    assert most < 96 * MIB, "of 192 MiB"


def test_what_was_read_while_away_is_not_in_memory_twice_when_it_comes_back(
    arena: StateArena, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensor, block = filled(arena, 0, 24 * MIB)
    filled(arena, 1, 24 * MIB)
    assert block.place is not Place.MEMORY
    assert tensor.sum().item() == 0
    found: list[int] = []

    def seen(address: int, nbytes: int) -> int:
        found.append(pages.touched_bytes(block.address, block.nbytes))
        return digest(address, nbytes)

    monkeypatch.setattr(digests, "digest", seen)
    arena.use(block)
    assert found == [0]
    assert tensor.sum().item() == 0


def test_beside_a_small_state_little_that_was_read_stays(arena: StateArena) -> None:
    tensors = [filled(arena, number, 8 * MIB)[0] for number in range(2)]
    trimmer = Trimmer(pages_of(arena))
    time.sleep(0.1)  # it has looked
    before, deadline = process_memory.mapped_file_bytes(), time.monotonic() + 30
    assert tensors[0].sum().item() == 0
    while process_memory.mapped_file_bytes() - before > 4 * MIB and time.monotonic() < deadline:
        time.sleep(0.01)
    assert process_memory.mapped_file_bytes() - before <= 4 * MIB
    trimmer.close()


def test_what_was_read_can_go_once_the_storage_is_closed(arena: StateArena) -> None:
    tensors = [filled(arena, number, 4 * MIB)[0] for number in range(3)]
    assert tensors[1].mean().item() == 1
    trimmer = Trimmer(pages_of(arena))  # not before: it would take some of that away by itself
    before = process_memory.mapped_file_bytes()
    pages_of(arena).tiers.close()
    trimmer.drop_all()
    trimmer.close()
    assert before - process_memory.mapped_file_bytes() >= 4 * MIB
    assert [tensor.mean().item() for tensor in tensors] == [0, 1, 2]


def test_departures_are_those_needed_last() -> None:
    sizes = dict.fromkeys((A, B, C, G), 1)
    assert departures([A, B, C, C, B, A], sizes, 3) == frozenset()
    # Forward A B C, backward C B A: with room for two, A has the longest way to go.
    assert 0 in departures([A, B, C, C, B, A], sizes, 2)
    assert departures([A, G, G], sizes, 1) >= {0}
    assert not departures([A, G], sizes, 2)


def test_timeline_knows_the_step_before() -> None:
    uses = Timeline()
    for key in (A, B, C, A):
        assert uses.note(key) is None
    assert uses.next_use(A) == NEVER
    assert uses.begin_step()
    assert uses.note(A) == 0
    assert [uses.next_use(key) for key in (A, B, C)] == [2, 0, 1]
    assert uses.note(C) == 2, "what did not happen this time is passed over"
    assert uses.next_use(B) == 2, "in the next step"
    assert list(uses.ahead()) == [A, A, B, C]
    assert list(uses.ahead(3)) == [A, A, B]


def test_timeline_keeps_so_many_uses_of_a_step_that_never_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(timeline, "_MOST", 3)
    uses = Timeline()
    for key in (A, B, C, A, B):
        uses.note(key)
    uses.begin_step()
    assert uses.past == [A, B, C]


def _mapped(address: int) -> bool:
    """Asked in a way that maps nothing itself, which could come to lie there."""
    libc, one = ctypes.CDLL(None), (ctypes.c_ubyte * 1)()
    asked: int = libc.mincore(ctypes.c_void_p(address), ctypes.c_size_t(mmap.PAGESIZE), one)
    return asked == 0


def test_what_ends_after_the_end_is_unmapped_then(arena: StateArena) -> None:
    tensors = [filled(arena, number) for number in range(8)]
    places = {block.place for _, block in tensors}
    assert places == {Place.MEMORY, Place.AWAY}
    addresses = [block.address for _, block in tensors]
    early = tensors.pop()[1].address
    assert _mapped(early), "nobody has asked yet"
    arena.close()
    assert not _mapped(early)
    assert all(bool((tensor == number).all()) for number, (tensor, _) in enumerate(tensors))
    assert all(map(_mapped, addresses[:-1]))
    thread = threading.Thread(target=tensors.clear)
    thread.start()
    thread.join()
    assert not any(map(_mapped, addresses[:-1])), "by now the early one may be somebody else's"
    assert arena.held_bytes == 0
    assert not arena.blocks
