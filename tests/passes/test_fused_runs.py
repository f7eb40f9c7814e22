"""Migration ops stand between kernels: they do not cut what Inductor would compile into one."""

from collections.abc import Callable

import torch
from torch import Tensor, fx

from teraplan import ops
from teraplan.passes.aliases import is_view
from teraplan.passes.fused_runs import FusedRuns
from tests.passes.instrumented import instrumented

WIDTH = 256


def _norm_between_products(x: Tensor, a: Tensor, b: Tensor, weight: Tensor) -> Tensor:
    y = torch.nn.functional.layer_norm(x @ a, (WIDTH,), weight)
    return ((torch.nn.functional.gelu(y) * 2 + 1) @ b).sum()


def _inputs() -> list[Tensor]:
    shapes = ((WIDTH, WIDTH), (WIDTH, WIDTH), (WIDTH, WIDTH), (WIDTH,))
    return [torch.randn(shape, requires_grad=True) for shape in shapes]


def test_no_op_is_in_the_middle_of_a_run() -> None:
    forward, backward, _ = instrumented(_norm_between_products, *_inputs())
    for graph in (forward, backward):
        runs = FusedRuns(graph)
        nodes = [node for node in graph.nodes if node.op == "call_function"]
        last, cut = nodes[0], False
        for node in nodes:
            if node.target in ops.ALL:
                cut = True
            elif not is_view(node):
                assert not (cut and runs.is_fused(last) and runs.is_fused(node)), f"{node} {graph}"
                last, cut = node, False


def test_runs_end_at_matrix_products() -> None:
    def chain(x: Tensor) -> Tensor:
        return torch.relu(torch.relu(torch.relu(x @ x) @ x + 1) * 2)

    graph = _traced(chain)
    runs = FusedRuns(graph)
    nodes = [node for node in graph.nodes if node.op == "call_function"]
    names = [node.name for node in nodes]
    assert names == ["mm", "relu", "mm_1", "add", "relu_1", "mul", "relu_2"]
    assert [runs.first(node).name for node in nodes] == ["mm", "relu", "mm_1", *["add"] * 4]
    assert [runs.last(node).name for node in nodes] == ["mm", "relu", "mm_1", *["relu_2"] * 4]


def test_runs_are_no_longer_than_a_kernel() -> None:
    def long_chain(x: Tensor) -> Tensor:
        for _ in range(200):
            x = x + 1
        return x

    nodes = [node for node in _traced(long_chain).nodes if node.op == "call_function"]
    runs = FusedRuns(nodes[0].graph)
    assert nodes.index(runs.last(nodes[0])) == 64
    assert nodes.index(runs.first(nodes[-1])) == 199 - 64


def _traced(function: Callable[[Tensor], Tensor]) -> fx.Graph:
    from torch.fx.experimental.proxy_tensor import make_fx

    graph: fx.Graph = make_fx(function)(torch.randn(4, 4)).graph
    return graph


def test_a_view_does_not_bring_its_tensor_back_early() -> None:
    """What a product takes a view of comes back right before the product."""

    def program(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
        y = torch.tanh(x @ a)
        return torch.relu(torch.relu(y.t() @ b) @ b).sum()

    _, backward, _ = instrumented(program, *_inputs()[:3])
    nodes = [node for node in backward.nodes if node.op == "call_function"]
    (tanh,) = [n for n in nodes if n.target is ops.need and n.args[1].name == "token_tanh"]
    after = [node for node in nodes[nodes.index(tanh) + 1 :] if not is_view(node)]
    assert after[0].target is torch.ops.aten.mm.default, f"{backward}"
