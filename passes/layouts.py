"""In which order of memory saved activations are kept.

Inductor has what convolutions read and write, and what lies between them, in channels-last order,
whatever order it was traced with, where it thinks that this is faster, and tells AOTAutograd the
strides of what a graph returns. Our graphs return tokens. So the strides are settled here for both
graphs: the forward gives `save` a tensor that has them, copied if it has to be (`lowering`), and
`need` returns them. Which order is taken changes no result; to take the one that Inductor takes
saves copies.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx
from torch._inductor.graph import GraphLowering
from torch._prims_common import make_channels_last_strides_for

from teraplan.passes.aliases import is_view

KEPT_STRIDE = "teraplan_stride"
"""Of a node that saves, in its `meta`: the strides that the backward will ask for."""

SAVED_AS = "teraplan_saved_as"
"""Of a node that brings back, in its `meta`: what was saved, with its place in memory."""

_CONVOLUTION = torch.ops.aten.convolution.default
_NUM_DIMS_OF_IMAGES = 4


def kept_strides(
    graph: fx.Graph, saved: Sequence[fx.Node], *, fused: bool
) -> list[tuple[Any, ...]]:
    """The strides in which each saved activation is kept, which may be symbolic.

    Args:
        graph: the forward.
        saved: its saved activations.
        fused: Inductor compiles it.
    """
    images = frozenset[fx.Node]()
    module = graph.owning_module
    if fused and module and GraphLowering.decide_layout_opt(module, is_inference=False):
        images = _near_convolutions(graph)
    strides: list[tuple[Any, ...]] = []
    for node in saved:
        value = node.meta["val"]
        if node in images and node.op == "call_function" and not is_view(node):
            strides.append(tuple(make_channels_last_strides_for(value.shape)))
        else:
            strides.append(tuple(value.stride()))
    return strides


def _near_convolutions(graph: fx.Graph) -> frozenset[fx.Node]:
    """What Inductor would rather have in channels-last order: its own rule, up to details.

    What a convolution depends on, itself, and up to the last one whatever follows from these.
    """
    convolutions = graph.find_nodes(op="call_function", target=_CONVOLUTION)
    if not convolutions:
        return frozenset()
    found = set(convolutions)
    for node in reversed(graph.nodes):
        if any(user in found for user in node.users):
            found.add(node)
    for node in graph.nodes:
        if node is convolutions[-1]:
            break
        if node in found:
            found.update(node.users)
    return frozenset(node for node in found if _is_image(node))


def _is_image(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.dim() == _NUM_DIMS_OF_IMAGES
