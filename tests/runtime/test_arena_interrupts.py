"""An interrupt between any two lines of what moves training state: every tensor keeps its bytes."""

import random

import pytest
import torch
from torch import Tensor

from teraplan.runtime.cpu import page_memory
from teraplan.runtime.process import pages, whole
from teraplan.runtime.state.memory import arena as arena_module
from teraplan.runtime.state.memory import block_moves, digests, held_memory
from teraplan.runtime.state.memory.arena import StateArena
from teraplan.runtime.state.memory.block import Block
from teraplan.values.step_trace import TensorKind
from tests.fakes.interrupts import InterruptAt
from tests.runtime import state_arena

NBYTES = 64 << 10
MODULES = (arena_module, block_moves, digests, held_memory, page_memory, pages, whole)
FILES = tuple(str(module.__file__) for module in MODULES)
OPS = 40


def run(interrupt: InterruptAt, seed: int) -> None:
    with state_arena.opened(3 * NBYTES) as arena:
        tensors = [filled(arena, number) for number in range(6)]
        values = list(range(6))
        chosen = random.Random(seed)
        for _ in range(OPS):
            number, action = chosen.randrange(6), chosen.randrange(5)
            tensor, block = tensors[number]
            if action == 4:
                values[number] = chosen.randrange(100)
            try:
                with interrupt:
                    act(arena, block, action)
            except KeyboardInterrupt:
                arena.user_may_have_run()
                assert [float(t.max()) for t, _ in tensors] == [float(t.min()) for t, _ in tensors]
            if action == 4:
                tensor.fill_(values[number])
                arena.user_may_have_run()
            arena.end_uses()
        assert [float(t[0]) for t, _ in tensors] == values
        assert [float(t.max()) for t, _ in tensors] == values
        arena.close()


def act(arena: StateArena, block: Block, action: int) -> None:
    if action == 0:
        arena.send_out(block)
    elif action == 1:
        arena.see_out(block)
    elif action == 2:
        arena.fetch(block)
    else:
        arena.use(block)
        arena.done(block, leaves=action == 3)


def filled(arena: StateArena, number: int) -> tuple[Tensor, Block]:
    like, key = torch.full((NBYTES // 4,), float(number)), (TensorKind.PARAMETER, number)
    block = arena.open(NBYTES, key, "parameter", shape=tuple(like.shape), dtype="float32")
    return arena.place(block, like).copy_(like), block


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.exhaustive)])
def test_no_tensor_loses_its_bytes(seed: int) -> None:
    counted = InterruptAt(0, *FILES)
    run(counted, seed)
    assert counted.num_lines > 2000
    for line in range(seed, counted.num_lines, 41):
        run(InterruptAt(line + 1, *FILES), seed)
