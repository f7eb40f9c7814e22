"""Puts ops around the uses of every parameter, and behind every gradient, of compiled graphs.

    forward                        backward
    chain = enter(...)             chain = enter_backward(...)
    acquire(p, chain)              acquire(p, chain)
    y     = x @ p                  dx    = dy @ p.T
    release(p, chain)              release(p, chain)
                                   dp    = ...
                                   dp_1  = settle(dp, chain)
                                   return ..., dp_1

A parameter may reach the backward as a view that the forward has made of it. Which tensor an op
means is seen at run time, by its memory. Where parameters may be updated at their gradients, these
are given to the backward themselves, and `settle(dp, chain, p)` comes after their last use, too.

A graph without a backward has what the forward has here.
"""

from collections.abc import Mapping, Sequence, Set
from typing import Any, cast

import torch
from torch import fx

from teraplan import ops
from teraplan.passes.aliases import base_of, uses_of
from teraplan.passes.anchor import anchor_of
from teraplan.passes.fused_runs import FusedRuns
from teraplan.passes.workspace import nbytes_of
from teraplan.values.graph_table import MIN_SLOT_BYTES


def insert_state_sites(
    forward: fx.Graph,
    backward: fx.Graph,
    *,
    num_outputs: int,
    static_inputs: Sequence[int],
    updates: bool = False,
) -> None:
    """Insert all ops, in place, into graphs that have their `enter` and `enter_backward`.

    Args:
        forward: returns `num_outputs` results of the user, then what the backward is given.
        backward: has a placeholder of the same name for each of the latter, and returns a gradient
            or None for each input of the forward.
        num_outputs: number of results of the user.
        static_inputs: positions of the forward's placeholders that live as long as the model.
        updates: parameters may be updated at their gradients.
    """
    inputs = forward.find_nodes(op="placeholder")
    if not static_inputs:
        return
    static = _large_inputs(inputs, static_inputs)
    saved = _saved_parameters(forward, num_outputs, static)
    placeholders = backward.find_nodes(op="placeholder")
    _bracket_inputs(forward, inputs, static)
    chain = _chain(backward, ops.enter_backward)
    _bracket(backward, [p for p in placeholders if p.name in saved], chain)
    gradients = _movable_gradients(backward, inputs, static)
    ended: _Ended = {}
    if updates:
        sources = [inputs[position] for position, gradient in gradients if _is_alone(gradient)]
        ended = _give(forward, backward, num_outputs, sources)
    _settle(backward, [(position, g, inputs[position]) for position, g in gradients], ended, chain)


def insert_inference_sites(graph: fx.Graph, *, static_inputs: Sequence[int]) -> bool:
    """Insert `acquire` and `release` into a graph without a backward; False if it needs none.

    Args:
        graph: evaluates a model, or frozen layers whose inputs need no gradients.
        static_inputs: positions of the placeholders that live as long as the model.
    """
    inputs = graph.find_nodes(op="placeholder")
    static = _large_inputs(inputs, static_inputs)
    if static:
        _bracket_inputs(graph, inputs, static)
    return bool(static)


def _bracket_inputs(graph: fx.Graph, inputs: Sequence[fx.Node], static: Set[fx.Node]) -> None:
    """`_bracket` for those inputs of a forward graph that move."""
    _bracket(graph, sorted(static, key=inputs.index), _chain(graph, ops.enter))


def _large_inputs(inputs: Sequence[fx.Node], static_inputs: Sequence[int]) -> set[fx.Node]:
    return {inputs[i] for i in static_inputs if i < len(inputs) and _is_large(inputs[i])}


def _movable_gradients(
    backward: fx.Graph, inputs: Sequence[fx.Node], static: Set[fx.Node]
) -> list[tuple[int, fx.Node]]:
    """Position in the backward's results and node of each gradient that can move."""
    results = list(cast("Sequence[fx.Node | None]", backward.output_node().args[0]))
    if len(results) < len(inputs):
        return []
    return [
        (position, gradient)
        for position, (source, gradient) in enumerate(zip(inputs, results, strict=False))
        if source in static
        and isinstance(gradient, fx.Node)
        and _is_large(gradient)
        and _is_dense(gradient.meta["val"])
    ]


