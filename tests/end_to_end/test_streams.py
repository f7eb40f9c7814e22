"""Graphs that compute on streams of their own are refused by name."""

import pytest
import torch
from torch import fx

from teraplan import backend
from teraplan.errors import UnsupportedError


def _graph(stream: int | None) -> fx.GraphModule:
    graph = fx.Graph()
    x = graph.placeholder("x")
    y = graph.call_function(torch.sin, (x,))
    if stream is not None:
        y.meta["custom"] = {"stream": stream}  # as Dynamo notes it
    graph.output((y,))
    return fx.GraphModule(torch.nn.Module(), graph)


def test_a_stream_of_its_own_is_refused() -> None:
    call = backend.teraplan(_graph(1), [torch.ones(3)])
    with pytest.raises(UnsupportedError, match=r"^sin runs on a stream of its own .*disable"):
        call(torch.ones(3))


@pytest.mark.parametrize("stream", [None, 0])
def test_the_current_stream_is_all_right(stream: int | None) -> None:
    call = backend.teraplan(_graph(stream), [torch.ones(3)], options={"kernels": "aot_eager"})
    assert torch.equal(call(torch.ones(3))[0], torch.ones(3).sin())
