"""Runs of nodes that Inductor may compile into one kernel, which no op of ours should cut.

    mm | add  gelu  mul  sum | mm           | are the ends of runs

An op that says it mutates a tensor makes Inductor compute all pending readers of the tensor before
it. In the middle of a run that costs passes over memory: a GPT's layer got five more kernels, and
a step took 4 % longer.
"""

import operator
from collections.abc import Iterator

import torch
from torch import fx
from torch._functorch.partitioners import get_default_op_list

from teraplan import ops
from teraplan.passes.aliases import is_view
from teraplan.passes.targets import packet_of

_MAX_NODES = 64
"""As many as Inductor puts in one kernel (`max_fusion_size`)."""

_ALSO_FUSED = {
    "aten": (
        "_unsafe_index",
        "_unsafe_masked_index",
        "_unsafe_masked_index_put_accumulate",
        "cat",
        "constant_pad_nd",
        "copy",
        "embedding",
        "embedding_dense_backward",
        "select_scatter",
        "slice_scatter",
    ),
    "prims": ("fma", "inductor_lookup_seed", "inductor_randint", "inductor_random"),
}
"""Inductor inlines these, although the partitioner does not count on it."""
_NO_KERNELS = (operator.getitem, ops.realize)


class FusedRuns:
    """The runs of one graph as it is now."""

    def __init__(self, graph: fx.Graph) -> None:
        known = get_default_op_list()
        self._fused = frozenset((*known.fusible_ops, *known.view_ops, *_also_fused()))
        self._nodes: list[fx.Node] = list(graph.nodes)
        self._number = {node: i for i, node in enumerate(self._nodes)}

    def first(self, node: fx.Node) -> fx.Node:
        """The first node of the run of `node`, or itself. Views at the ends do not count."""
        return self._end(node, -1)

    def last(self, node: fx.Node) -> fx.Node:
        """The last one."""
        return self._end(node, 1)

    def is_fused(self, node: fx.Node) -> bool:
        """True for arithmetic, reductions and views; False for products, attention and the like."""
        if node.op != "call_function":
            return False
        if node.target in _NO_KERNELS:
            return True
        return packet_of(node) in self._fused

    def _end(self, node: fx.Node, step: int) -> fx.Node:
        if not self.is_fused(node):
            return node
        number, end = self._number[node], node
        for distance in range(1, _MAX_NODES + 1):
            other = self._nodes[number + step * distance]
            if not self.is_fused(other):
                break
            if not is_view(other):
                end = other
        return end


def _also_fused() -> Iterator[object]:
    """Those of them that this PyTorch has."""
    for namespace, names in _ALSO_FUSED.items():
        for name in names:
            packet = getattr(getattr(torch.ops, namespace), name, None)
            if packet is not None:
                yield packet
