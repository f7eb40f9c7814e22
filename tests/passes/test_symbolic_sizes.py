"""Sizes of dynamic shapes are computed from the numbers that a backward graph is given."""

import math
from typing import Any

import pytest
import torch
from torch import fx
from torch._dynamo.source import ConstantSource
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

from teraplan.passes.symbolic_sizes import SizeNodes, UnknownSymbolError


def symbol(env: ShapeEnv, name: str, hint: int) -> torch.SymInt:
    """A size that varies."""
    source = ConstantSource(name)
    symbol = env.create_symbol(hint, source, dynamic_dim=DimDynamic.DYNAMIC)
    result = env.create_symintnode(symbol, hint=hint, source=source)
    assert isinstance(result, torch.SymInt)
    return result


class _Sizes:
    """A graph with placeholders for some sizes, and what `SizeNodes` makes of others."""

    def __init__(self) -> None:
        env = ShapeEnv()
        self.a, self.b = symbol(env, "a", 7), symbol(env, "b", 11)
        self.graph = fx.Graph()

    def given(self, *values: torch.SymInt) -> SizeNodes:
        for index, value in enumerate(values):
            self.graph.placeholder(f"s{index}").meta["val"] = value
        return SizeNodes(self.graph)

    def evaluate(self, nodes: list[Any], *numbers: int) -> list[int]:
        self.graph.output(tuple(nodes))
        self.graph.lint()
        module = fx.GraphModule(torch.nn.Module(), self.graph)
        return list(module(*numbers))


def test_expressions_of_given_symbols() -> None:
    sizes = _Sizes()
    a, b = sizes.a, sizes.b
    nodes = sizes.given(a, b)
    wanted = [a, 512, a * 512, a * b, (a + 3) // 2, a * 64 - b, a * b * 2 + 1]
    nodes.check(wanted)
    made = nodes.nodes(wanted)
    assert made[1] == 512
    assert sizes.evaluate(made, 5, 6) == [5, 512, 2560, 30, 4, 314, 61]


def test_every_node_has_its_symbolic_value() -> None:
    sizes = _Sizes()
    (node,) = sizes.given(sizes.a, sizes.b).nodes([sizes.a * sizes.b + 2])
    for made in sizes.graph.nodes:
        assert "val" in made.meta, made
    assert node.meta["val"].node.expr == (sizes.a * sizes.b + 2).node.expr


def test_a_given_expression_is_taken_as_it_is() -> None:
    sizes = _Sizes()
    product = sizes.a * 512
    nodes = sizes.given(product)
    nodes.check([product])
    assert sizes.evaluate(nodes.nodes([product]), 1024) == [1024]


def test_unknown_symbols_are_named() -> None:
    sizes = _Sizes()
    nodes = sizes.given(sizes.a)
    with pytest.raises(UnknownSymbolError, match=str(sizes.b.node.expr)):
        nodes.check([sizes.a, sizes.a * sizes.b])
    assert len(sizes.graph.nodes) == 1, "a check inserts nothing"


def test_what_goes_through_numbers_that_are_not_whole_is_named() -> None:
    """Nothing of it is left in the graph. `F.interpolate` makes such sizes."""
    sizes = _Sizes()
    nodes = sizes.given(sizes.a)
    part: Any = sizes.a * 0.7
    scaled: Any = math.trunc(part)
    with pytest.raises(UnknownSymbolError, match="TruncToInt"):
        nodes.check([sizes.a, scaled])
    assert not nodes.can_compute(scaled.node.expr)
    half: Any = (sizes.a + 3) // 2
    assert nodes.can_compute(half.node.expr)
    assert len(sizes.graph.nodes) == 1


def test_equal_sizes_share_one_node() -> None:
    sizes = _Sizes()
    nodes = sizes.given(sizes.a)
    (first,) = nodes.nodes([sizes.a * 512])
    (second,) = nodes.nodes([sizes.a * 512])
    assert first is second
