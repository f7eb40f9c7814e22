"""Bytes of intermediates alive at once, counted by hand."""

from collections.abc import Iterable, Mapping

import torch
from torch import fx
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from teraplan import ops
from teraplan.passes import workspace
from teraplan.passes.size_polynomials import SizePolynomials
from teraplan.passes.workspace import nbytes_of, workspace_nbytes
from teraplan.values.graph_sizes import most_at
from teraplan.values.graph_table import GraphMemory

KIB = 1024


def memory_of(
    graph: fx.Graph,
    *,
    saved: Mapping[int, fx.Node],
    given: Iterable[fx.Node] = (),
    state_moves: bool = False,
) -> GraphMemory:
    """Of a graph whose sizes are fixed."""
    found = workspace.memory_of(
        graph, sizes=SizePolynomials({}), saved=saved, given=given, state_moves=state_moves
    )
    least_bytes = most_at(found.least, ())
    return GraphMemory(workspace_bytes=most_at(found.workspace, ()), least_bytes=least_bytes)


def _traced(function: object, *shapes: tuple[int, ...]) -> fx.Graph:
    with FakeTensorMode():
        inputs = [torch.empty(shape) for shape in shapes]
    return make_fx(function, tracing_mode="fake")(*inputs).graph  # type: ignore[arg-type]


def test_two_of_a_chain_are_alive_at_once() -> None:
    graph = _traced(lambda x: x.sin().cos().tanh().exp(), (256,))
    assert workspace_nbytes(graph) == 2 * KIB


def test_what_is_used_late_lives_long() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        early = x.sin()
        return x.cos().tanh().exp() + early

    assert workspace_nbytes(_traced(function, (256,))) == 3 * KIB


def test_views_take_nothing_and_keep_their_base_alive() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        view = x.sin().view(16, 16).t()
        return x.cos().tanh().view(16, 16) + view

    assert workspace_nbytes(_traced(function, (256,))) == 3 * KIB


def test_what_is_excluded_takes_nothing() -> None:
    graph = _traced(lambda x: x.sin().cos(), (256,))
    sin = next(node for node in graph.nodes if node.target is torch.ops.aten.sin.default)
    assert workspace_nbytes(graph, {sin}) == KIB


def test_bytes_of_what_is_no_tensor() -> None:
    graph = fx.Graph()
    assert nbytes_of(graph.placeholder("x")) == 0


def test_convolutions_copy_what_they_read() -> None:
    graph = _traced(lambda x, w: torch.conv1d(x, w), (4, 8, 32), (8, 8, 1))
    read = 4 * (4 * 8 * 32 + 8 * 8)
    assert workspace_nbytes(graph) == 4 * 4 * 8 * 32 + read


def _chained(*, settles: bool = False) -> fx.Graph:
    """A backward: a slot comes back, a gradient is made of it, something larger follows."""
    graph = fx.Graph()
    with FakeTensorMode():
        one, large = torch.empty(256), torch.empty(1024)

    def call(target: object, *args: fx.Node, value: torch.Tensor | None) -> fx.Node:
        node: fx.Node = graph.call_function(target, args)  # type: ignore[arg-type]
        node.meta["val"] = value
        return node

    chain = graph.placeholder("chain")
    x = call(ops.need, chain, chain, 0, value=one)  # type: ignore[arg-type]  # a slot
    gradient = call(torch.ops.aten.sin.default, x, value=one)
    call(ops.done, x, chain, chain, 0, value=None)  # type: ignore[arg-type]
    if settles:
        gradient = call(ops.settle, gradient, chain, value=one)
    call(torch.ops.aten.cos.default, chain, value=large)
    graph.output((gradient,))
    return graph


def _sine(size: int) -> fx.Node:
    graph = _traced(lambda x: x.sin(), (size,))
    found: list[fx.Node] = graph.find_nodes(op="call_function", target=torch.ops.aten.sin.default)
    return found[0]


def test_what_comes_back_counts_while_it_is_used_and_gradients_until_they_settle() -> None:
    slot = _sine(256)
    stays = memory_of(_chained(), saved={0: slot})
    assert (stays.workspace_bytes, stays.least_bytes) == (5 * KIB, 5 * KIB)
    with_op = memory_of(_chained(settles=True), saved={0: slot})
    assert with_op == stays, "where it stays, the op gives back what it is given"
    moves = memory_of(_chained(settles=True), saved={0: slot}, state_moves=True)
    assert (moves.workspace_bytes, moves.least_bytes) == (4 * KIB, 4 * KIB)
    large = _sine(2048)
    assert memory_of(_chained(), saved={0: large}).least_bytes == 9 * KIB, (
        "all of the memory that the slot is a view of comes back"
    )


def test_what_autograd_gives_counts_until_it_is_used() -> None:
    """Zeros for a result that nobody used: added late, on top of everything before."""

    def backward(x: torch.Tensor, late: torch.Tensor) -> torch.Tensor:
        return x.sin().cos().tanh() + late

    graph = _traced(backward, (256,), (256,))
    assert memory_of(graph, saved={}).workspace_bytes == 2 * KIB
    _, late = graph.find_nodes(op="placeholder")
    assert memory_of(graph, saved={}, given=[late]).workspace_bytes == 3 * KIB
