"""How much memory a pair of graphs takes beside the training state, read off the graphs alone.

    forward     x = gelu(..)   mm(x, w)   token = save(x)         x is alive from gelu to save
    backward    x = need(0)    gelu_backward(dy, x)   done(x)     and again from need to done

What autograd gives a backward (`dy`, zeros where an output is not used) is there until it is used.

Between `save` and `need` a saved activation can be elsewhere, so what is alive at once beside those
that are is about the least that the graphs can run in. Kernels of PyTorch run node by node. Of
those that Inductor fuses, what a run of nodes reads and leaves behind is there at once, but for
what it can write in place; what lies within a run, or is computed again by each reader
(`inlining`), is never in memory. An estimate: kernels have memory of their own, and Inductor
chooses its runs by more than this. It serves the first step; then memory is measured.
"""

import dataclasses
import operator
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import cast

import torch
from torch import fx

from teraplan import ops
from teraplan.passes.aliases import base_of, is_view
from teraplan.passes.fused_runs import FusedRuns
from teraplan.passes.inlining import inlined_nodes, is_pointwise
from teraplan.values.graph_table import GraphMemory, GraphTable

_ELSEWHERE = (ops.need, ops.settle)
"""Ops whose result is counted as a saved activation, or with the training state."""


@dataclass(frozen=True, slots=True)
class _Span:
    """Memory that is taken from the node at one position to the one at another."""

    start: int
    end: int
    nbytes: int
    can_leave: bool = False
    can_overwrite: bool = False
    """A kernel may write it where something is of the same size that it reads last."""


def nbytes_of(node: fx.Node) -> int:
    """Bytes of the node's tensor as traced (hints for symbolic sizes); 0 if it is no tensor."""
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor):
        return 0
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
    fused: bool,
) -> GraphTable:
    """The table with what its graphs take, told to the ops that carry it.

    Args:
        table: of these graphs, which have all their ops.
        forward: the one.
        backward: the other.
        static_inputs: positions of the forward's placeholders that live as long as the model.
        fused: Inductor compiles them.
    """
    saves = forward.find_nodes(op="call_function", target=ops.save)
    saved = {save.args[2]: base_of(save.args[0]) for save in saves}
    stays, moves = (
        dataclasses.replace(
            memory_of(backward, fused=fused, saved=saved, state_moves=state_moves),
            gradients_bytes=_gradients_nbytes(backward, static_inputs, state_moves=state_moves),
        )
        for state_moves in (False, True)
    )
    table = dataclasses.replace(
        table,
        forward=memory_of(forward, fused=fused, saved={}),
        backward=stays,
        backward_of_moving=moves,
        sizes_vary=any(_is_symbolic(node) for node in forward.nodes),
    )
    for graph, op in ((forward, ops.enter), (backward, ops.enter_backward)):
        for node in graph.find_nodes(op="call_function", target=op):
            node.update_arg(len(node.args) - 1, table.to_json())
    return table


def memory_of(
    graph: fx.Graph, *, fused: bool, saved: Mapping[int, fx.Node], state_moves: bool = False
) -> GraphMemory:
    """What a graph takes that has its ops.

    Args:
        graph: a forward or a backward.
        fused: its kernels are Inductor's.
        saved: of a backward, the node of the forward that each slot is (a view of); of a forward,
            nothing.
        state_moves: gradients that `settle` is given leave the graph's memory there.
    """
    runs = FusedRuns(graph) if fused else None
    position = _positions(graph, runs)
    inlined = inlined_nodes(graph, runs) if runs is not None else frozenset[fx.Node]()
    if not state_moves:  # they are what they are given
        inlined |= set(graph.find_nodes(op="call_function", target=ops.settle))
    made = list(_intermediates(graph, position, runs, inlined=inlined))
    if fused:
        made = _written_in_place(made)
    spans = [*made, *_needed(graph, position, saved), *_tangents(graph, position)]
    fixed = [span for span in spans if not span.can_leave]
    return GraphMemory(
        workspace_bytes=_peak(fixed),
        least_bytes=_peak(spans),
        parameters_bytes=_peak(list(_acquired(graph, position))),
    )


def workspace_nbytes(graph: fx.Graph, excluded: Set[fx.Node] = frozenset()) -> int:
    """Most bytes of intermediates at once, run node by node, `excluded` ones left out."""
    return _peak(list(_intermediates(graph, _positions(graph, None), None, excluded=excluded)))


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


def _positions(graph: fx.Graph, runs: FusedRuns | None) -> dict[fx.Node, int]:
    """When each node runs. A run of nodes that are one kernel has one position; None: all alone."""
    position: dict[fx.Node, int] = {}
    now, inside = 0, False
    for node in graph.nodes:
        is_fused = runs is not None and runs.is_fused(node)
        if not (is_fused and inside):
            now += 1
        inside = is_fused
        position[node] = now
    return position


