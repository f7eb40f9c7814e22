"""What kernels copy for themselves, beside what the graph has in memory."""

import torch
from torch import fx

from teraplan.passes.size_polynomials import SizePolynomials, total
from teraplan.passes.targets import packet_of
from teraplan.values.graph_sizes import Polynomial

_aten = torch.ops.aten
_CONVOLUTIONS = frozenset((_aten.convolution, _aten.convolution_backward))
_DIMS_OF_IMAGES = 4
_GROUPS = 9
"""Among the arguments of a convolution's backward."""


def copied_nbytes(node: fx.Node, sizes: SizePolynomials, *, fused: bool) -> Polynomial:
    """What oneDNN's convolutions copy into layouts of their own, while they run.

    Inductor has it in these layouts already, but for what the backward of a depthwise convolution
    reads: it has that copied to another one before, from which the call copies again, twice for
    what the forward has read; in one dimension and in three that is copied once (measured with
    torch 2.13).
    """
    if packet_of(node) not in _CONVOLUTIONS:
        return ()
    if not fused:
        return total(sizes.nbytes_of(argument) for argument in node.all_input_nodes)
    if not _is_depthwise_backward(node):
        return ()
    gradient, read = map(sizes.nbytes_of, node.all_input_nodes[:2])
    is_of_images = node.all_input_nodes[1].meta["val"].dim() == _DIMS_OF_IMAGES
    return total([gradient, read, read, read] if is_of_images else [read])


def _is_depthwise_backward(node: fx.Node) -> bool:
    if packet_of(node) is not _aten.convolution_backward or node.args[_GROUPS] == 1:
        return False
    weight: torch.Tensor = node.all_input_nodes[2].meta["val"]
    return weight.device.type == "cpu" and int(weight.shape[1]) == 1
