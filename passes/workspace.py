"""How much memory a pair of graphs takes beside the training state, read off the graphs alone.

    forward     x = gelu(..)   mm(x, w)   token = save(x)         x is alive from gelu to save
    backward    x = need(0)    gelu_backward(dy, x)   done(x)     and again from need to done

What autograd gives a backward (`dy`, zeros where an output is not used, saved activations that have
no ops) is there until it is used.

Between `save` and `need` a saved activation can be elsewhere, so what is alive at once beside those
that are is about the least that the graphs can run in, node by node, as PyTorch's kernels run.
Inductor's take less; what its code takes is found out once there is some
(`runtime/compiled/compiled_memory.py`). It serves the first step; then memory is measured.
"""

import dataclasses
import functools
import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import cast

import torch
from torch import fx

from teraplan import ops
from teraplan.passes.aliases import base_of, is_view
from teraplan.passes.anchor import device_of
from teraplan.passes.size_polynomials import SizePolynomials, peaks, total
from teraplan.passes.symbolic_sizes import SizeNodes
from teraplan.passes.targets import packet_of
from teraplan.values.graph_sizes import (
    GraphSizes,
    MemoryOfSizes,
    Polynomial,
    most_at,
)
from teraplan.values.graph_table import GraphMemory, GraphTable, key_of

_ELSEWHERE = (ops.need, ops.settle)
"""Ops whose result is counted as a saved activation, or with the training state."""


@dataclass(frozen=True, slots=True)
class _Span:
    """Memory that is taken from the node at one position to the one at another."""

    start: int
    end: int
    nbytes: Polynomial
    can_leave: bool = False


def nbytes_of(node: fx.Node) -> int:
    """Bytes of the node's tensor as traced (hints for symbolic sizes); 0 if it is no tensor.

    Of a sparse one, those of what it is made of.
    """
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor):
        return 0
    if value.layout is not torch.strided:
        return sum(map(nbytes_of, node.all_input_nodes))
    numel = 1
    for size in value.shape:
        numel *= _hint(size)
    return numel * value.dtype.itemsize


def with_memory(
    table: GraphTable,
    forward: fx.Graph,
    backward: fx.Graph,
    *,
    static_inputs: Sequence[int],
) -> GraphTable:
    """The table with what its graphs take, told to the op that carries it.

    Args:
        table: of these graphs, which have all their ops.
        forward: the one.
        backward: the other.
        static_inputs: positions of the forward's placeholders that live as long as the model.
    """
    saves = forward.find_nodes(op="call_function", target=ops.save)
    saved = {save.args[2]: base_of(save.args[0]) for save in saves}
    given = _given(table, forward, backward)
    nodes = SizeNodes(forward)
    sizes = SizePolynomials(nodes.values(), nodes.can_compute)
    at_once = functools.partial(memory_of, sizes=sizes)
    of_sizes = GraphSizes(
        slots=tuple(
            sizes.nbytes_of(save.args[0]) for save in sorted(saves, key=lambda save: save.args[2])
        ),
        forward=at_once(forward, saved={}, given=()),
        backward=at_once(backward, saved=saved, given=given),
        backward_of_moving=at_once(backward, saved=saved, given=given, state_moves=True),
    )
    parameters_bytes = _parameters_nbytes(backward)
    stays, moves = (
        _as_traced(
            memory,
            sizes,
            parameters_bytes=parameters_bytes,
            gradients_bytes=_gradients_nbytes(backward, static_inputs, state_moves=state_moves),
        )
        for memory, state_moves in ((of_sizes.backward, False), (of_sizes.backward_of_moving, True))
    )
    table = dataclasses.replace(
        table,
        forward=_as_traced(of_sizes.forward, sizes, parameters_bytes=_parameters_nbytes(forward)),
        backward=stays,
        backward_of_moving=moves,
        sizes_vary=not sizes.all_known,
        sizes_of_values=sizes.any_of_values,
        sizes=sizes.traced,
        of_sizes=of_sizes if sizes.sizes else None,
    )
    text = table.to_json()
    for enter in forward.find_nodes(op="call_function", target=ops.enter):
        with forward.inserting_before(enter):
            found = nodes.expressions(sizes.sizes)
        enter.args = (enter.args[0], text, found)
    for enter in backward.find_nodes(op="call_function", target=ops.enter_backward):
        enter.args = (*enter.args[:2], key_of(text))
    return table


