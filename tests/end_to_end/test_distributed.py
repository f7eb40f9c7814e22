"""A model in DistributedDataParallel, which compiles its own parts of it, and of one process."""

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore
from torch.nn.parallel import DistributedDataParallel

from teraplan.errors import InfeasibleBudgetError
from tests.end_to_end import moving
from tests.end_to_end.training import Run, assert_same, run

DEPTH = 16
"""Of more than one bucket of gradients, each of which has a graph."""


@pytest.fixture(autouse=True)
def _group() -> Iterator[None]:
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield
    torch._dynamo.reset()
    dist.destroy_process_group()


def program(this: Run) -> None:
    net = moving.model(DEPTH)
    model = DistributedDataParallel(net, bucket_cap_mb=1)
    this.compile(model)
    optimizer = moving.adamw(net.parameters())
    for step in range(6):
        loss = model(*net.batch(step))
        loss.backward()
        optimizer.step()
        this.record(loss, net, others=moving.states(optimizer))
        optimizer.zero_grad()


@pytest.mark.slow
def test_the_state_moves_with_equal_bits() -> None:
    reference = run(program, device_budget=100 << 30, training_state="stays")
    limited = moving.run_least(program, moving.BUDGET * DEPTH // moving.DEPTH)
    assert_same(reference, limited)
    assert limited.statuses[-1].graphs > 1
    assert moving.moving().arena.log.traffic.written_bytes > 0


def test_a_budget_that_is_too_small_is_an_error_of_ours() -> None:
    """It was raised while the parts were compiled, where Dynamo wraps it."""
    model = DistributedDataParallel(moving.model())
    this = Run({"device_budget": 1_000_000, "kernels": "aot_eager"})
    compiled = this.compile(model)
    with pytest.raises(InfeasibleBudgetError, match=r"device_budget is 976\.56 KiB"):
        compiled(*moving.model().batch(0))
