"""Puts the migration ops around every saved activation of a forward graph and its backward.

    forward                        backward
    chain = enter(...)             chain = enter_backward(...)
    x     = ...                    x     = need(chain, token, slot, ...)    before the first use
    ...   = last use of x          ...   = last use of x
    token = save(x, chain, slot)   done(x, token, chain, slot)
    return ..., token

Which activations really leave is not decided here: every one that is large enough gets its ops,
and the runtime asks the active plan. Several saved tensors may look at one memory (the q, k and v
of one projection); each has its slot, and the runtime, which sees the storage, moves it once.
"""

import hashlib
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import fx

from teraplan import ops
from teraplan.passes.aliases import base_of, uses_of
from teraplan.passes.anchor import anchor_of, device_of
from teraplan.passes.fused_runs import FusedRuns
from teraplan.passes.layouts import KEPT_STRIDE, SAVED_AS, kept_strides
from teraplan.passes.module_path import module_path
from teraplan.passes.recipes import FoundRecipe, find_recipes
from teraplan.passes.reorder import advance_late, advance_products, delay_views
from teraplan.passes.symbolic_sizes import SizeNodes, UnknownSymbolError
from teraplan.passes.workspace import has_size_of_values, nbytes_of
from teraplan.values.graph_table import MIN_SLOT_BYTES, GraphTable, Slot


@dataclass(frozen=True, slots=True, kw_only=True)
class _Candidate:
    """A saved activation that gets ops: its output position, its nodes in both graphs."""

    position: int
    saved: fx.Node
    placeholder: fx.Node


def insert_sites(
    forward: fx.Graph,
    backward: fx.Graph,
    *,
    num_outputs: int,
    static_inputs: Sequence[int],
    fused: bool = False,
) -> GraphTable:
    """Insert all ops into both graphs, in place, and return the table that they carry.

    Args:
        forward: returns `num_outputs` results of the user, then what the backward is given.
        backward: has a placeholder of the same name for each of the latter.
        num_outputs: number of results of the user.
        static_inputs: positions of the forward's placeholders that live as long as the model
            (parameters, buffers).
        fused: Inductor compiles the graphs.
    """
    static = _static(forward, static_inputs)
    fingerprint = _hash(forward, backward, static)
    advance_products(forward)
    advance_late(forward, num_outputs)
    candidates, uncovered = _candidates(forward, backward, num_outputs, static_inputs)
    recipes = find_recipes(
        forward,
        {c.saved: slot for slot, c in enumerate(candidates)},
        num_outputs=num_outputs,
        static=static,
    )
    table = GraphTable(
        graph=fingerprint,
        slots=tuple(
            Slot(
                name=c.saved.name,
                layer=module_path(c.saved),
                nbytes=nbytes_of(c.saved),
                given=base_of(c.saved).op == "placeholder",
                recipe=recipes[c.saved].recipe if c.saved in recipes else None,
            )
            for c in candidates
        ),
        uncovered=tuple(uncovered),
    )
    if candidates:
        strides = kept_strides(forward, [c.saved for c in candidates], fused=fused)
        tokens = _insert_saves(forward, candidates, recipes, table, strides)
        if fused:
            _realize_saved(forward)
        _insert_needs(backward, candidates, tokens, strides)
    return table


def _hash(forward: fx.Graph, backward: fx.Graph, static: Set[fx.Node]) -> str:
    """Of what is computed, in which types, with parameters of which sizes; a batch's may vary."""
    inputs = forward.find_nodes(op="placeholder")
    values = [(node, node.meta.get("val")) for node in inputs]
    tensors = [(node, v) for node, v in values if isinstance(v, torch.Tensor)]
    types = [(str(v.dtype), *(tuple(v.shape) if node in static else ())) for node, v in tensors]
    text = f"{forward}\n{backward}\n{types}"
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _static(forward: fx.Graph, static_inputs: Sequence[int]) -> set[fx.Node]:
    inputs = forward.find_nodes(op="placeholder")
    return {inputs[i] for i in static_inputs if i < len(inputs)}


def _output_of(graph: fx.Graph) -> fx.Node:
    return graph.output_node()


