"""What Inductor is told of our ops for a GPU's kernels, as far as a CPU can show it."""

import pytest
import torch
from torch import Tensor
from torch._inductor import config, graph, utils
from torch._inductor.utils import run_and_get_code

from teraplan import ops
from teraplan.passes.lowering import INDUCTOR_CONFIG
from tests.end_to_end.training import MLP


@pytest.mark.slow
def test_what_comes_back_counts_as_aligned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else kernels would load it element by element: the token is on the CPU, and not aligned."""

    def as_on_a_gpu(example: Tensor) -> bool:
        is_token = example.dtype is torch.int64
        return not is_token and utils.tensor_is_aligned(example)

    for module in (graph, utils):
        monkeypatch.setattr(module, "should_assume_input_aligned", as_on_a_gpu)
    net = MLP(depth=2)
    torch._dynamo.reset()
    net.compile(backend="teraplan")

    def step() -> None:
        torch.autograd.backward(net(*net.batch(0)))

    with config.patch(force_disable_caches=True):
        _, codes = run_and_get_code(step)
    lines = [line for line in "\n".join(codes).splitlines() if "teraplan.need.default" in line]
    aligned = [line for line in lines if "assert_alignment(" in line]
    assert len(aligned) >= 2
    assert not [line for line in lines if "assumed to be not aligned" in line]


def test_no_call_is_left_out_of_graphs_of_cuda_calls() -> None:
    assert INDUCTOR_CONFIG["triton.cudagraphs"] is False
    assert all(torch.Tag.cudagraph_unsafe in op.tags for op in ops.ALL)
