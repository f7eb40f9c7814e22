"""What graphs take at other sizes than those that they were traced with."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import sympy
import torch
from torch import Tensor, fx, nn
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._sympy.functions import FloorDiv

from teraplan import ops
from teraplan.passes.size_polynomials import SizePolynomials, peaks
from teraplan.values.graph_sizes import most_at, value_at
from teraplan.values.graph_table import MIN_SLOT_BYTES, GraphTable
from tests.passes.instrumented import instrumented
from tests.passes.test_symbolic_sizes import symbol

WIDTH = 32


def attention(x: Tensor, w: Tensor) -> Tensor:
    q, k, v = (x @ w).chunk(3, dim=-1)
    scores = torch.softmax(q @ k.transpose(1, 2), dim=-1)
    return torch.tanh(scores @ v).square().mean()


def halved(x: Tensor, w: Tensor) -> Tensor:
    """Sizes that are no products of others."""
    y = torch.tanh(x)[:, ::2]
    return (torch.sin(torch.cat([y, x], dim=1)) @ w).square().mean()


def traced(function: Callable[..., Tensor], batch: int, time: int) -> tuple[GraphTable, Any]:
    """The table, and what the forward gives of the sizes of a call."""
    x = torch.randn(batch, time, WIDTH, requires_grad=True)
    w = nn.Parameter(torch.randn(WIDTH, 3 * WIDTH))
    for dim in (0, 1):
        torch._dynamo.mark_dynamic(x, dim)
    forward, _, table = instrumented(function, x, w, dynamic=True, fused=True)
    (enter,) = forward.find_nodes(op="call_function", target=ops.enter)
    return table, enter.args[2]


@pytest.mark.parametrize("function", [pytest.param(attention, marks=pytest.mark.slow), halved])
def test_a_table_at_other_sizes_is_the_one_that_is_traced_with_them(
    function: Callable[..., Tensor],
) -> None:
    first, nodes = traced(function, 24, 40)
    assert len(nodes) == len(first.sizes) > 0
    for batch, time in ((96, 160), (50, 61)):
        wanted, _ = traced(function, batch, time)
        assert first.graph == wanted.graph
        assert first.at(wanted.sizes) == replace(wanted, of_sizes=first.of_sizes)
        assert first.at(wanted.sizes).backward.least_bytes != first.backward.least_bytes
    assert first.at(first.sizes) is first
    assert GraphTable.from_json(first.to_json()) == first


@pytest.mark.slow
def test_small_ones_that_may_grow_have_ops() -> None:
    """What is traced with a small batch is run with large ones."""
    small, _ = traced(attention, 4, 20)
    large, _ = traced(attention, 64, 80)
    assert max(slot.nbytes for slot in small.slots) < MIN_SLOT_BYTES
    assert [slot.name for slot in small.slots] == [slot.name for slot in large.slots]


def test_fixed_sizes_have_none() -> None:
    x, w = torch.randn(24, 40, WIDTH, requires_grad=True), nn.Parameter(torch.randn(WIDTH, WIDTH))
    _, _, table = instrumented(halved, x, w)
    assert (table.sizes, table.of_sizes, table.sizes_vary) == ((), None, False)
    assert table.at(()) is table


def test_the_most_at_once_depends_on_sizes() -> None:
    rows, pairs = (((3, ((0, 1),)),), ((1, ((0, 2),)),))  # 3 s and s * s
    found = peaks([(0, 1, rows), (1, 2, ((5, ()),)), (3, 3, pairs), (4, 4, ((2, ((0, 1),)),))])
    assert len(found) == 2, "5 and 2 s are less than 3 s + 5 at any size"
    assert [most_at(found, (s,)) for s in (1, 2, 4, 5, 9)] == [8, 11, 17, 25, 81]


def test_what_no_input_tells_counts_as_traced() -> None:
    env = ShapeEnv()
    known, unknown = symbol(env, "a", 7), symbol(env, "u", 9)
    sizes = SizePolynomials({known.node.expr: 7})
    with FakeTensorMode(shape_env=env):
        square, other = torch.empty(known, 2 * known + 1), torch.empty(unknown, 5, known)
    assert sizes.nbytes_of(_node(square)) == ((8, ((0, 2),)), (4, ((0, 1),)))
    assert sizes.all_known
    assert sizes.nbytes_of(_node(other)) == ((4 * 9 * 5, ((0, 1),)),)
    assert (sizes.all_known, sizes.traced) == (False, (7,))


def test_quotients_are_sizes_of_their_own() -> None:
    a = sympy.Symbol("a", integer=True)
    sizes = SizePolynomials({a: 8})
    thirds: Any = FloorDiv(a, 3)
    half, third = sizes.polynomial(a * (a + 1) / 2), sizes.polynomial(6 * thirds * a)
    assert (value_at(half, sizes.traced), value_at(third, sizes.traced)) == (36, 6 * 2 * 8)
    assert [size.subs(a, 10) for size in sizes.sizes] == [55, 10, 3]


def _node(value: Tensor) -> fx.Node:
    node = fx.Graph().placeholder("x")
    node.meta["val"] = value
    return node