def _intermediates(
    graph: fx.Graph,
    position: Mapping[fx.Node, int],
    runs: FusedRuns | None,
    *,
    inlined: Set[fx.Node] = frozenset(),
    excluded: Set[fx.Node] = frozenset(),
) -> Iterator[_Span]:
    """What the nodes of a graph leave in memory, from where it is made to its last use."""
    last_use = _last_uses(graph, position, inlined)
    for node in graph.nodes:
        if node.op not in ("call_function", "call_method") or is_view(node) or node in inlined:
            continue
        copied = _copied_nbytes(node) if runs is None else 0
        if copied:
            yield _Span(position[node], position[node], copied)
        nbytes = nbytes_of(node)
        if not nbytes or node.target in _ELSEWHERE or node in excluded:
            continue
        made = node
        if node.target is operator.getitem:  # one result of several
            made = node.all_input_nodes[0]
        start, last = position[made], last_use[node]
        is_fused = runs is not None and made is node and runs.is_fused(node)
        if not (is_fused and last == start):
            pointwise = is_fused and is_pointwise(node)
            yield _Span(start, max(start, last), nbytes, can_overwrite=pointwise)


def _written_in_place(spans: Sequence[_Span]) -> list[_Span]:
    """The same, where what a kernel reads last ends for what it writes there."""
    ending: dict[tuple[int, int], list[int]] = {}
    for number, span in enumerate(spans):
        if span.start < span.end:
            ending.setdefault((span.end, span.nbytes), []).append(number)
    found = list(spans)
    for span in spans:
        read = ending.get((span.start, span.nbytes))
        if span.can_overwrite and read:
            number = read.pop()
            found[number] = dataclasses.replace(found[number], end=span.start - 1)
    return found


def _copied_nbytes(node: fx.Node) -> int:
    """What oneDNN's convolutions copy into layouts of their own, while they run.

    Inductor has it in these layouts already.
    """
    if getattr(node.target, "overloadpacket", None) not in _CONVOLUTIONS:
        return 0
    return sum(nbytes_of(argument) for argument in node.all_input_nodes)


_CONVOLUTIONS = frozenset((torch.ops.aten.convolution, torch.ops.aten.convolution_backward))


def _tangents(graph: fx.Graph, position: Mapping[fx.Node, int]) -> Iterator[_Span]:
    """Gradients of the forward's results."""
    last_use = _last_uses(graph, position, frozenset())
    for node in graph.find_nodes(op="placeholder"):
        if "tangents" in node.name:
            yield _Span(0, last_use[node], nbytes_of(node))


def _needed(
    graph: fx.Graph, position: Mapping[fx.Node, int], saved: Mapping[int, fx.Node]
) -> Iterator[_Span]:
    """What `need` brings back, until it is `done`; slots that share memory come back as one."""
    spans: dict[fx.Node, tuple[int, int]] = {}
    last_use = _last_uses(graph, position, frozenset())
    for need in graph.find_nodes(op="call_function", target=ops.need):
        base = saved[need.args[2]]
        start, last = position[need], last_use[need]
        first, end = spans.get(base, (start, last))
        spans[base] = min(first, start), max(end, last)
    for base, (start, last) in spans.items():
        yield _Span(start, last, nbytes_of(base), can_leave=True)


def _acquired(graph: fx.Graph, position: Mapping[fx.Node, int]) -> Iterator[_Span]:
    """Parameters, from where each is acquired to where it is released."""
    released = {
        node.args[0]: position[node]
        for node in graph.find_nodes(op="call_function", target=ops.release)
    }
    for node in graph.find_nodes(op="call_function", target=ops.acquire):
        parameter = cast("fx.Node", node.args[0])
        last = max(position[node], released.get(parameter, position[node]))
        yield _Span(position[node], last, nbytes_of(parameter))


def _last_uses(
    graph: fx.Graph, position: Mapping[fx.Node, int], inlined: Set[fx.Node]
) -> dict[fx.Node, int]:
    """Where each node's memory is used last, through views and what is `inlined`; -1 if nowhere."""
    last: dict[fx.Node, int] = {}
    for node in reversed(graph.nodes):
        last[node] = -1
        for user in node.users:
            through = last[user] if user in inlined or is_view(user) else -1
            last[node] = max(last[node], position[user], through)
    return last


def _peak(spans: list[_Span]) -> int:
    """Most bytes at once."""
    changes: dict[int, int] = {}
    for span in spans:
        changes[span.start] = changes.get(span.start, 0) + span.nbytes
        changes[span.end + 1] = changes.get(span.end + 1, 0) - span.nbytes
    live = peak = 0
    for _, change in sorted(changes.items()):
        live += change
        peak = max(peak, live)
    return peak


def _is_symbolic(node: fx.Node) -> bool:
    """True if the node is a size, or is of a size, that may differ from call to call."""
    value = node.meta.get("val")
    sizes = value.shape if isinstance(value, torch.Tensor) else (value,)
    return any(isinstance(size, torch.SymInt) for size in sizes)


def _hint(size: int | torch.SymInt) -> int:
    if isinstance(size, torch.SymInt):
        hint = size.node.hint
        return int(hint) if hint is not None else 1
    return size
