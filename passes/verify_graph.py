"""Checks an instrumented pair of graphs: every op once, bracketing every use, in one chain."""

from torch import fx

from teraplan import ops
from teraplan.passes.aliases import base_of, uses_of
from teraplan.values.graph_table import GraphTable


def verify_pair(forward: fx.Graph, backward: fx.Graph, table: GraphTable) -> None:
    """Assert what `insert_sites` promises; a failure is a bug of ours, shown with its surroundings.

    In the forward each slot is saved once, after all uses of its memory. In the backward each slot
    is needed once, before all uses, and done once, after them.
    """
    slots = list(range(len(table.slots)))
    if not slots:
        return
    order = {node: i for i, node in enumerate(forward.nodes)}
    saves = forward.find_nodes(op="call_function", target=ops.save)
    _expect(sorted(n.args[2] for n in saves) == slots, "each slot is saved once", saves[0])
    for save in saves:
        for use in uses_of(base_of(save.args[0])):
            late = use.target not in (ops.save,) and order[use] > order[save]
            _expect(not late, f"{use.name} uses what {save.name} has saved", save)
    order = {node: i for i, node in enumerate(backward.nodes)}
    needs = backward.find_nodes(op="call_function", target=ops.need)
    dones = backward.find_nodes(op="call_function", target=ops.done)
    _expect(sorted(n.args[2] for n in needs) == slots, "each slot is needed once", needs[0])
    done_of = {n.args[3]: n for n in dones}
    _expect(sorted(done_of) == slots, "each slot is done once", needs[0])
    for need in needs:
        done = done_of[need.args[2]]
        for use in uses_of(need):
            _expect(order[use] <= order[done], f"{use.name} comes after {done.name}", done)


def _expect(holds: bool, what: str, node: fx.Node) -> None:
    assert holds, f"instrumented graph: expected: {what}\n{_surroundings(node)}"


def _surroundings(node: fx.Node, reach: int = 5) -> str:
    nodes = list(node.graph.nodes)
    at = nodes.index(node)
    lines = [n.format_node() or n.name for n in nodes[max(0, at - reach) : at + reach + 1]]
    return "\n".join(lines)