def _candidates(
    forward: fx.Graph,
    backward: fx.Graph,
    num_outputs: int,
    static_inputs: Sequence[int],
) -> tuple[list[_Candidate], list[tuple[str, int, str]]]:
    """The saved activations that get ops, and name, bytes and reason of each that does not.

    One gets them also where all are small: by its token the backward knows which step it is of.
    """
    static = _static(forward, static_inputs)
    device = device_of(forward)
    placeholders = {node.name: node for node in backward.find_nodes(op="placeholder")}
    sizes = SizeNodes(backward)
    candidates: list[_Candidate] = []
    small: list[_Candidate] = []
    uncovered: list[tuple[str, int, str]] = []
    for position, saved in enumerate(cast("Sequence[fx.Node | None]", _output_of(forward).args[0])):
        if position < num_outputs or not isinstance(saved, fx.Node):
            continue
        if not isinstance(saved.meta.get("val"), torch.Tensor) or base_of(saved) in static:
            continue
        placeholder = placeholders.get(saved.name)
        why = _why_not(saved, placeholder, sizes, device)
        if placeholder is not None and why in (None, _SMALL) and nbytes_of(saved):
            candidate = _Candidate(position=position, saved=saved, placeholder=placeholder)
            (small if why else candidates).append(candidate)
        if why is not None or placeholder is None:
            uncovered.append((saved.name, nbytes_of(saved), why or "not passed to the backward"))
    if small and not candidates:
        candidates = [max(small, key=lambda candidate: nbytes_of(candidate.saved))]
        uncovered = [item for item in uncovered if item[0] != candidates[0].saved.name]
    if device_of(backward, {c.placeholder for c in candidates}) != device:  # nor would its chain be
        why = f"the backward is given nothing else on {device}"
        uncovered += [(c.saved.name, nbytes_of(c.saved), why) for c in candidates]
        candidates = []
    return candidates, uncovered


_SMALL = "small"
_MOST_GROWTH = 16
"""So much larger than traced a tensor of sizes that vary may be in a later call."""


def _why_not(
    saved: fx.Node, placeholder: fx.Node | None, sizes: SizeNodes, device: torch.device
) -> str | None:
    """Why a saved tensor cannot have ops, or None if it can."""
    value = saved.meta["val"]
    if placeholder is None or not any(True for _ in uses_of(placeholder)):
        return "not used in the backward graph"
    if value.device != device:
        return f"on {value.device}, beside a computation on {device}"
    if value.layout != torch.strided or value.is_quantized:
        return f"layout {value.layout}"
    if type(value) is not torch._subclasses.FakeTensor:
        return f"tensor subclass {type(value).__name__}"
    if value.is_conj() or value.is_neg():
        return "conjugated or negated when it is read"
    if any(
        user.target is torch.ops.aten.copy_.default and user.args[0] is base_of(saved)
        for user in base_of(saved).users
    ):
        return "overwritten in the graph"
    try:
        sizes.check((*value.shape, *value.stride()))
    except UnknownSymbolError as error:
        return f"size of unknown symbol {error}"
    may_be_small = not has_size_of_values(saved)
    return _SMALL if may_be_small and nbytes_of(saved) < _least_nbytes(value) else None


def _least_nbytes(value: torch.Tensor) -> int:
    """Of smaller tensors none gets ops."""
    varies = any(isinstance(size, torch.SymInt) for size in value.shape)
    return MIN_SLOT_BYTES // _MOST_GROWTH if varies else MIN_SLOT_BYTES


def _last(nodes: Sequence[fx.Node], order: dict[fx.Node, int]) -> fx.Node:
    return max(nodes, key=order.__getitem__)


