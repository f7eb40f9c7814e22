"""Copies to the host's cores and back over fake streams: in order with the computation."""

import threading
import time
from functools import partial

import pytest
import torch

from teraplan.runtime.host_lane import HostLane
from teraplan.runtime.process.pinned_pool import PinnedPool
from teraplan.runtime.state.memory.host_memory import host_bytes, host_tensor
from teraplan.units import MIB
from tests.runtime.cuda_world import World, content_of

NUM_BUCKETS = 7


def update(lane: HostLane, slots: list[torch.Tensor], tensors: list[torch.Tensor]) -> None:
    """Add one to every byte of each tensor, as the host's part of a step does it."""
    lane.enter()
    coming = lane.out(tensors[0], slots[0])
    for number, tensor in enumerate(tensors):
        wait, slot = coming, slots[number % 2]
        if number + 1 < len(tensors):
            coming = lane.out(tensors[number + 1], slots[(number + 1) % 2])
        wait()
        slot.add_(1)
        lane.back(slot, tensor)


@pytest.mark.parametrize("seed", range(3))
def test_copies_are_in_order_with_the_computation(seed: int) -> None:
    with World(seed=seed, slowest_s=0.01) as world:
        lane, pool = world.device.open_lane(), world.device.host_pool
        slots = [s for s in (host_bytes(pool, MIB) for _ in range(2)) if s is not None]
        for step in range(2):
            world.cuda.compute.gate.clear()  # the gradients are not there yet
            tensors = [world.tensor(step + number, MIB) for number in range(NUM_BUCKETS)]
            lane.begin()
            thread = threading.Thread(target=update, args=(lane, slots, tensors))
            thread.start()
            thread.join(0.03)
            world.cuda.compute.gate.set()
            thread.join()
            lane.end()
            copies = [torch.empty(MIB, dtype=torch.uint8) for _ in tensors]
            for tensor, copy in zip(tensors, copies, strict=True):
                world.cuda.run(partial(copy.copy_, tensor))
            world.cuda.finish()
            for number, copy in enumerate(copies):
                assert torch.equal(copy, content_of(step + number, MIB) + 1)
        lane.finish()


def test_a_copy_in_the_backward_follows_what_has_made_the_gradient() -> None:
    with World(seed=0, slowest_s=0.01) as world:
        lane, pool = world.device.open_lane(), world.device.host_pool
        memory = host_bytes(pool, MIB)
        assert memory is not None
        world.cuda.compute.gate.clear()
        tensor = world.tensor(1, MIB)  # the backward will write it
        lane.follow()
        wait = lane.out(tensor, memory)
        time.sleep(0.03)
        world.cuda.compute.gate.set()
        wait()
        assert torch.equal(memory, content_of(1, MIB))
        lane.finish()


def test_memory_of_a_pool_comes_back_with_its_last_tensor() -> None:
    pool = PinnedPool(MIB, pin=None)
    like = torch.empty(64, 32, dtype=torch.bfloat16, device="meta").t()
    made = host_tensor(pool, like)
    assert made is not None
    assert (made.shape, made.stride(), made.dtype) == (like.shape, like.stride(), like.dtype)
    assert host_bytes(pool, MIB) is None, "the rest is not enough"
    view = made[3:]
    del made
    assert pool.in_use_bytes == 4096
    del view
    assert pool.free_bytes == MIB
