"""Bytes of intermediates alive at once, counted by hand."""

from collections.abc import Mapping

import pytest
import torch
from torch import fx
from torch._inductor import config as inductor_config
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from teraplan import ops
from teraplan.passes import workspace
from teraplan.passes.fused_runs import FusedRuns
from teraplan.passes.inlining import inlined_nodes
from teraplan.passes.size_polynomials import SizePolynomials
from teraplan.passes.workspace import nbytes_of, workspace_nbytes
from teraplan.values.graph_sizes import most_at
from teraplan.values.graph_table import GraphMemory

KIB = 1024


def memory_of(
    graph: fx.Graph, *, fused: bool, saved: Mapping[int, fx.Node], state_moves: bool = False
) -> GraphMemory:
    """Of a graph whose sizes are fixed."""
    found = workspace.memory_of(
        graph, sizes=SizePolynomials({}), fused=fused, saved=saved, state_moves=state_moves
    )
    least_bytes = most_at(found.least, ())
    return GraphMemory(workspace_bytes=most_at(found.workspace, ()), least_bytes=least_bytes)


def _traced(function: object, *shapes: tuple[int, ...]) -> fx.Graph:
    with FakeTensorMode():
        inputs = [torch.empty(shape) for shape in shapes]
    return make_fx(function, tracing_mode="fake")(*inputs).graph  # type: ignore[arg-type]


def test_two_of_a_chain_are_alive_at_once() -> None:
    graph = _traced(lambda x: x.sin().cos().tanh().exp(), (256,))
    assert workspace_nbytes(graph) == 2 * KIB


def test_what_is_used_late_lives_long() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        early = x.sin()
        return x.cos().tanh().exp() + early

    assert workspace_nbytes(_traced(function, (256,))) == 3 * KIB


def test_views_take_nothing_and_keep_their_base_alive() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        view = x.sin().view(16, 16).t()
        return x.cos().tanh().view(16, 16) + view

    assert workspace_nbytes(_traced(function, (256,))) == 3 * KIB


def test_what_is_excluded_takes_nothing() -> None:
    graph = _traced(lambda x: x.sin().cos(), (256,))
    sin = next(node for node in graph.nodes if node.target is torch.ops.aten.sin.default)
    assert workspace_nbytes(graph, {sin}) == KIB


def test_bytes_of_what_is_no_tensor() -> None:
    graph = fx.Graph()
    assert nbytes_of(graph.placeholder("x")) == 0


def test_what_is_within_a_fused_run_is_not_in_memory() -> None:
    """Of four results one is left, and no product can be taken into the run."""
    graph = _traced(lambda x, w: (x @ w).sin().cos().tanh().exp() @ w, (16, 16), (16, 16))
    product = result = run = KIB
    assert memory_of(graph, fused=False, saved={}).least_bytes == 2 * KIB
    assert memory_of(graph, fused=True, saved={}).least_bytes == max(product + run, run + result)
    graph = _traced(lambda x: x.sin().cos().tanh().exp(), (256,))
    assert memory_of(graph, fused=True, saved={}).least_bytes == KIB
    assert memory_of(graph, fused=False, saved={}).least_bytes == 2 * KIB


def test_results_of_one_operation_are_in_memory_although_runs_follow() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        left, mask = torch.native_dropout(x, 0.5, True)
        return (left * mask).sum()

    memory = memory_of(_traced(function, (256,)), fused=True, saved={})
    assert memory.least_bytes == KIB + KIB // 4 + 4, "and the sum"


def test_convolutions_copy_what_they_read() -> None:
    graph = _traced(lambda x, w: torch.conv1d(x, w), (4, 8, 32), (8, 8, 1))
    read = 4 * (4 * 8 * 32 + 8 * 8)
    assert workspace_nbytes(graph) == 4 * 4 * 8 * 32 + read
    assert memory_of(graph, fused=True, saved={}).least_bytes == 4 * 4 * 8 * 32


