"""Moves nodes within a graph to where its ops do least harm. What is computed stays the same."""

from collections.abc import Sequence
from typing import cast

import torch
from torch import fx

from teraplan.passes.aliases import is_view
from teraplan.passes.fused_runs import FusedRuns


def advance_products(graph: fx.Graph) -> None:
    """Move a product in front of the run before it where the two runs around it can be one kernel.

        gate = mm(x, w)   silu(gate)   up = mm(x, v)   silu * up      silu waits for `up` anyway

    Inductor would compile them so by itself, but not with an op of ours between them, as they are
    around each use of a parameter.
    """
    runs, run = FusedRuns(graph), list[fx.Node]()
    for node in list(graph.nodes):
        if runs.is_fused(node):
            run.append(node)
            continue
        views = _own_views(node, run) if run and _is_read_behind(run, node, runs) else None
        if views is None:
            run = []
            continue
        run = [other for other in run if other not in views]
        for moved in (*views, node):
            run[0].prepend(moved)


def _own_views(product: fx.Node, run: Sequence[fx.Node]) -> list[fx.Node] | None:
    """What of the run it depends on: views of what was there before, else None.

    None, too, if its result depends on when it is computed.
    """
    if product.op != "call_function" or product.is_impure() or _is_random(product):
        return None
    views: list[fx.Node] = []
    needed = set(product.all_input_nodes)
    for node in reversed(run):
        if node not in needed:
            continue
        if not is_view(node):
            return None
        views.insert(0, node)
        needed.update(node.all_input_nodes)
    return views


def _is_read_behind(run: Sequence[fx.Node], product: fx.Node, runs: FusedRuns) -> bool:
    """True if what the run computes is read in the run right behind the product."""
    behind, node = set[fx.Node](), product.next
    while runs.is_fused(node):
        behind.add(node)
        node = node.next
    return any(not is_view(node) and not behind.isdisjoint(node.users) for node in run)


def advance_late(graph: fx.Graph, num_outputs: int) -> None:
    """Move what is computed for the backward alone to right behind what it is computed from.

    AOTAutograd leaves it at the graph's end: the `detach` of an attention's result, or where a
    ReLU's result is zero. What it is computed from could not leave before.
    """
    results = cast("Sequence[fx.Node | None]", graph.output_node().args[0])[:num_outputs]
    needed = _ancestors([node for node in results if isinstance(node, fx.Node)])
    runs = FusedRuns(graph)
    position = {node: (i, 0) for i, node in enumerate(graph.nodes)}
    last_placeholder: fx.Node = graph.find_nodes(op="placeholder")[-1]
    last_behind: dict[int, fx.Node] = {}
    for node in list(graph.nodes):
        if node in needed or not node.all_input_nodes or not _may_advance(node, runs):
            continue
        last = max((last_placeholder, *node.all_input_nodes), key=position.__getitem__)
        if last is last_placeholder and not is_view(node):
            continue  # a copy of a parameter in another type, say: it would only be there longer
        number = position[last][0]
        behind = last_behind.get(number, last)
        behind.append(node)
        position[node] = (number, position[behind][1] + 1)
        last_behind[number] = node


def _may_advance(node: fx.Node, runs: FusedRuns) -> bool:
    """True for a view and for arithmetic that gives the same wherever it is."""
    return is_view(node) or (runs.is_fused(node) and not _is_random(node))


def _is_random(node: fx.Node) -> bool:
    """True if its result depends on when it is computed."""
    return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())


def _ancestors(nodes: Sequence[fx.Node]) -> set[fx.Node]:
    """These and all that they are computed from."""
    found, pending = set[fx.Node](), list(nodes)
    while pending:
        node = pending.pop()
        if node not in found:
            found.add(node)
            pending += node.all_input_nodes
    return found


def delay_views(placeholders: Sequence[fx.Node]) -> None:
    """Move each view of these to right before its first use, since a `need` precedes the views."""
    order = {node: i for i, node in enumerate(placeholders[0].graph.nodes)}

    def delay(view: fx.Node) -> None:
        for user in view.users:
            if is_view(user):
                delay(user)
        if not view.users:
            return
        first = min(view.users, key=order.__getitem__)
        first.prepend(view)
        order[view] = order[first]

    for placeholder in placeholders:
        for user in placeholder.users:
            if is_view(user):
                delay(user)
