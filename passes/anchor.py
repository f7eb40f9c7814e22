"""The input of a graph that tells the first op its device."""

from collections.abc import Set

import torch
from torch import fx


def anchor_of(graph: fx.Graph, excluded: Set[fx.Node] = frozenset()) -> fx.Node:
    """A tensor input that is none of `excluded`, on the device of the computation if there is one.

    Tokens that keep effects in order look like tensors in the graph; at run time they are None.
    """
    found: list[fx.Node] = [
        node
        for node in graph.find_nodes(op="placeholder")
        if isinstance(node.meta.get("val"), torch.Tensor)
        and node not in excluded
        and not _orders_effects(node)
    ]
    return next((n for n in found if n.meta["val"].device.type != "cpu"), found[0])


def device_of(graph: fx.Graph, excluded: Set[fx.Node] = frozenset()) -> torch.device:
    """Where the graph computes, as far as inputs that are none of `excluded` tell."""
    device: torch.device = anchor_of(graph, excluded).meta["val"].device
    return device


def _orders_effects(node: fx.Node) -> bool:
    ordered = torch.ops.higher_order.with_effects
    return any(user.target is ordered and user.args[0] is node for user in node.users)
