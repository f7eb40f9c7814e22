"""Keeps what lies between two blocks with activation checkpoints, whatever has made it.

    block 1 -> x -> block 2         saved: x; computed again: a block, when it is needed

PyTorch's partitioner marks x, but keeps only what one op makes by itself. Of a view, and of one of
several results of an op (layer_norm), it computes x again, and so all blocks one after the other
before the backward of the last one begins: as much memory at once as without checkpoints. Here the
op that has made x's memory is marked, too.
"""

import operator
from collections.abc import Iterator

import torch._functorch.config
from torch import fx
from torch._functorch.partitioners import must_recompute
from torch.utils.checkpoint import CheckpointPolicy

from teraplan.passes.aliases import base_of


def keep_boundaries(joint: fx.Graph) -> None:
    """Mark what is to be saved of a joint graph, for PyTorch's partitioner.

    Not where it has a budget of its own for saved activations: then it chooses among these.
    """
    if torch._functorch.config.activation_memory_budget != 1:
        return
    # All are found before one is marked: what is marked bounds nothing any more.
    for node in [node for node in joint.nodes if _is_boundary(node)]:
        base = base_of(node)
        if base.meta.get("ac_graph_id") == node.meta["ac_graph_id"]:
            for made in _made_with(base):
                made.meta["recompute"] = CheckpointPolicy.MUST_SAVE


def _is_boundary(node: fx.Node) -> bool:
    """True if a block makes it and a later one, which computes it again otherwise, uses it."""
    block = node.meta.get("ac_graph_id")
    return (
        block is not None
        and must_recompute(node)
        and any(must_recompute(u) and u.meta.get("ac_graph_id", block) > block for u in node.users)
    )


def _made_with(node: fx.Node) -> Iterator[fx.Node]:
    """The node; of one result of several, the op and all of its results."""
    if node.target is operator.getitem:
        several = node.all_input_nodes[0]
        yield several
        yield from several.users
    else:
        yield node
