"""Which results of arithmetic Inductor never puts in memory, since each reader computes them anew.

    y = addmm(..)   square = y * y   t = tanh(square)     g = square * dt
                    inlined          heavy, read twice    computes `square` from `y` again

By Inductor's rules, as of torch 2.13: a pointwise result stays a formula until something other than
a fused kernel reads it, or the formula is long or reads much. Read more than once it may read less,
and it gets memory, too, if on a CPU it has a function in it that is slow to compute.
"""

from collections.abc import Mapping, Set
from dataclasses import dataclass

import torch
from torch import fx
from torch._inductor import config as inductor_config

from teraplan import ops
from teraplan.passes.aliases import base_of, is_view, uses_of
from teraplan.passes.fused_runs import FusedRuns
from teraplan.passes.targets import packet_of

_aten = torch.ops.aten
_LOGARITHMS = (_aten.log, _aten.log1p, _aten.log2, _aten.log10)
_SLOW_ON_CPU = frozenset((_aten.exp, *_LOGARITHMS, _aten.sigmoid, _aten.tanh))
_CHANGING = (ops.acquire, ops.release)
"""What says that it changes what it is given: who reads that computes before it."""
_ENDS = (ops.save, ops.done, *_CHANGING)
_ALSO_POINTWISE = frozenset((_aten._to_copy, torch.ops.prims.convert_element_type))
_BY_INDEX = (_aten.index, _aten.index_put)
_FROM_ELSEWHERE = frozenset(
    (
        *(_aten.index, _aten._unsafe_index, _aten._unsafe_masked_index, _aten.gather),
        *(_aten.embedding, _aten.constant_pad_nd, _aten.slice_scatter, _aten.select_scatter),
    )
)
"""Formulas, too: each element of the result is one that is read at another place."""


@dataclass(frozen=True, slots=True)
class _Formula:
    """What a node is computed from, where the nodes before it are formulas, too."""

    reads: frozenset[fx.Node]
    """What is in memory."""
    num_operations: int
    is_slow: bool


@dataclass(frozen=True, slots=True)
class _Most:
    """What a formula may have before it gets memory; Inductor's settings for one sort of device."""

    operations: int
    reads: int
    """Of a formula with one reader."""
    reads_reused: int
    """Of one with several."""


def inlined_nodes(graph: fx.Graph, runs: FusedRuns) -> frozenset[fx.Node]:
    """The nodes of `graph` whose results are in no memory of their own."""
    formulas: dict[fx.Node, _Formula] = {}
    order = {node: i for i, node in enumerate(graph.nodes)}
    for node in graph.nodes:
        if not runs.is_fused(node) or not (is_pointwise(node) or _reads_elsewhere(node)):
            continue
        formula = _formula(node, formulas)
        if _stays_formula(node, formula, runs) and not _is_cut(node, formula, order):
            formulas[node] = formula
    return frozenset(formulas)


def is_pointwise(node: fx.Node) -> bool:
    """True if each element of the result depends on elements at its own place alone."""
    if packet_of(node) in _ALSO_POINTWISE:
        return True
    target = node.target
    return isinstance(target, torch._ops.OpOverload) and torch.Tag.pointwise in target.tags


def displaced_nodes(graph: fx.Graph, inlined: Set[fx.Node]) -> frozenset[fx.Node]:
    """Those whose elements follow from some at other places of what is in memory.

    Nothing may be written over what they read.
    """
    found: set[fx.Node] = set()
    for node in graph.nodes:
        sources = map(base_of, node.all_input_nodes)
        if _reads_elsewhere(node) or any(s in inlined and s in found for s in sources):
            found.add(node)
    return frozenset(found)


def _reads_elsewhere(node: fx.Node) -> bool:
    return packet_of(node) in _FROM_ELSEWHERE and not _selects_by_mask(node)


def _selects_by_mask(node: fx.Node) -> bool:
    """True for `x[mask]`, whose size follows from values: a call of PyTorch's own."""
    values = (source.meta.get("val") for source in node.all_input_nodes[1:])
    return packet_of(node) in _BY_INDEX and any(
        isinstance(value, torch.Tensor) and value.dtype is torch.bool for value in values
    )


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
    return _on_cpu(node) and packet_of(node) in _SLOW_ON_CPU


def _on_cpu(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.device.type == "cpu"


def _most(*, on_cpu: bool) -> _Most:
    return _Most(
        operations=_setting("realize_opcount_threshold", on_cpu=on_cpu),
        reads=_setting("realize_acc_reads_threshold", on_cpu=on_cpu),
        reads_reused=inductor_config.realize_reads_threshold,
    )


def _setting(name: str, *, on_cpu: bool) -> int:
    """Since torch 2.13 None stands for one of two, of which that for CPUs is larger."""
    value: int | None = getattr(inductor_config, name)
    if value is not None:
        return value
    of_device = name.replace("realize", "realize_cpu") if on_cpu else f"_{name}_default"
    found: int = getattr(inductor_config, of_device)
    return found


def _stays_formula(node: fx.Node, formula: _Formula, runs: FusedRuns) -> bool:
    most, num_reads = _most(on_cpu=_on_cpu(node)), len(formula.reads)
    is_long = formula.num_operations > most.operations
    if not _read_by_kernels_alone(node, runs) or num_reads > most.reads:
        return False
    if len(set(uses_of(node))) == 1:
        return not is_long or num_reads < 2
    return not is_long and num_reads <= most.reads_reused and not formula.is_slow


def _read_by_kernels_alone(node: fx.Node, runs: FusedRuns) -> bool:
    return bool(node.users) and all(
        _read_by_kernels_alone(user, runs)
        if is_view(user)
        else runs.is_fused(user) or _scatters(user, node)
        for user in node.users
    )


def _scatters(node: fx.Node, values: fx.Node) -> bool:
    """True if `node` is a kernel that has `values` from its formula and adds them up elsewhere."""
    if packet_of(node) is not _aten.index_put or torch.are_deterministic_algorithms_enabled():
        return False
    return node.args[2] is values and node.args[0] is not values and not _selects_by_mask(node)


def _is_cut(node: fx.Node, formula: _Formula, order: Mapping[fx.Node, int]) -> bool:
    """True if an op of ours ends the reading of what the formula reads, before that of `node`."""
    ends = [use for read in formula.reads for use in uses_of(read) if use.target in _ENDS]
    last = max(order[use] for use in uses_of(node))
    return any(end.target in _CHANGING or order[end] < last for end in ends)