def memory_of(
    graph: fx.Graph,
    *,
    sizes: SizePolynomials,
    saved: Mapping[int, fx.Node],
    given: Iterable[fx.Node],
    state_moves: bool = False,
) -> MemoryOfSizes:
    """What a graph takes that has its ops.

    Args:
        graph: a forward or a backward.
        sizes: what bytes are counted in.
        saved: of a backward, the node of the forward that each slot is (a view of); of a forward,
            nothing.
        given: its placeholders whose memory goes with their last use.
        state_moves: gradients that `settle` is given leave the graph's memory there.
    """
    position = _positions(graph)
    same = () if state_moves else graph.find_nodes(op="call_function", target=ops.settle)
    spans = [
        *_intermediates(graph, position, sizes, same=set(same)),
        *_needed(graph, position, saved, sizes),
        *_until_used(graph, position, given, sizes),
    ]
    fixed = [span for span in spans if not span.can_leave]
    return MemoryOfSizes(workspace=_peaks(fixed), least=_peaks(spans))


def _as_traced(
    memory: MemoryOfSizes,
    sizes: SizePolynomials,
    *,
    parameters_bytes: int,
    gradients_bytes: int = 0,
) -> GraphMemory:
    return GraphMemory(
        workspace_bytes=most_at(memory.workspace, sizes.traced),
        least_bytes=most_at(memory.least, sizes.traced),
        gradients_bytes=gradients_bytes,
        parameters_bytes=parameters_bytes,
    )


def _parameters_nbytes(graph: fx.Graph) -> int:
    """Most at once of those that are used."""
    sizes = SizePolynomials({})
    return most_at(_peaks(list(_acquired(graph, _positions(graph), sizes))), ())


def workspace_nbytes(graph: fx.Graph, excluded: Set[fx.Node] = frozenset()) -> int:
    """Most bytes of intermediates at once, run node by node, `excluded` ones left out."""
    sizes = SizePolynomials({})
    spans = list(_intermediates(graph, _positions(graph), sizes, excluded=excluded))
    return most_at(_peaks(spans), ())


def _gradients_nbytes(
    backward: fx.Graph, static_inputs: Sequence[int], *, state_moves: bool
) -> int:
    """What is there of parameters' gradients at the end of the graph."""
    results = cast("Sequence[fx.Node | None]", backward.output_node().args[0])
    found = {results[i] for i in static_inputs if i < len(results)}
    nodes = [node for node in found if isinstance(node, fx.Node)]
    bases = {base_of(_settled(node)) for node in nodes if not (state_moves and _is_settle(node))}
    return sum(map(nbytes_of, bases))


def _is_settle(node: fx.Node) -> bool:
    return node.target is ops.settle


def _settled(node: fx.Node) -> fx.Node:
    """The gradient itself."""
    return cast("fx.Node", node.args[0]) if _is_settle(node) else node


def _positions(graph: fx.Graph) -> dict[fx.Node, int]:
    """When each node runs."""
    return {node: position for position, node in enumerate(graph.nodes)}


def _intermediates(
    graph: fx.Graph,
    position: Mapping[fx.Node, int],
    sizes: SizePolynomials,
    *,
    same: Set[fx.Node] = frozenset(),
    excluded: Set[fx.Node] = frozenset(),
) -> Iterator[_Span]:
    """What the nodes of a graph leave in memory, from where it is made to its last use.

    Nodes of `same` give back what they are given.
    """
    last_use = _last_uses(graph, position, same)
    for node in graph.nodes:
        if node.op not in ("call_function", "call_method") or is_view(node) or node in same:
            continue
        if packet_of(node) in _CONVOLUTIONS:  # oneDNN copies into layouts of its own
            copied = total(map(sizes.nbytes_of, node.all_input_nodes))
            yield _Span(position[node], position[node], copied)
        nbytes = sizes.nbytes_of(node)
        if not nbytes or node.target in _ELSEWHERE or node in excluded:
            continue
        # One result of several is there when all are.
        made = node.all_input_nodes[0] if node.target is operator.getitem else node
        yield _Span(position[made], max(position[made], last_use[node]), nbytes)


