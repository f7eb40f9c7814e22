"""How much memory a graph's intermediates take at once, read off the graph alone.

An upper bound for compiled code, where fusion makes many intermediates vanish. It serves the first
step only; from then on the measured workspace counts.
"""

from collections.abc import Set

import torch
from torch import fx

from teraplan.passes.aliases import base_of


def nbytes_of(node: fx.Node) -> int:
    """Bytes of the node's tensor as traced (hints for symbolic sizes); 0 if it is no tensor."""
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor):
        return 0
    numel = 1
    for size in value.shape:
        numel *= _hint(size)
    return numel * value.dtype.itemsize


def workspace_nbytes(
    graph: fx.Graph, excluded: Set[fx.Node], settled: Set[fx.Node] = frozenset()
) -> int:
    """Most bytes of intermediates alive at once, inputs and `excluded` (by base node) left out.

    Results that are `settled` (by base node) leave the graph where they are complete, not at its
    end.
    """
    last_use: dict[fx.Node, int] = {}
    for position, node in enumerate(graph.nodes):
        for argument in (node, *node.all_input_nodes):
            if node.op != "output" or base_of(argument) not in settled:
                last_use[base_of(argument)] = position
    dying: dict[int, int] = {}
    live = peak = 0
    for position, node in enumerate(graph.nodes):
        if node.op in ("call_function", "call_method") and base_of(node) is node:
            nbytes = 0 if node in excluded else nbytes_of(node)
            live += nbytes
            end = last_use[node]
            dying[end] = dying.get(end, 0) + nbytes
        peak = max(peak, live)
        live -= dying.pop(position, 0)
    return peak


_UNFUSED = ("mm", "bmm", "addmm", "baddbmm", "convolution", "convolution_backward")
_UNFUSED_PARTS = ("attention",)


def largest_operation_nbytes(graph: fx.Graph, excluded: Set[fx.Node]) -> int:
    """Most bytes that one operation which no compiler fuses reads and writes, a lower bound.

    Of its arguments, `excluded` ones (parameters) are left out.
    """
    return max((_operation_nbytes(node, excluded) for node in graph.nodes), default=0)


def _operation_nbytes(node: fx.Node, excluded: Set[fx.Node]) -> int:
    if not isinstance(node.target, torch._ops.OpOverload):
        return 0
    name = node.target._schema.name.removeprefix("aten::")
    if name not in _UNFUSED and not any(part in name for part in _UNFUSED_PARTS):
        return 0
    inputs = {base_of(argument) for argument in node.all_input_nodes} - excluded
    return nbytes_of(node) + sum(nbytes_of(argument) for argument in inputs)


def _hint(size: int | torch.SymInt) -> int:
    if isinstance(size, torch.SymInt):
        hint = size.node.hint
        return int(hint) if hint is not None else 1
    return size