@pytest.mark.parametrize(
    ("channels", "groups", "places", "copies"),
    [(1, 8, (8, 8), 4), (8, 1, (8, 8), 0), (2, 4, (8, 8), 0), (1, 8, (8, 4, 2), 1)],
)
def test_the_backward_of_a_depthwise_convolution_copies_what_it_reads(
    channels: int, groups: int, places: tuple[int, ...], copies: int
) -> None:
    def backward(dy: torch.Tensor, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        ones, zeros = [1] * len(places), [0] * len(places)
        made = torch.ops.aten.convolution_backward(
            *(dy, x, w, None, ones, ones, ones, False, zeros, groups, [True, False, False])
        )
        result: torch.Tensor = made[0].view(8, 8, 8) @ torch.ones(8, 8)
        return result

    weight = 8, channels, *([3] * len(places))
    graph = _traced(backward, *[(1, 8, *places)] * 2, weight)
    one = 4 * 8 * 8 * 8
    behind = 2 * one + 4 * 8 * 8
    least = memory_of(graph, fused=True, saved={}).least_bytes
    assert least == max((1 + copies) * one, behind)


def test_what_is_read_at_other_places_is_a_formula() -> None:
    def padded(x: torch.Tensor, w: torch.Tensor, i: torch.Tensor) -> torch.Tensor:
        product, places = x @ w, i.argmax(1)
        return product[places] + product[:, places]

    graph = _traced(padded, *[(16, 16)] * 3)
    least = memory_of(graph, fused=True, saved={}).least_bytes
    assert least == 2 * KIB, "the product, and the sum, which is not written over it"
    assert {"index", "index_1"} <= _inlined(padded, *[(16, 16)] * 3)


@pytest.mark.parametrize("deterministic", [False, True])
def test_a_scatter_has_what_it_adds_from_its_formula(deterministic: bool) -> None:
    """Where PyTorch's own kernel adds up in a fixed order, it reads memory."""

    def scatter(x: torch.Tensor, w: torch.Tensor, i: torch.Tensor) -> torch.Tensor:
        return torch.zeros(8, 16).index_put((i.argmax(1) // 2,), (x @ w) * 2, accumulate=True)

    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(deterministic)
    try:
        assert ("mul" in _inlined(scatter, *[(16, 16)] * 3)) != deterministic
    finally:
        torch.use_deterministic_algorithms(before)


def test_arithmetic_that_each_kernel_does_anew_is_not_in_memory() -> None:
    def short(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        y = x @ w
        square = y * y  # read by two kernels, one before and one behind the products
        return (square + 1) @ w @ w * square

    def slow(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        y = (x @ w).tanh()
        return (y + 1) @ w @ w * y

    shapes = (16, 16), (16, 16)
    product = again = KIB
    assert memory_of(_traced(short, *shapes), fused=True, saved={}).least_bytes == (
        product + again + KIB  # x @ w stays for the last kernel, which has the square from it
    )
    assert memory_of(_traced(slow, *shapes), fused=True, saved={}).least_bytes == 3 * KIB
    assert _inlined(short, *shapes) == {"mul"}
    assert _inlined(slow, *shapes) == set(), "a CPU takes long for a tanh"


@pytest.mark.parametrize(
    ("setting", "value", "inlined"),
    [
        ("realize_reads_threshold", 4, {"add", "sub"}),
        ("realize_opcount_threshold", 0, set[str]()),
        ("realize_acc_reads_threshold", 1, set[str]()),
        ("realize_reads_threshold", 1, {"add"}),
    ],
)
def test_how_much_a_formula_may_have_is_a_setting_of_inductor(
    setting: str, value: int, inlined: set[str]
) -> None:
    def two(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y, z = x @ w, w @ x
        once, twice = y + z, y - z
        return (once * twice) @ w, (twice * w) @ w

    with inductor_config.patch(setting, value):
        assert _inlined(two, (16, 16), (16, 16)) == inlined


def _inlined(function: object, *shapes: tuple[int, ...]) -> set[str]:
    graph = _traced(function, *shapes)
    return {node.name for node in inlined_nodes(graph, FusedRuns(graph))}


def test_a_kernel_writes_where_it_reads_for_the_last_time() -> None:
    graph = _traced(lambda x, w: (x @ w).sin() @ w, (16, 16), (16, 16))
    assert memory_of(graph, fused=True, saved={}).least_bytes == 2 * KIB, "the sine, a product"
    graph = _traced(lambda x, w: (x @ w).sin().sum(), (16, 16), (16, 16))
    assert memory_of(graph, fused=True, saved={}).least_bytes == KIB + 4


@pytest.mark.parametrize(
    ("along", "kept"), [(0, 1), ((0, 1), 1), (None, 1), (1, 0), (-1, 0), ((), 1)]
)
def test_what_a_kernel_reads_again_behind_a_reduction_is_in_memory(
    along: int | tuple[int, ...] | None, kept: int
) -> None:
    """Along the last dimension each row is read again at once, while the kernel has it."""

    def slow(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        product = x @ w
        y, z = product.tanh(), product.sigmoid()  # one of them over the product
        of_both = y * z
        return y - (of_both.sum() if along is None else of_both.sum(along, keepdim=True)) * z

    graph = _traced(slow, (16, 16), (16, 16))
    least = memory_of(graph, fused=True, saved={}).least_bytes
    assert least == (1 + kept) * KIB, "with the result over the other"

    def anew(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        y = (x @ w) * 2
        return y - y.sum(0)

    graph = _traced(anew, (16, 16), (16, 16))
    assert memory_of(graph, fused=True, saved={}).least_bytes == KIB, "the product, written over"


def test_a_first_dimension_of_one_is_none() -> None:
    def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        product = (x @ w).unsqueeze(0)
        y, z = product.tanh(), product.sigmoid()
        return y - (y * z).sum((0, 2), keepdim=True) * z

    graph = _traced(function, (16, 16), (16, 16))
    assert memory_of(graph, fused=True, saved={}).least_bytes == KIB, "along the rest, row by row"


@pytest.mark.parametrize(
    ("shape", "kept"), [((1, 16, 4, 4), 1), ((4, 4, 4, 4), 0), ((16, 4, 4), 0)]
)
def test_channels_may_be_last_in_memory(shape: tuple[int, ...], kept: int) -> None:
    """An instance norm has no images and many channels, which lie beside each other then."""

    def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        product = (x @ w).view(shape)
        y, z = product.tanh(), product.sigmoid()
        return y - (y * z).sum((-2, -1), keepdim=True) * z

    graph = _traced(function, (16, 16), (16, 16))
    assert memory_of(graph, fused=True, saved={}).least_bytes == (1 + kept) * KIB


def test_what_is_read_through_a_view_counts_its_readers() -> None:
    """Read by several, what reads much is not computed anew by each."""

    def function(*xs: torch.Tensor) -> torch.Tensor:
        a, b, c, d, e = (x @ x for x in xs)
        total = (a + b + c + d + e).view(256)
        return total.sin() @ (total * 2)

    assert "add_3" not in _inlined(function, *[(16, 16)] * 5)
    assert "add_2" in _inlined(function, *[(16, 16)] * 5)


def test_nothing_is_written_over_what_a_scatter_adds_to() -> None:
    def function(x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        into = torch.ops.aten.scatter_add(x, 0, index.long(), x)
        return into.sin().exp()  # type: ignore[no-any-return]

    graph = _traced(function, (16, 16), (1, 16))
    assert memory_of(graph, fused=True, saved={}).least_bytes == 2 * KIB


def _chained(*, settles: bool = False) -> fx.Graph:
    """A backward: a slot comes back, a gradient is made of it, something larger follows."""
    graph = fx.Graph()
    with FakeTensorMode():
        one, large = torch.empty(256), torch.empty(1024)

    def call(target: object, *args: fx.Node, value: torch.Tensor | None) -> fx.Node:
        node: fx.Node = graph.call_function(target, args)  # type: ignore[arg-type]
        node.meta["val"] = value
        return node

    chain = graph.placeholder("chain")
    x = call(ops.need, chain, chain, 0, value=one)  # type: ignore[arg-type]  # a slot
    gradient = call(torch.ops.aten.sin.default, x, value=one)
    call(ops.done, x, chain, chain, 0, value=None)  # type: ignore[arg-type]
    if settles:
        gradient = call(ops.settle, gradient, chain, value=one)
    call(torch.ops.aten.cos.default, chain, value=large)
    graph.output((gradient,))
    return graph


def _sine(size: int) -> fx.Node:
    graph = _traced(lambda x: x.sin(), (size,))
    found: list[fx.Node] = graph.find_nodes(op="call_function", target=torch.ops.aten.sin.default)
    return found[0]


def test_what_comes_back_counts_while_it_is_used_and_gradients_until_they_settle() -> None:
    slot = _sine(256)
    stays = memory_of(_chained(), fused=False, saved={0: slot})
    assert (stays.workspace_bytes, stays.least_bytes) == (5 * KIB, 5 * KIB)
    with_op = memory_of(_chained(settles=True), fused=False, saved={0: slot})
    assert with_op == stays, "where it stays, the op gives back what it is given"
    moves = memory_of(_chained(settles=True), fused=False, saved={0: slot}, state_moves=True)
    assert (moves.workspace_bytes, moves.least_bytes) == (4 * KIB, 4 * KIB)
    large = _sine(2048)
    assert memory_of(_chained(), fused=False, saved={0: large}).least_bytes == 9 * KIB, (
        "all of the memory that the slot is a view of comes back"
    )


def test_what_autograd_gives_counts_until_it_is_used() -> None:
    """Zeros for a result that nobody used: added late, on top of everything before."""

    def backward(x: torch.Tensor, late: torch.Tensor) -> torch.Tensor:
        return x.sin().cos().tanh() + late

    graph = _traced(backward, (256,), (256,))
    assert memory_of(graph, fused=False, saved={}).workspace_bytes == 2 * KIB
    for node, name in zip(graph.find_nodes(op="placeholder"), ("x", "tangents_1"), strict=True):
        node.name = name
    assert memory_of(graph, fused=False, saved={}).workspace_bytes == 3 * KIB
