"""Where the migration ops go, and which saved tensors get none."""

import pickle

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from teraplan import ops
from teraplan.passes.aliases import base_of
from teraplan.passes.partition import TeraplanPartitioner
from teraplan.values.graph_table import MIN_SLOT_BYTES
from tests.passes.instrumented import instrumented

SIDE = 160
"""A square of it in float32 is above the size from which tensors get ops."""


def square(seed: int = 0, side: int = SIDE, **kwargs: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(side, side, generator=generator, **kwargs).requires_grad_()  # type: ignore[call-overload,no-any-return]


def slots_of(graph: fx.Graph, op: object, position: int) -> list[int]:
    """The slots of an op's nodes, in the order of the graph."""
    return [int(n.args[position]) for n in graph.nodes if n.target is op]


def chain(x: Tensor, w: Tensor) -> Tensor:
    return torch.tanh(torch.sin(x @ w) @ w).sum()


def test_every_saved_activation_has_its_ops_in_one_chain() -> None:
    forward, backward, table = instrumented(chain, square(), square(1))
    slots = list(range(len(table.slots)))
    assert len(slots) >= 2
    assert sorted(slots_of(forward, ops.save, 2)) == slots
    assert sorted(slots_of(backward, ops.need, 2)) == slots
    assert sorted(slots_of(backward, ops.done, 3)) == slots
    for graph, enter in ((forward, ops.enter), (backward, ops.enter_backward)):
        (start,) = graph.find_nodes(op="call_function", target=enter)
        for node in graph.nodes:
            if node.target in (ops.save, ops.need, ops.done):
                assert start in node.args
    assert all(slot.nbytes == SIDE * SIDE * 4 for slot in table.slots)
    assert not [slot for slot in table.slots if not slot.name]


def test_tokens_take_the_place_of_activations() -> None:
    forward, backward, table = instrumented(chain, square(), square(1))
    (results,) = forward.find_nodes(op="output")[0].args
    assert sum(1 for r in results if r.target is ops.save) == len(table.slots)
    names = {node.name for node in backward.find_nodes(op="placeholder")}
    for save in forward.find_nodes(op="call_function", target=ops.save):
        assert save.name in names
        assert save.meta["val"].dtype is torch.int64
        assert save.meta["val"].shape == (1,)


def test_small_tensors_get_none_and_are_listed() -> None:
    def function(x: Tensor, w: Tensor) -> Tensor:
        small = torch.sin(x[:8, :8] * 2)
        return torch.tanh(torch.cos(x @ w)).sum() + (small * small.exp()).sum()

    _, _, table = instrumented(function, square(), square(1))
    assert table.slots
    assert {why for _, _, why in table.uncovered} == {"small"}
    assert all(nbytes < MIN_SLOT_BYTES for _, nbytes, _ in table.uncovered)


def test_inputs_are_told_from_what_the_graph_makes() -> None:
    _, _, table = instrumented(
        lambda x, w: torch.tanh(torch.sin(x.t() @ w)).sum(), square(), square(1)
    )
    given = {slot.name: slot.given for slot in table.slots}
    assert True in given.values()
    assert False in given.values()
    assert all(is_given == name.startswith(("primals", "t", "permute")) or not is_given
               for name, is_given in given.items())  # fmt: skip


def test_parameters_get_none() -> None:
    layer = torch.nn.Linear(SIDE, SIDE)
    _, _, table = instrumented(lambda x: torch.tanh(F.gelu(layer(x))).sum(), square())
    shapes = {slot.nbytes for slot in table.slots}
    assert shapes == {SIDE * SIDE * 4}
    assert not [slot for slot in table.slots if "weight" in slot.name]
    assert len(table.slots) == 3, "the input, and what gelu and tanh need; not the weight"


def test_conjugated_values_get_none() -> None:
    def function(x: Tensor, w: Tensor) -> Tensor:
        y = (x * w).conj()
        return (y * torch.sin(y)).abs().sum()

    _, _, table = instrumented(
        function, square(dtype=torch.complex64), square(1, dtype=torch.complex64)
    )
    assert not [s for s in table.slots if "conj" in s.name]


def test_what_lies_elsewhere_than_the_computation_gets_none() -> None:
    """The device "meta" stands for a GPU, which for tracing alone nobody needs to have."""

    def function(x: Tensor, w: Tensor, at_host: Tensor) -> Tensor:
        host = torch.tanh(torch.sin(at_host @ at_host)).sum()
        return chain(x, w) + host.to("meta")

    x, w = (square(seed).detach().to("meta").requires_grad_() for seed in (0, 1))
    _, backward, table = instrumented(function, x, w, square(2))
    elsewhere = [why for _, _, why in table.uncovered if why.startswith("on cpu")]
    assert elsewhere == ["on cpu, beside a computation on meta"] * len(elsewhere)
    assert len(elsewhere) >= 2
    needs = backward.find_nodes(op="call_function", target=ops.need)
    assert len(needs) >= 2
    assert {need.meta["val"].device.type for need in needs} == {"meta"}


def test_symbolic_sizes_are_defined_before_every_use() -> None:
    def function(x: Tensor, w: Tensor) -> Tensor:
        batch, time, width = x.shape
        for _ in range(3):
            x = torch.tanh(x.reshape(batch * time, width) @ w).view(batch, time, width)
        return x.sum()

    x = torch.randn(12, 40, 64, requires_grad=True)
    torch._dynamo.mark_dynamic(x, 0)
    torch._dynamo.mark_dynamic(x, 1)
    forward, backward, table = instrumented(function, x, square(side=64), dynamic=True)
    assert len(table.slots) >= 3
    for graph in (forward, backward):
        graph.lint()
    order = {node: i for i, node in enumerate(backward.nodes)}
    (enter,) = backward.find_nodes(op="call_function", target=ops.enter_backward)
    for need in backward.find_nodes(op="call_function", target=ops.need):
        computed = [size for size in (*need.args[3], *need.args[4]) if isinstance(size, fx.Node)]
        assert computed
        assert all(order[size] < order[enter] for size in computed)


def test_what_is_saved_at_the_end_of_a_graph_is_saved_where_it_is_used_last() -> None:
    """AOTAutograd saves attention's result a second time, by a `detach` behind everything else."""

    def attend(x: Tensor) -> Tensor:
        heads = x.view(1, SIDE, 2, SIDE // 2).transpose(1, 2)
        y = F.scaled_dot_product_attention(heads, heads, heads, is_causal=True)
        return y.transpose(1, 2).reshape(SIDE, SIDE)

    forward, _, _ = instrumented(lambda x, w: attend(attend(x) @ w).sum(), square(), square(1))
    order = {node: i for i, node in enumerate(forward.nodes)}
    first, second = (node for node in order if "attention" in str(node.target))
    saves = [node for node in order if node.target is ops.save]
    results = [save for save in saves if first in base_of(save.args[0]).all_input_nodes]
    assert len(results) >= 1
    assert all(order[save] < order[second] for save in results)


def test_a_mask_for_the_backward_is_made_next_to_what_it_is_of() -> None:
    """AOTAutograd leaves it at the graph's end, where the first ReLU's result would still be."""

    def program(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
        y = F.dropout(torch.relu(x @ a), 0.5)
        return F.dropout(torch.relu(y @ b), 0.5).sum()

    inputs = [torch.randn(512, 512, requires_grad=True) for _ in range(3)]
    forward, _, _ = instrumented(program, *inputs, fused=True)
    order = {node: i for i, node in enumerate(forward.nodes)}
    masks = forward.find_nodes(op="call_function", target=torch.ops.aten.le.Scalar)
    _, second_product = forward.find_nodes(op="call_function", target=torch.ops.aten.mm.default)
    assert len(masks) == 2
    saves = [n for n in order if n.target is ops.save and n.args[0] in masks]
    assert len(saves) == 2
    assert min(order[save] for save in saves) < order[second_product], f"{forward}"


def test_a_product_does_not_part_what_could_be_one_kernel() -> None:
    """As in a gated layer: its ops would be between the activation and the product with it."""
    gate, up = (torch.nn.Parameter(square(seed)) for seed in (1, 2))
    forward, _, _ = instrumented(lambda x: (F.silu(x @ gate.t()) * (x @ up.t())).sum(), square())
    order = {node: i for i, node in enumerate(forward.nodes)}
    first, second = forward.find_nodes(op="call_function", target=torch.ops.aten.mm.default)
    (activation,) = forward.find_nodes(op="call_function", target=torch.ops.aten.silu.default)
    assert first in activation.all_input_nodes
    for op in (ops.acquire, ops.release):
        assert all(order[n] < order[activation] for n in order if n.target is op), f"{forward}"
    assert order[second] < order[activation]


def test_a_product_waits_for_what_it_is_given() -> None:
    up = torch.nn.Parameter(square(2))
    forward, _, _ = instrumented(lambda x: (x.sin() * (x.cos() @ up.t())).sum(), square())
    (product,) = forward.find_nodes(op="call_function", target=torch.ops.aten.mm.default)
    order = {node: i for i, node in enumerate(forward.nodes)}
    assert all(order[source] < order[product] for source in product.all_input_nodes)


def test_compile_caches_tell_partitioners_apart_by_what_they_do() -> None:
    plain, again, updating = (
        TeraplanPartitioner(updates=updates) for updates in (False, False, True)
    )
    assert pickle.dumps(plain) == pickle.dumps(again) != pickle.dumps(updating)
    assert plain.uuid() == again.uuid() != updating.uuid()


def test_what_graphs_take_beside_a_state_that_moves_and_beside_one_that_stays() -> None:
    x, weight = square(), torch.nn.Parameter(square(1))
    _, backward, table = instrumented(lambda x: chain(x, weight), x)
    assert backward.find_nodes(op="call_function", target=ops.settle)
    nbytes = SIDE * SIDE * 4
    assert (table.backward.gradients_bytes, table.backward_of_moving.gradients_bytes) == (nbytes, 0)
    for state_moves, memory in ((False, table.backward), (True, table.backward_of_moving)):
        assert table.beside_bytes(0, state_moves=state_moves) == max(
            table.forward.least_bytes, memory.least_bytes
        )
        far_more = table.beside_bytes(100 * nbytes, state_moves=state_moves)
        others = far_more - memory.least_bytes
        assert others == 100 * nbytes - memory.gradients_bytes, "gradients of other graphs"


def test_the_table_tells_graphs_apart_and_repeats() -> None:
    _, _, first = instrumented(chain, square(), square(1))
    _, _, again = instrumented(chain, square(), square(1))
    _, _, other = instrumented(lambda x, w: chain(x, w) * 2, square(), square(1))
    assert first == again
    assert other.graph != first.graph
    assert type(first).from_json(first.to_json()) == first


def test_models_of_other_widths_have_other_graphs_and_batches_of_other_sizes_have_not() -> None:
    def graph_of(rows: int, width: int) -> str:
        weight = torch.nn.Parameter(torch.rand(width, width))
        _, _, table = instrumented(lambda x: (x @ weight).sin().cos(), torch.rand(rows, width))
        return table.graph

    first = graph_of(SIDE, SIDE)
    assert graph_of(2 * SIDE, SIDE) == first
    assert graph_of(SIDE, 2 * SIDE) != first
