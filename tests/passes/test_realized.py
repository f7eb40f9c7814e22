"""A saved activation is computed once, as it is where the graph returns it: by plain Inductor."""

import re
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch._functorch import config as functorch_config
from torch._inductor import config as inductor_config
from torch._inductor.utils import run_fw_bw_and_get_code
from torch.nn.functional import scaled_dot_product_attention

from teraplan import ops
from teraplan.units import GIB
from tests.passes.instrumented import instrumented

HEADS, GROUPS, LENGTH, WIDTH = 4, 2, 128, 32


def _grouped_attention(x: Tensor, table: Tensor, wq: Tensor, wv: Tensor) -> Tensor:
    """Each head of v serves two of q, and what is looked up is read by two kernels."""
    y = torch.nn.functional.embedding(x, table)
    q = (y.tanh() @ wq).view(1, LENGTH, HEADS, WIDTH).transpose(1, 2)
    v = (y @ wv).view(1, LENGTH, HEADS // GROUPS, WIDTH).transpose(1, 2)
    v = v[:, :, None].expand(1, HEADS // GROUPS, GROUPS, LENGTH, WIDTH)
    v = v.reshape(1, HEADS, LENGTH, WIDTH)
    z = scaled_dot_product_attention(q, v, v)
    return (z.transpose(1, 2).reshape(1, LENGTH, HEADS * WIDTH) + y.sin()).square().sum()


def _inputs() -> list[Tensor]:
    torch.manual_seed(0)
    width = HEADS * WIDTH
    shapes = ((64, width), (width, width), (width, width // GROUPS))
    weights = [torch.randn(shape, requires_grad=True) for shape in shapes]
    return [torch.randint(0, 64, (1, LENGTH)), *weights]


def _squares(number: int) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(WIDTH * HEADS, WIDTH * HEADS, requires_grad=True) for _ in range(number)]


def _saved_and_read_twice(x: Tensor, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """The ReLU's result is saved for the second product, and read by the sine before."""
    y = torch.relu(x @ a)
    return ((y + torch.sin(y * 2)) @ b).square().sum() + (y @ c).sum()


def _dropped_softmax(x: Tensor, wq: Tensor, wk: Tensor) -> Tensor:
    """Of its backward's values, all but the last are for other kernels' registers."""
    p = torch.nn.functional.dropout(torch.softmax((x @ wq) @ (x @ wk).T, -1), 0.1)
    return (p @ x).square().sum()


@pytest.mark.slow
def test_no_more_kernels_than_without_ops() -> None:
    plain, ours = _plain_and_ours(_grouped_attention, _inputs())
    assert sum(map(_num_kernels, plain)) > 3
    assert sum(map(_num_kernels, ours)) <= sum(map(_num_kernels, plain))


@pytest.mark.slow
def test_what_is_saved_is_read_in_the_kernel_that_makes_it() -> None:
    (plain, _), (ours, _) = _plain_and_ours(_saved_and_read_twice, _squares(4))
    assert "= teraplan_ops.save(" in ours
    assert "= torch.ops.teraplan." not in ours, "the dispatcher is slow where caches are cold"
    assert _num_loops(ours) == _num_loops(plain) > 0


@pytest.mark.slow
def test_only_the_result_of_a_softmax_backward_is_written() -> None:
    (_, plain), (_, ours) = _plain_and_ours(_dropped_softmax, _squares(3))
    assert "teraplan_ops.done(" in ours
    kernel = "_softmax_backward"
    assert _num_arguments(ours, kernel) == _num_arguments(plain, kernel) > 0


def _num_kernels(code: str) -> int:
    """Calls of fused kernels."""
    return len(_calls(code))


def _num_arguments(code: str, name: str) -> int:
    """Of all calls of fused kernels with `name` in theirs."""
    return sum(arguments.count(",") + 1 for arguments in _calls(code, name))


def _calls(code: str, name: str = "") -> list[str]:
    """The arguments of each call of a fused kernel with `name` in its own."""
    return re.findall(rf"^ +cpp_fused\w*{name}\w*\((.*)\)", code, re.MULTILINE)


def _num_loops(code: str) -> int:
    """Passes over memory in fused kernels, their tails counted as well."""
    return len(re.findall(r"\bfor ?\(int64_t x0=", code))


def _plain_and_ours(
    function: Callable[..., Tensor], inputs: list[Tensor]
) -> tuple[list[str], list[str]]:
    """The generated code of forward and backward of both backends, with nothing to move."""
    plain = _codes(function, inputs, "inductor")
    return plain, _codes(function, inputs, "teraplan", device_budget=100 * GIB)


def _codes(
    function: Callable[..., Tensor], inputs: list[Tensor], backend: str, **options: int
) -> list[str]:
    """The generated code of forward and backward."""
    torch._dynamo.reset()
    compiled = torch.compile(function, backend=backend, options={**options} or None)
    with (
        functorch_config.patch(enable_autograd_cache=False),
        inductor_config.patch(fx_graph_cache=False),
    ):
        _, sources = run_fw_bw_and_get_code(lambda: compiled(*inputs))
    assert len(sources) == 2
    return list(sources)


def test_only_what_inductor_compiles_is_realized() -> None:
    """PyTorch's own kernels put every result in memory."""
    forward, _, table = instrumented(_grouped_attention, *_inputs())
    saves = forward.find_nodes(op="call_function", target=ops.save)
    realized = forward.find_nodes(op="call_function", target=ops.realize)
    assert len(saves) == len(table.slots) > 0
    assert not realized
