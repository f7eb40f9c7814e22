"""Nodes that are moved within a graph: what is computed stays the same."""

import random
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from teraplan.passes.reorder import advance_products

WIDTH = 8


def traced(function: Callable[..., Tensor], *inputs: Tensor) -> fx.GraphModule:
    return make_fx(function, tracing_mode="fake")(*inputs)


def moved(graph: fx.Graph, move: Callable[[fx.Graph], None]) -> bool:
    """True if the order of nodes is another one after `move`; it is one that works."""
    before = list(graph.nodes)
    move(graph)
    graph.lint()
    return list(graph.nodes) != before


def test_a_product_moves_with_the_view_that_begins_the_run_before_it() -> None:
    def gated(x: Tensor, w: Tensor) -> Tensor:
        a = x @ x
        v = a.view(-1, 2 * WIDTH).view(-1, WIDTH)
        g = a.tanh()
        return g * (v @ w)

    inputs = torch.randn(WIDTH, WIDTH), torch.randn(WIDTH, WIDTH)
    module = traced(gated, *inputs)
    assert moved(module.graph, advance_products)
    names = [node.name for node in module.graph.nodes]
    assert names.index("mm") < names.index("view") < names.index("mm_1") < names.index("tanh")
    module.recompile()
    assert torch.equal(module(*inputs), gated(*inputs))


def random_function(seed: int) -> Callable[..., Tensor]:
    """Products, arithmetic and views, each of one or two of the last results."""
    choice = random.Random(seed)
    kinds = ("mm", "mm", "tanh", "add", "flat", "turned")
    ops = [
        (choice.choice(kinds), choice.randrange(3), choice.randrange(3))
        for _ in range(choice.randint(6, 16))
    ]

    def function(x: Tensor, w: Tensor) -> Tensor:
        values = [x, w, x + w]
        for op, left, right in ops:
            a, b = values[-1 - left], values[-1 - right]
            if op == "mm":
                made = a @ b
            elif op == "tanh":
                made = a.tanh()
            elif op == "add":
                made = a + b
            elif op == "flat":
                made = a.reshape(-1).view(WIDTH, WIDTH)
            else:
                made = a.transpose(0, 1)
            values.append(made)
        return torch.stack(values[-3:]).sum(0)

    return function


@pytest.mark.parametrize("first_seed", range(0, 100, 25))
def test_random_graphs_compute_the_same_in_another_order(first_seed: int) -> None:
    inputs = torch.randn(WIDTH, WIDTH) / WIDTH, torch.randn(WIDTH, WIDTH) / WIDTH
    num_moved = 0
    for seed in range(first_seed, first_seed + 25):
        function = random_function(seed)
        module = traced(function, *inputs)
        num_moved += moved(module.graph, advance_products)
        module.recompile()
        assert torch.equal(module(*inputs), function(*inputs)), seed
    assert num_moved > 2
