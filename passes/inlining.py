"""Which results of arithmetic Inductor never puts in memory, since each reader computes them anew.

    y = addmm(..)   square = y * y   t = tanh(square)     g = square * dt
                    inlined          heavy, read twice    computes `square` from `y` again

By Inductor's rules, as of torch 2.13: a pointwise result stays a formula until something other than
a fused kernel reads it. Read more than once it gets memory if the formula is long, reads much, or,
on a CPU, has a function in it that is slow to compute.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import fx

from teraplan import ops
from teraplan.passes.aliases import base_of, is_view, uses_of
from teraplan.passes.fused_runs import FusedRuns

_MOST_OPERATIONS = 30
"""`realize_opcount_threshold` of torch._inductor.config."""
_MOST_READS = 8
"""`realize_acc_reads_threshold`: of what has one reader."""
_MOST_READS_REUSED = 4
"""`realize_reads_threshold`: of what has several."""

_aten = torch.ops.aten
_LOGARITHMS = (_aten.log, _aten.log1p, _aten.log2, _aten.log10)
_SLOW_ON_CPU = frozenset((_aten.exp, *_LOGARITHMS, _aten.sigmoid, _aten.tanh))
_CHANGING = (ops.acquire, ops.release)
"""What says that it changes what it is given: who reads that computes before it."""
_ENDS = (ops.save, ops.done, *_CHANGING)
_ALSO_POINTWISE = frozenset((_aten._to_copy, torch.ops.prims.convert_element_type))


@dataclass(frozen=True, slots=True)
class _Formula:
    """What a node is computed from, where the nodes before it are formulas, too."""

    reads: frozenset[fx.Node]
    """What is in memory."""
    num_operations: int
    is_slow: bool


def inlined_nodes(graph: fx.Graph, runs: FusedRuns) -> frozenset[fx.Node]:
    """The nodes of `graph` whose results are in no memory of their own."""
    formulas: dict[fx.Node, _Formula] = {}
    order = {node: i for i, node in enumerate(graph.nodes)}
    for node in graph.nodes:
        if not runs.is_fused(node) or not is_pointwise(node):
            continue
        formula = _formula(node, formulas)
        if _stays_formula(node, formula, runs) and not _is_cut(node, formula, order):
            formulas[node] = formula
    return frozenset(formulas)


def is_pointwise(node: fx.Node) -> bool:
    """True if each element of the result depends on elements at its own place alone."""
    target = node.target
    if getattr(target, "overloadpacket", target) in _ALSO_POINTWISE:
        return True
    return isinstance(target, torch._ops.OpOverload) and torch.Tag.pointwise in target.tags


def _formula(node: fx.Node, formulas: dict[fx.Node, _Formula]) -> _Formula:
    reads, num_operations, is_slow = frozenset[fx.Node](), 1, _is_slow(node)
    for source in map(base_of, node.all_input_nodes):
        known = formulas.get(source)
        if known is None:
            reads |= {source}
            continue
        reads |= known.reads
        num_operations += known.num_operations
        is_slow |= known.is_slow
    return _Formula(reads, num_operations, is_slow)


def _is_slow(node: fx.Node) -> bool:
    value = node.meta.get("val")
    on_cpu = isinstance(value, torch.Tensor) and value.device.type == "cpu"
    return on_cpu and getattr(node.target, "overloadpacket", None) in _SLOW_ON_CPU


def _stays_formula(node: fx.Node, formula: _Formula, runs: FusedRuns) -> bool:
    if not _read_by_kernels_alone(node, runs) or len(formula.reads) > _MOST_READS:
        return False
    if len(node.users) == 1:
        return True
    short = formula.num_operations <= _MOST_OPERATIONS
    return short and len(formula.reads) <= _MOST_READS_REUSED and not formula.is_slow


def _read_by_kernels_alone(node: fx.Node, runs: FusedRuns) -> bool:
    return bool(node.users) and all(
        _read_by_kernels_alone(user, runs) if is_view(user) else runs.is_fused(user)
        for user in node.users
    )


def _is_cut(node: fx.Node, formula: _Formula, order: Mapping[fx.Node, int]) -> bool:
    """True if an op of ours ends the reading of what the formula reads, before that of `node`."""
    ends = [use for read in formula.reads for use in uses_of(read) if use.target in _ENDS]
    last = max(order[use] for use in uses_of(node))
    return any(end.target in _CHANGING or order[end] < last for end in ends)