def _is_large(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return (
        isinstance(value, torch.Tensor)
        and type(value) is torch._subclasses.FakeTensor
        and value.layout == torch.strided
        and nbytes_of(node) >= MIN_SLOT_BYTES
    )


def _is_dense(value: torch.Tensor) -> bool:
    """True if the elements fill the memory from the first to the last."""
    last = sum((n - 1) * step for n, step in zip(value.shape, value.stride(), strict=True))
    return bool(last + 1 == value.numel())


def _saved_parameters(forward: fx.Graph, num_outputs: int, static: Set[fx.Node]) -> set[str]:
    """Names under which parameters, or views of them, are passed to the backward."""
    results = cast("Sequence[fx.Node | None]", forward.output_node().args[0])
    return {
        node.name
        for node in results[num_outputs:]
        if isinstance(node, fx.Node) and base_of(node) in static
    }


def _chain(graph: fx.Graph, enter: Any) -> fx.Node:
    """The graph's chain; a new one if nothing saved moves."""
    found: list[fx.Node] = graph.find_nodes(op="call_function", target=enter)
    if found:
        return found[0]
    inputs = graph.find_nodes(op="placeholder")
    anchor = anchor_of(graph)
    with graph.inserting_after(inputs[-1]):
        chain: fx.Node = graph.call_function(ops.enter_state, (anchor,))
    chain.meta["val"] = anchor.meta["val"].new_empty(0, dtype=torch.uint8)
    return chain


def _bracket(graph: fx.Graph, parameters: Sequence[fx.Node], chain: fx.Node) -> None:
    """Insert `acquire` before the first use of each, and `release` after the last."""
    order = {node: i for i, node in enumerate(graph.nodes)}
    runs, spans = FusedRuns(graph), []
    changed = {base_of(n.args[0]) for n in order if n.target is torch.ops.aten.copy_.default}
    for parameter in parameters:
        uses = [node for node in uses_of(parameter) if node is not chain]
        users = [node for node in parameter.users if node is not chain and node.op != "output"]
        if uses:
            first_use, last_use = (pick(uses, key=order.__getitem__) for pick in (min, max))
            first = min([runs.first(first_use), *users], key=order.__getitem__)
            spans.append((parameter, first, runs.last(last_use)))
    for parameter, first, last in spans:
        with graph.inserting_before(first):
            arguments = (parameter, chain, True) if parameter in changed else (parameter, chain)
            graph.call_function(ops.acquire, arguments).meta["val"] = None
        with graph.inserting_after(last):
            graph.call_function(ops.release, (parameter, chain)).meta["val"] = None


_Ended = Mapping[fx.Node, tuple[fx.Node, Sequence[fx.Node]]]
"""By placeholder of the forward: that of the backward, and the nodes that end its uses there."""


def _is_alone(gradient: fx.Node) -> bool:
    """True if no other result has a gradient's memory: an optimizer may write to it."""
    base = base_of(gradient)
    return base.op == "call_function" and _num_results(base) == 1


def _num_results(node: fx.Node) -> int:
    """How many results of the graph look at the memory of `node`."""
    results = cast("Sequence[fx.Node | None]", node.graph.output_node().args[0])
    return sum(isinstance(result, fx.Node) and base_of(result) is node for result in results)


def _give(
    forward: fx.Graph, backward: fx.Graph, num_outputs: int, sources: Sequence[fx.Node]
) -> _Ended:
    """Let the forward pass parameters on to the backward as they are."""
    output = forward.output_node()
    results = list(cast("Sequence[fx.Node | None]", output.args[0]))
    given = {node.name: node for node in backward.find_nodes(op="placeholder")}
    releases: list[fx.Node] = backward.find_nodes(op="call_function", target=ops.release)
    ended: dict[fx.Node, tuple[fx.Node, Sequence[fx.Node]]] = {}
    for source in sources:
        # States of random numbers come last, under other names in the backward.
        known = [n for n in results[num_outputs:] if isinstance(n, fx.Node) and n.name in given]
        saved = [node for node in known if _is_tensor(node)]
        if not saved:
            break
        names = {node.name for node in saved if base_of(node) is source}
        if source not in saved:
            results.insert(results.index(saved[-1], num_outputs) + 1, source)
            with backward.inserting_after(given[saved[-1].name]):
                placeholder = backward.placeholder(source.name)
            placeholder.meta = dict(source.meta)
            given[source.name] = placeholder
        ends = [node for node in releases if cast("fx.Node", node.args[0]).name in names]
        ended[source] = given[source.name], ends
    output.args = (tuple(results),)
    return ended


def _is_tensor(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), torch.Tensor)


def _settle(
    backward: fx.Graph,
    gradients: Sequence[tuple[int, fx.Node, fx.Node]],
    ended: _Ended,
    chain: fx.Node,
) -> None:
    """Let the backward return what `settle` makes of each large parameter's gradient."""
    output = backward.output_node()
    results = list(cast("Sequence[fx.Node | None]", output.args[0]))
    order, runs = {node: i for i, node in enumerate(backward.nodes)}, FusedRuns(backward)
    for position, gradient, source in gradients:
        uses = [node for node in uses_of(base_of(gradient)) if node in order]
        arguments = [gradient, chain]
        if source in ended:
            parameter, ends = ended[source]
            arguments.append(parameter)
            uses += ends
        last = max([gradient, *uses], key=order.__getitem__)
        with backward.inserting_after(runs.last(last)):
            settled = backward.call_function(ops.settle, tuple(arguments))
        settled.meta["val"] = gradient.meta["val"]
        results[position] = settled
    output.args = (tuple(results),)