def _insert_saves(
    graph: fx.Graph,
    candidates: Sequence[_Candidate],
    recipes: Mapping[fx.Node, FoundRecipe],
    table: GraphTable,
    strides: Sequence[tuple[Any, ...]],
) -> dict[str, fx.Node]:
    """Insert `enter` and each `save`; returns the token of each saved node by its name."""
    order = {node: i for i, node in enumerate(graph.nodes)}
    last_input = _last(graph.find_nodes(op="placeholder"), order)
    runs = FusedRuns(graph)
    lasts = {
        c.saved: runs.last(_last([last_input, c.saved, *uses_of(base_of(c.saved))], order))
        for c in candidates
    }
    anchor = anchor_of(graph)
    with graph.inserting_after(last_input):
        chain = graph.call_function(ops.enter, (anchor, table.to_json(), []))
    chain.meta["val"] = anchor.meta["val"].new_empty(0, dtype=torch.uint8)
    output = _output_of(graph)
    results = list(output.args[0])  # type: ignore[arg-type]
    tokens: dict[str, fx.Node] = {}
    for slot, candidate in enumerate(candidates):
        saved = candidate.saved
        after = chain if lasts[saved] is last_input else lasts[saved]
        beside = list(recipes[saved].beside) if saved in recipes else []
        with graph.inserting_after(after):
            token = graph.call_function(
                ops.save, (saved, chain, slot, beside), name=f"token_{saved.name}"
            )
        token.meta[KEPT_STRIDE] = strides[slot]
        with saved.meta["val"].fake_mode:
            token.meta["val"] = torch.empty(1, dtype=torch.int64, device="cpu")
        if "saved_tensor_with_no_vc_check" in saved.meta:
            token.meta["saved_tensor_with_no_vc_check"] = saved.meta[
                "saved_tensor_with_no_vc_check"
            ]
        results[candidate.position] = token
        tokens[saved.name] = token
    output.args = (tuple(results),)
    return tokens


def _realize_saved(graph: fx.Graph) -> None:
    """Let each saved activation have memory from where it is computed on."""
    for save in graph.find_nodes(op="call_function", target=ops.save):
        saved = save.args[0]
        if saved.op == "placeholder":
            continue
        with graph.inserting_after(saved):
            realized = graph.call_function(ops.realize, (saved,))
        realized.meta["val"] = saved.meta["val"]
        save.update_arg(0, realized)


def _insert_needs(
    graph: fx.Graph,
    candidates: Sequence[_Candidate],
    tokens: dict[str, fx.Node],
    strides: Sequence[tuple[Any, ...]],
) -> None:
    """Replace each placeholder by a token and its `need`; insert `enter_backward` and `done`."""
    delay_views([c.placeholder for c in candidates])
    order = {node: i for i, node in enumerate(graph.nodes)}
    runs, spans = FusedRuns(graph), []
    for candidate in candidates:
        uses = list(uses_of(candidate.placeholder))
        first_user = min(candidate.placeholder.users, key=order.__getitem__)
        first_use = runs.first(min(uses, key=order.__getitem__))
        first = min(first_user, first_use, key=order.__getitem__)
        spans.append((first, runs.last(_last(uses, order))))
    anchor = anchor_of(graph, {c.placeholder for c in candidates})
    token_inputs = [_token_input(graph, c, tokens[c.saved.name]) for c in candidates]
    last_input = graph.find_nodes(op="placeholder")[-1]
    with graph.inserting_after(last_input):
        chain = graph.call_function(ops.enter_backward, (anchor, token_inputs[0], ""))
    chain.meta["val"] = anchor.meta["val"].new_empty(0, dtype=torch.uint8)
    sizes = SizeNodes(graph)
    values = [
        _restrided(candidate.placeholder.meta["val"], stride)
        for candidate, stride in zip(candidates, strides, strict=True)
    ]
    with graph.inserting_before(chain):  # before all needs: those of equal sizes share the nodes
        shapes = [(sizes.nodes(value.shape), sizes.nodes(value.stride())) for value in values]
    for slot, (candidate, token) in enumerate(zip(candidates, token_inputs, strict=True)):
        first, last = spans[slot]
        placeholder, value, (size, stride) = candidate.placeholder, values[slot], shapes[slot]
        with graph.inserting_before(first):
            need = graph.call_function(ops.need, (chain, token, slot, size, stride, value.dtype))
        need.meta["val"] = value
        need.meta[SAVED_AS] = placeholder.meta["val"]
        placeholder.replace_all_uses_with(need)
        graph.erase_node(placeholder)
        with graph.inserting_after(last):
            graph.call_function(ops.done, (need, token, chain, slot)).meta["val"] = None


def _restrided(value: torch.Tensor, stride: tuple[Any, ...]) -> torch.Tensor:
    if tuple(value.stride()) == stride:
        return value
    assert isinstance(value, torch._subclasses.FakeTensor)
    with value.fake_mode:
        return value.new_empty_strided(value.shape, stride)


def _token_input(graph: fx.Graph, candidate: _Candidate, token: fx.Node) -> fx.Node:
    """A placeholder for the token, where that of the saved tensor is."""
    with graph.inserting_after(candidate.placeholder):
        node = graph.placeholder(token.name)
    node.meta["val"] = token.meta["val"]
    return node
