"""Small tensors in blocks together, over a real file."""

import gc
from collections.abc import Iterator
from functools import partial

import pytest
import torch
from torch import Tensor

from teraplan.runtime.state.memory.arena import StateArena
from teraplan.runtime.state.memory.block import Block, Place
from teraplan.runtime.state.memory.chunks import Chunks, Sort, chunk_nbytes
from teraplan.units import GIB, KIB, MIB
from teraplan.values.hardware import Link
from teraplan.values.step_trace import TensorKind
from tests.runtime import state_arena

PARAMETERS: Sort = (TensorKind.PARAMETER, False)
FROZEN: Sort = (TensorKind.PARAMETER, True)
GRADIENTS: Sort = (TensorKind.GRADIENT, False)


@pytest.fixture
def arena() -> Iterator[StateArena]:
    with state_arena.opened(64 * MIB) as arena:
        yield arena


def put(chunks: Chunks, value: Tensor, sort: Sort = PARAMETERS) -> tuple[Tensor, Block]:
    block = chunks.with_room(value, sort) or chunks.make(value, sort, "parameter")
    return chunks.add(block, value).copy_(value), block


def test_small_ones_leave_and_come_back_together(arena: StateArena) -> None:
    chunks = Chunks(arena, MIB)
    values = [torch.rand(16 * KIB + n) for n in range(30)]  # of 64 KiB and a little
    placed = [put(chunks, value) for value in values]
    blocks = list(dict.fromkeys(block for _, block in placed))
    assert len(blocks) == 2
    assert all(tensor.data_ptr() % 64 == 0 for tensor, _ in placed)
    arena.see_out(blocks[0])
    assert blocks[0].place is Place.AWAY
    assert arena.log.traffic.written_bytes == blocks[0].nbytes <= MIB
    for (tensor, _), value in zip(placed, values, strict=True):
        assert torch.equal(tensor, value)
    arena.use(blocks[0])
    assert arena.log.traffic.read_bytes == blocks[0].nbytes
    for (tensor, _), value in zip(placed, values, strict=True):
        assert torch.equal(tensor, value)


def test_large_ones_and_frozen_ones_have_blocks_of_their_own(arena: StateArena) -> None:
    chunks = Chunks(arena, MIB)
    small, large = torch.rand(16 * KIB), torch.rand(200 * KIB)
    trained, frozen = put(chunks, small)[1], put(chunks, small, FROZEN)[1]
    alone = put(chunks, large)[1]
    assert len({trained, frozen, alone}) == 3
    assert put(chunks, small)[1] is trained
    assert put(chunks, small, FROZEN)[1] is frozen
    assert Chunks(arena, 0).with_room(small, PARAMETERS) is None


def test_a_block_ends_with_its_last_tensor(arena: StateArena) -> None:
    chunks = Chunks(arena, MIB)
    first, block = put(chunks, torch.rand(16 * KIB))
    second, _ = put(chunks, torch.rand(16 * KIB))
    del first
    gc.collect()
    arena.prefetch()
    assert block in arena.blocks
    assert arena.block_of(second) is block
    del second
    gc.collect()
    arena.prefetch()
    assert block in arena.blocks, "it is open"
    third, _ = put(chunks, torch.ones(16 * KIB))
    assert arena.block_of(third) is block
    chunks.close()
    assert torch.equal(third, torch.ones(16 * KIB))
    del third
    gc.collect()
    arena.prefetch()
    assert not arena.blocks
    assert arena.in_use_bytes == 0


def test_a_closed_chunk_keeps_what_its_tensors_take(arena: StateArena) -> None:
    chunks = Chunks(arena, MIB)
    tensor, block = put(chunks, torch.ones(16 * KIB))
    assert block.nbytes == MIB
    chunks.close()
    assert block.nbytes == arena.total_bytes == arena.in_use_bytes == 64 * KIB
    arena.see_out(block)
    assert arena.log.traffic.written_bytes == 64 * KIB
    arena.use(block)
    assert torch.equal(tensor, torch.ones(16 * KIB))


def test_an_empty_chunk_that_is_closed_ends(arena: StateArena) -> None:
    chunks = Chunks(arena, MIB)
    tensor, _ = put(chunks, torch.ones(16 * KIB))
    del tensor
    gc.collect()
    arena.prefetch()
    chunks.close()
    arena.prefetch()
    assert not arena.blocks


def test_gradients_of_each_step_have_the_same_keys_and_sizes(arena: StateArena) -> None:
    chunks = Chunks(arena, MIB)
    seen: list[list[tuple[object, int]]] = []
    for _ in range(3):
        chunks.begin_step()
        placed = [put(chunks, torch.rand(16 * KIB), GRADIENTS) for _ in range(20)]
        chunks.end_gradients()
        blocks = dict.fromkeys(block for _, block in placed)
        seen.append([(block.key, block.nbytes) for block in blocks])
        del placed, blocks
        gc.collect()
    assert (
        seen[0]
        == seen[1]
        == seen[2]
        == [
            ((TensorKind.GRADIENT, 0), MIB),
            ((TensorKind.GRADIENT, 1), 4 * 64 * KIB),
        ]
    )


def test_the_size_follows_the_link_and_the_room() -> None:
    def link(bytes_per_s: int) -> Link:
        return Link(
            out_bytes_per_s=bytes_per_s,
            back_bytes_per_s=2 * bytes_per_s,
            out_while_back_bytes_per_s=bytes_per_s,
            back_while_out_bytes_per_s=bytes_per_s,
            latency_ns=100_000,
        )

    nbytes = partial(chunk_nbytes, transfer_ns=400_000)
    assert nbytes(link(10**9), 64 * GIB) == 5_000_000 // 4096 * 4096, "0.5 ms is a tenth"
    assert nbytes(link(10**9), 64 * MIB) == MIB, "a small part of the room"
    assert nbytes(link(10**9), 7 * MIB) == 0, "no two tensors that move are in it"
    assert nbytes(link(10**6), 64 * GIB) == 0
    assert nbytes(None, 64 * GIB) == 0
