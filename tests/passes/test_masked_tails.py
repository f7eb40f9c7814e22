"""What is left of a row is not read with elements behind it, where a mask is in the way."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx
from torch._inductor import config as inductor_config
from torch._inductor.compile_fx import compile_fx_inner
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.utils import run_and_get_code
from torch.fx.experimental.proxy_tensor import make_fx

from teraplan.passes.masked_tails import compile_kernels, loads_under_a_mask

READS: dict[str, Callable[[Tensor], Tensor]] = {
    "padding": lambda x: F.pad(x, (2, 0)),
    "concatenation": lambda x: torch.cat([x.sin(), x.cos()], 1),
    "stack": lambda x: torch.stack([x.sin(), x.cos()]),
    "pooling": lambda x: F.max_pool1d(x, 3, 1, 1),
    "average": lambda x: F.avg_pool1d(x, 3, 1, 1),
    "slices": lambda x: x.sin().slice_scatter(x[:, :3], 1, 5, 8),
}


@pytest.mark.parametrize("name", READS)
def test_operations_that_load_under_a_mask(name: str) -> None:
    assert loads_under_a_mask(make_fx(READS[name], select_decomp_table())(torch.randn(4, 18)))


def test_arithmetic_does_not() -> None:
    assert not loads_under_a_mask(make_fx(lambda x: (x.sin() + 1).softmax(1))(torch.randn(4, 18)))


def test_a_branch_that_is_a_graph_of_its_own() -> None:
    branch = make_fx(READS["padding"])(torch.randn(4, 18))
    graph = fx.Graph()
    graph.output(graph.get_attr("branch"))
    whole = fx.GraphModule({"branch": branch}, graph)
    assert loads_under_a_mask(whole)


@pytest.mark.slow
def test_the_rest_of_a_row_is_computed_element_by_element() -> None:
    x = torch.randn(4, 18)
    module = make_fx(lambda x: (F.pad(x, (2, 0)),))(x)

    def num_masked_loads(compile_graph: Callable[..., object]) -> int:
        with inductor_config.patch(fx_graph_cache=False, compile_threads=1):
            _, (code,) = run_and_get_code(lambda: compile_graph(module, [x]))
        return str(code).count(".template loadu<float,1>(")

    assert num_masked_loads(compile_fx_inner) == 2, "in the loop, and behind it"
    assert num_masked_loads(compile_kernels) == 1
