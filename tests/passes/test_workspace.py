"""Bytes of intermediates alive at once, counted by hand."""

import torch
from torch import fx
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from teraplan.passes.workspace import largest_operation_nbytes, nbytes_of, workspace_nbytes

KIB = 1024


def _traced(function: object, *shapes: tuple[int, ...]) -> fx.Graph:
    with FakeTensorMode():
        inputs = [torch.empty(shape) for shape in shapes]
    return make_fx(function, tracing_mode="fake")(*inputs).graph  # type: ignore[arg-type]


def test_two_of_a_chain_are_alive_at_once() -> None:
    graph = _traced(lambda x: x.sin().cos().tanh().exp(), (256,))
    assert workspace_nbytes(graph, frozenset()) == 2 * KIB


def test_what_is_used_late_lives_long() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        early = x.sin()
        return x.cos().tanh().exp() + early

    assert workspace_nbytes(_traced(function, (256,)), frozenset()) == 3 * KIB


def test_views_take_nothing_and_keep_their_base_alive() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        view = x.sin().view(16, 16).t()
        return x.cos().tanh().view(16, 16) + view

    assert workspace_nbytes(_traced(function, (256,)), frozenset()) == 3 * KIB


def test_what_is_excluded_takes_nothing() -> None:
    graph = _traced(lambda x: x.sin().cos(), (256,))
    sin = next(node for node in graph.nodes if node.target is torch.ops.aten.sin.default)
    assert workspace_nbytes(graph, {sin}) == KIB


def test_largest_operation_that_is_not_fused() -> None:
    graph = _traced(lambda a, b: (a.exp() @ b).sin(), (16, 32), (32, 64))
    weight = graph.find_nodes(op="placeholder")[1]
    size = 4 * (16 * 32 + 16 * 64)
    assert largest_operation_nbytes(graph, {weight}) == size
    assert largest_operation_nbytes(graph, frozenset()) == size + 4 * 32 * 64
    assert largest_operation_nbytes(_traced(lambda x: x.sin(), (256,)), frozenset()) == 0


def test_bytes_of_what_is_no_tensor() -> None:
    graph = fx.Graph()
    assert nbytes_of(graph.placeholder("x")) == 0


def test_what_is_settled_is_not_kept_for_the_end() -> None:
    graph = _traced(lambda x: (x.sin().view(16, 16), x.cos(), x.tanh()), (256,))
    assert workspace_nbytes(graph, frozenset()) == 3 * KIB
    settled = {n for n in graph.nodes if n.target in (torch.ops.aten.sin.default,)}
    assert workspace_nbytes(graph, frozenset(), settled) == 2 * KIB
