"""Which results within a fused run are in memory while it runs, since they are read twice over.

    x = where(..)   s = sum(x, [0, 2, 3])   y = x - s * scale      batch norm's backward
                    all of x before y can begin                    so x is in memory

A reduction along the last dimensions has its result row by row, and one kernel reads a row again
while it has it (a softmax, a layer norm). One along the first dimension needs all that there is.
"""

import itertools
from collections.abc import Iterator, Sequence, Set
from typing import cast

import torch
from torch import fx

from teraplan.passes.aliases import base_of, is_view
from teraplan.passes.fused_runs import FusedRuns
from teraplan.passes.targets import packet_of

_aten, _prims = torch.ops.aten, torch.ops.prims
_REDUCTIONS = frozenset(
    (
        *(_aten.sum, _aten.mean, _aten.amax, _aten.amin, _aten.max, _aten.min, _aten.any),
        *(_aten.argmax, _aten.argmin, _aten.prod, _aten.std, _aten.var, _aten.var_mean),
        *(_prims.sum, _prims.var),
    )
)
_DIMS_OF_CONVOLUTIONS = 3
"""With more, the channels may be last in memory."""
_MOST_NODES = 1024
"""Looked at together: far more than one kernel has, and what is kept of each is a bit for each."""


def read_again(graph: fx.Graph, runs: FusedRuns, inlined: Set[fx.Node]) -> frozenset[fx.Node]:
    """Those of the nodes of `graph` that a reader needs once more behind such a reduction.

    Args:
        graph: what Inductor compiles.
        runs: of it.
        inlined: nodes that each reader computes anew.
    """
    found: set[fx.Node] = set()
    for is_run, run in itertools.groupby(graph.nodes, runs.is_fused):
        if is_run:
            nodes = list(run)
            for start in range(0, len(nodes), _MOST_NODES):
                found.update(_of_run(nodes[start : start + _MOST_NODES], inlined))
    return frozenset(found)


def _of_run(nodes: Sequence[fx.Node], inlined: Set[fx.Node]) -> Iterator[fx.Node]:
    """The same, of one run."""
    bit = {node: 1 << i for i, node in enumerate(nodes)}
    behind: dict[fx.Node, int] = {}
    """Nodes of the run that each follows from, itself among them, a bit for each."""
    passed: dict[fx.Node, int] = {}
    """Nodes of which each needs all, since such a reduction lies between."""
    for node in nodes:
        behind[node], passed[node] = bit[node], 0
        for source in node.all_input_nodes:
            if source in bit:
                behind[node] |= behind[source]
                passed[node] |= passed[source]
        yield from (read for read in _reads(node, inlined) if bit.get(read, 0) & passed[node])
        if _needs_all(node):
            passed[node] = behind[node] & ~bit[node]


def _reads(node: fx.Node, inlined: Set[fx.Node]) -> Iterator[fx.Node]:
    """What is in memory that a node is computed from."""
    if is_view(node) or node in inlined:
        return
    waiting, seen = list(map(base_of, node.all_input_nodes)), set[fx.Node]()
    while waiting:
        source = waiting.pop()
        if source in seen:
            continue
        seen.add(source)
        if source in inlined:
            waiting.extend(map(base_of, source.all_input_nodes))
        else:
            yield source


def _needs_all(node: fx.Node) -> bool:
    """True for a reduction along the first of the dimensions that are longer than 1."""
    if packet_of(node) not in _REDUCTIONS:
        return False
    source = node.args[0]
    value = source.meta.get("val") if isinstance(source, fx.Node) else None
    if not isinstance(value, torch.Tensor):
        return False
    along = node.args[1] if len(node.args) > 1 else None
    if along is None or along in ([], ()):
        return True  # along all of them
    dims = cast("Sequence[int]", along if isinstance(along, (list, tuple)) else (along,))
    reduced = {dim % max(1, value.dim()) for dim in dims}
    orders = [list(range(value.dim()))]
    if value.dim() > _DIMS_OF_CONVOLUTIONS:  # which of both is chosen when it is compiled
        orders.append([0, *range(2, value.dim()), 1])
    return any(_first(value, order) in reduced for order in orders)


def _first(value: torch.Tensor, order: Sequence[int]) -> int:
    """Of the dimensions, as they lie in memory, the first that is longer than 1."""
    return next((dim for dim in order if not _is_one(value.shape[dim])), 0)


def _is_one(size: int | torch.SymInt) -> bool:
    return isinstance(size, int) and size == 1
