"""In which order of memory saved activations are kept."""

import torch
from torch import Tensor, fx
from torch.nn.functional import conv2d

from teraplan.passes.layouts import kept_strides
from tests.passes.test_workspace import _traced

SHAPES = (2, 8, 4, 4), (8, 8, 3, 3), (2, 4, 3, 3)
CONTIGUOUS, CHANNELS_LAST = (128, 16, 4, 1), (128, 1, 32, 8)


def _between(x: Tensor, w: Tensor, apart: Tensor) -> tuple[Tensor, Tensor]:
    return conv2d(conv2d(x, w, padding=1).relu(), w, padding=1).tanh(), apart.cos()


def _strides(graph: fx.Graph, *, fused: bool = True) -> dict[str, tuple[int, ...]]:
    nodes = [node for node in graph.nodes if node.op != "output"]
    return dict(zip((n.name for n in nodes), kept_strides(graph, nodes, fused=fused), strict=True))


def test_convolutions_and_what_lies_between_them_have_channels_last() -> None:
    strides = _strides(_traced(_between, *SHAPES))
    assert strides["convolution"] == strides["relu"] == strides["convolution_1"] == CHANNELS_LAST


def test_all_else_has_the_strides_that_it_was_traced_with() -> None:
    strides = _strides(_traced(_between, *SHAPES))
    assert strides["x_1"] == strides["tanh"] == CONTIGUOUS
    assert strides["cos"] == (36, 9, 3, 1), "no convolution is near it"
    assert set(_strides(_traced(_between, *SHAPES), fused=False).values()).isdisjoint(
        {CHANNELS_LAST}
    ), "PyTorch's own kernels keep to them"


def test_where_inductor_keeps_them_contiguous_so_do_we() -> None:
    """As it does on a GPU where convolutions are of groups; on a CPU only without its library."""

    def grouped(x: Tensor, w: Tensor) -> Tensor:
        return conv2d(conv2d(x, w, padding=1, groups=2).relu(), w, padding=1, groups=2)

    graph = _traced(grouped, (2, 8, 4, 4), (8, 4, 3, 3))
    assert _strides(graph)["relu"] == CHANNELS_LAST
    with torch.backends.mkldnn.flags(enabled=False):
        assert _strides(graph)["relu"] == CONTIGUOUS


def test_where_there_is_no_convolution_nothing_changes() -> None:
    strides = _strides(_traced(lambda x: x.permute(0, 2, 3, 1).relu(), (2, 8, 4, 4)))
    assert strides["relu"] == (128, 4, 1, 16)