_aten = torch.ops.aten
_CONVOLUTIONS = frozenset((_aten.convolution, _aten.convolution_backward))


def _given(table: GraphTable, forward: fx.Graph, backward: fx.Graph) -> Sequence[fx.Node]:
    """Placeholders of a backward: gradients of the forward's results, and what has no ops."""
    device = device_of(backward)
    left = {name for name, _, _ in table.uncovered}
    bases = {node.name: base_of(node) for node in forward.nodes if node.name in left}
    of_base: dict[object, fx.Node] = {}
    for node in backward.find_nodes(op="placeholder"):
        if "tangents" in node.name or (node.name in left and node.meta["val"].device == device):
            of_base.setdefault(bases.get(node.name, node), node)
    return tuple(of_base.values())


def _until_used(
    graph: fx.Graph,
    position: Mapping[fx.Node, int],
    given: Iterable[fx.Node],
    sizes: SizePolynomials,
) -> Iterator[_Span]:
    last_use = _last_uses(graph, position)
    for node in given:
        yield _Span(0, max(0, last_use[node]), sizes.nbytes_of(node))


def _needed(
    graph: fx.Graph,
    position: Mapping[fx.Node, int],
    saved: Mapping[int, fx.Node],
    sizes: SizePolynomials,
) -> Iterator[_Span]:
    """What `need` brings back, until it is `done`; slots that share memory come back as one."""
    spans: dict[fx.Node, tuple[int, int]] = {}
    last_use = _last_uses(graph, position)
    for need in graph.find_nodes(op="call_function", target=ops.need):
        base = saved[need.args[2]]
        start, last = position[need], last_use[need]
        first, end = spans.get(base, (start, last))
        spans[base] = min(first, start), max(end, last)
    for base, (start, last) in spans.items():
        yield _Span(start, last, sizes.nbytes_of(base), can_leave=True)


def _acquired(
    graph: fx.Graph, position: Mapping[fx.Node, int], sizes: SizePolynomials
) -> Iterator[_Span]:
    """Parameters, from where each is acquired to where it is released."""
    released = {
        node.args[0]: position[node]
        for node in graph.find_nodes(op="call_function", target=ops.release)
    }
    for node in graph.find_nodes(op="call_function", target=ops.acquire):
        parameter = cast("fx.Node", node.args[0])
        last = max(position[node], released.get(parameter, position[node]))
        yield _Span(position[node], last, sizes.nbytes_of(parameter))


def _last_uses(
    graph: fx.Graph, position: Mapping[fx.Node, int], same: Set[fx.Node] = frozenset()
) -> dict[fx.Node, int]:
    """Where each node's memory is used last, also through views and nodes of `same`; else -1."""
    last: dict[fx.Node, int] = {}
    for node in reversed(graph.nodes):
        last[node] = -1
        for user in node.users:
            through = last[user] if user in same or is_view(user) else -1
            last[node] = max(last[node], position[user], through)
    return last


def _peaks(spans: Sequence[_Span]) -> tuple[Polynomial, ...]:
    """Bytes at once."""
    return peaks([(span.start, span.end, span.nbytes) for span in spans])


def has_size_of_values(node: fx.Node) -> bool:
    """True if a size of the node's tensor follows from values, and so is known by nobody before."""
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor):
        return False
    sizes: Iterable[int | torch.SymInt] = value.shape
    return any(isinstance(size, torch.SymInt) and size.node.hint is None for size in sizes)


def _hint(size: int | torch.SymInt) -> int:
    if isinstance(size, torch.SymInt):
        hint = size.node.hint
        return int(hint) if hint is not None else 1
    return size
