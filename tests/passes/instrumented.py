"""Forward and backward graphs of a function as the partitioner is given them, with our ops."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.backends.debugging import boxed_nop
from torch._inductor.decomposition import select_decomp_table

from teraplan import ops
from teraplan.passes import partition
from teraplan.values.graph_table import GraphTable

Pair = tuple[fx.Graph, fx.Graph, GraphTable]


def instrumented(
    function: Callable[..., Tensor], *inputs: Tensor, dynamic: bool = False, fused: bool = False
) -> Pair:
    """The graphs after `insert_sites`, which nothing has run, and their table.

    `fused`: of the operations that Inductor has kernels for, into which it takes others apart.
    """
    pairs: list[Pair] = []

    def split(
        gm: fx.GraphModule,
        joint_inputs: Sequence[object],
        **kwargs: Any,  # noqa: ANN401
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        forward, backward = partition.partition(gm, joint_inputs, **kwargs)
        enters = forward.graph.find_nodes(op="call_function", target=ops.enter)
        text = str(enters[0].args[1]) if enters else ""
        table = GraphTable.from_json(text) if text else None
        if table is not None:
            pairs.append((forward.graph, backward.graph, table))
        return forward, backward

    apart = select_decomp_table() if fused else None
    backend = aot_autograd(fw_compiler=boxed_nop, partition_fn=split, decompositions=apart)
    torch._dynamo.reset()
    explained = torch.compile(function, backend=_lazily(backend), dynamic=dynamic)
    explained(*inputs)
    assert pairs, "no saved activation was large enough"
    return pairs[0]


def _lazily(backend: Callable[..., Any]) -> Callable[..., Any]:
    """`backend`, but what it compiles is never run: there is no session."""

    def compile_only(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        backend(gm, example_inputs)
        return gm.forward

    return compile_only
