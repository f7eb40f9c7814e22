"""Random graphs through the partitioner and Inductor, with everything moved that can be moved.

Nothing that has left or is used up keeps its bytes, so a kernel that Inductor has put on the wrong
side of a migration op reads NaN. The ops have to run in the order in which they were inserted.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import fx
from torch._functorch import config as functorch_config
from torch._inductor import config as inductor_config

from teraplan import ops
from teraplan.passes import insert_sites as insert_sites_module
from teraplan.passes import partition
from teraplan.runtime.engine.engine import Engine
from teraplan.units import GIB
from teraplan.values.graph_table import GraphTable
from tests.end_to_end.evicting import everything_leaves
from tests.passes.random_graphs import SLOW_CASES, Program, random_program

Order = list[tuple[str, int]]

_NAMES = {ops.save: ("save", 2), ops.need: ("need", 2), ops.done: ("done", 3)}


@contextlib.contextmanager
def recorded_orders() -> Iterator[tuple[Order, Order]]:
    """The order of ops in the graphs (forward, then backward), and in which they have run."""
    planned: Order = []
    executed: Order = []
    insert: Any = insert_sites_module.insert_sites

    def insert_sites(forward: fx.Graph, backward: fx.Graph, **kwargs: object) -> object:
        table = insert(forward, backward, **kwargs)
        for graph in (forward, backward):
            for node in graph.nodes:
                if node.target in _NAMES:
                    name, position = _NAMES[node.target]
                    planned.append((name, int(node.args[position])))
        return table

    slots: dict[int, int] = {}
    save, done = Engine.save, Engine.done
    need: Any = Engine.need

    def run_save(
        self: Engine,
        x: torch.Tensor,
        table: GraphTable,
        call: int,
        slot: int,
        *beside: list[torch.Tensor],
    ) -> torch.Tensor:
        executed.append(("save", slot))
        token = save(self, x, table, call, slot, *beside)
        slots[int(token)] = slot
        return token

    def run_need(self: Engine, key: int, *args: object) -> torch.Tensor:
        executed.append(("need", slots[key]))
        needed: torch.Tensor = need(self, key, *args)
        return needed

    def run_done(self: Engine, key: int) -> None:
        executed.append(("done", slots[key]))
        done(self, key)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(partition, "insert_sites", insert_sites)
        patch.setattr(Engine, "save", run_save)
        patch.setattr(Engine, "need", run_need)
        patch.setattr(Engine, "done", run_done)
        yield planned, executed


def gradients(function: Program, seed: int) -> list[torch.Tensor]:
    """Loss and gradients of the random program of this seed, computed by `function`."""
    program = random_program(seed)
    leaves = [p.clone().requires_grad_() for p in [program.x, *program.parameters]]
    loss = function(*leaves)
    torch.autograd.backward(loss)
    return [loss.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]


def check(seed: int, *, kernels: str = "inductor", peak_memory_order: bool = True) -> None:
    torch._dynamo.reset()
    torch.set_num_threads(1)
    program = random_program(seed)
    options: Any = {"device_budget": 100 * GIB, "kernels": kernels}
    with (
        # A graph from a cache has been partitioned already.
        functorch_config.patch(enable_autograd_cache=False),
        inductor_config.patch(
            fx_graph_cache=False, reorder_for_peak_memory=peak_memory_order, compile_threads=1
        ),
        recorded_orders() as (planned, executed),
    ):
        compiled = torch.compile(program.function, backend="teraplan", options=options)
        resident = gradients(compiled, seed)
        assert executed == planned
        executed.clear()
        with everything_leaves(poison=True) as left:
            moved = gradients(compiled, seed)
        assert executed == planned
    assert len(planned) >= 3 * 2, "two saved activations are needed for an order"
    assert left
    for got, expected, plain in zip(
        moved, resident, gradients(program.function, seed), strict=True
    ):
        assert torch.equal(got, expected), f"seed {seed}: moving changed a bit"
        torch.testing.assert_close(got, plain, atol=1e-3, rtol=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1])
def test_random_graph(seed: int) -> None:
    check(seed)


@pytest.mark.parametrize("seed", [100])
def test_random_graph_without_kernel_fusion(seed: int) -> None:
    check(seed, kernels="aot_eager")


@pytest.mark.slow
@pytest.mark.parametrize(("seed", "peak_memory_order"), SLOW_CASES)
def test_more_random_graphs(seed: int, peak_memory_order: bool) -> None:
    check(seed, peak_memory_order=peak_memory_order)


@pytest.mark.slow
@pytest.mark.parametrize(
    "seed",
    [*range(101, 107), *(pytest.param(s, marks=pytest.mark.exhaustive) for s in range(107, 121))],
)
def test_more_random_graphs_without_kernel_fusion(seed: int) -> None:
    check(seed, kernels="aot_eager")
