"""How saved activations can be computed again from other ones, bit for bit.

    forward                              recipe of gelu's result
    h = addmm(...)      saved, slot 4    inputs   slot 4
    t = erf(h * 0.7)                     program  ["aten.mul.Tensor", h, 0.7], ["aten.erf", ...]
    g = h * 0.5 * (t + 1)  slot 5

A recipe holds pointwise arithmetic, casts and views alone. Each element of the result then comes
from the same few operations on the same values in whatever kernel they run. Products, reductions,
attention, random numbers and collectives have no recipes: their bits depend on the order in which a
kernel adds, or on what no graph says. Inputs of a recipe are saved activations that have migration
ops, parameters and buffers, and saved tensors that are too small to move.

What follows from a graph is not the last word: every recipe is tried while steps are measured, and
one that has given another bit than the forward is not used.
"""

import json
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.passes.fake_tensor_prop import FakeTensorProp

from teraplan.passes.aliases import base_of
from teraplan.passes.masked_tails import compile_kernels
from teraplan.passes.targets import packet_of
from teraplan.passes.workspace import nbytes_of, workspace_nbytes
from teraplan.values.graph_table import MIN_SLOT_BYTES, Recipe

_EXACT = frozenset(
    [
        "abs",
        "add",
        "bitwise_and",
        "bitwise_not",
        "bitwise_or",
        "ceil",
        "clamp",
        "clamp_max",
        "clamp_min",
        "div",
        "eq",
        "floor",
        "ge",
        "gt",
        "hardtanh",
        "le",
        "logical_and",
        "logical_not",
        "logical_or",
        "lt",
        "maximum",
        "minimum",
        "mul",
        "ne",
        "neg",
        "reciprocal",
        "relu",
        "rsub",
        "sign",
        "sqrt",
        "sub",
        "threshold",
        "where",
        "convert_element_type",
    ]
)
"""Each element is one correctly rounded operation, or none: equal in every kernel."""
_ROUNDED = frozenset(
    [
        "cos",
        "cosh",
        "elu",
        "erf",
        "exp",
        "expm1",
        "gelu",
        "hardswish",
        "leaky_relu",
        "log",
        "log1p",
        "mish",
        "pow",
        "rsqrt",
        "sigmoid",
        "silu",
        "sin",
        "sinh",
        "softplus",
        "tanh",
    ]
)
"""Equal where a kernel computes in vectors throughout: at a loop's ragged end some compilers call
another implementation."""
_MOVES = frozenset(
    [
        "_unsafe_view",
        "alias",
        "clone",
        "expand",
        "permute",
        "reshape",
        "squeeze",
        "t",
        "transpose",
        "unsqueeze",
        "view",
    ]
)
_VECTORS_BYTES, _VECTOR_ELEMENTS = 128, 64
"""PyTorch's loops take two vectors at once, of 64 bytes at most. No vector has more elements."""
_MAX_STEPS = 24
"""Inductor computes so many operations in one kernel, without intermediates in memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundRecipe:
    """A recipe, and what the forward has to hand over for it."""

    recipe: Recipe
    beside: tuple[fx.Node, ...]
    """Inputs that are no slots, in order, after those that are."""


class _RefusedError(Exception):
    """This tensor has no recipe."""


def find_recipes(
    forward: fx.Graph,
    slots: Mapping[fx.Node, int],
    *,
    num_outputs: int,
    static: Set[fx.Node],
) -> dict[fx.Node, FoundRecipe]:
    """The recipes of those of `slots` (saved nodes and their numbers) that have one."""
    results = cast("Sequence[fx.Node | None]", forward.output_node().args[0])
    outputs = {base_of(n) for n in results[:num_outputs] if isinstance(n, fx.Node)}
    kept = {n for n in results[num_outputs:] if isinstance(n, fx.Node)}
    small = {n for n in static | (kept - set(slots)) if nbytes_of(n) < MIN_SLOT_BYTES}
    lent = {n for n in small if base_of(n) not in outputs and not _is_overwritten(n)}
    bases = [base_of(node) for node in slots]
    order = {node: i for i, node in enumerate(forward.nodes)}
    found: dict[fx.Node, FoundRecipe] = {}
    for node in slots:
        if base_of(node) in outputs or bases.count(base_of(node)) > 1:
            continue
        search = _Search(node, slots, lent)
        try:
            found[node] = search.found(order)
        except _RefusedError:
            continue
    return found


def _is_overwritten(node: fx.Node) -> bool:
    """True if the graph itself changes the memory, as a norm does with its running mean."""
    return any(
        user.target is torch.ops.aten.copy_.default and user.args[0] is base_of(node)
        for user in base_of(node).users
    )


@dataclass(slots=True)
class _Search:
    """Goes from a saved node back to what it can be computed from."""

    root: fx.Node
    slots: Mapping[fx.Node, int]
    lent: Set[fx.Node]
    steps: set[fx.Node] = field(default_factory=set[fx.Node])
    sources: set[fx.Node] = field(default_factory=set[fx.Node])
    beside: set[fx.Node] = field(default_factory=set[fx.Node])

    def found(self, order: Mapping[fx.Node, int]) -> FoundRecipe:
        self._visit(self.root)
        if not self.sources or base_of(self.root) in map(base_of, self.sources):
            raise _RefusedError
        _require_full_vectors(self.root, self.steps)
        sources = sorted(self.sources, key=order.__getitem__)
        beside = sorted(self.beside, key=order.__getitem__)
        steps = sorted(self.steps, key=order.__getitem__)
        return FoundRecipe(
            recipe=Recipe(
                sources=tuple(self.slots[node] for node in sources),
                program=_encode([*sources, *beside], steps),
            ),
            beside=tuple(beside),
        )

    def _visit(self, node: fx.Node) -> None:
        if node in self.steps:
            return
        if node is not self.root and node in self.slots:
            self.sources.add(node)
        elif node in self.lent:
            self.beside.add(node)
        elif _is_allowed(node) and len(self.steps) < _MAX_STEPS:
            self.steps.add(node)
            for argument in node.all_input_nodes:
                self._visit(argument)
        else:
            raise _RefusedError


def _name(node: fx.Node) -> str:
    packet = packet_of(node)
    return packet.__name__ if packet is not None else ""


def _is_allowed(node: fx.Node) -> bool:
    if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
        return False
    if node.target.namespace not in ("aten", "prims"):
        return False
    return _name(node) in _EXACT | _ROUNDED | _MOVES


def _require_full_vectors(root: fx.Node, steps: Set[fx.Node]) -> None:
    """Refuse rounded operations where a loop over the elements could have a ragged end."""
    if not any(_name(node) in _ROUNDED for node in steps):
        return
    values: list[Any] = [node.meta["val"] for node in (root, *steps)]
    smallest = min(value.element_size() for value in values)
    num = min(_VECTOR_ELEMENTS, _VECTORS_BYTES // smallest)
    for value in values:
        lengths = [n for n, step in zip(value.shape, value.stride(), strict=True) if step == 1]
        if not any(isinstance(n, int) and n % num == 0 for n in lengths):
            raise _RefusedError


# -- programs as text --------------------------------------------------------------------------


def _encode(inputs: Sequence[fx.Node], steps: Sequence[fx.Node]) -> str:
    numbers = {node: i for i, node in enumerate((*inputs, *steps))}

    def argument(value: object) -> object:
        if isinstance(value, fx.Node):
            return {"value": numbers[value]}
        if isinstance(value, torch.dtype):
            return {"dtype": str(value).removeprefix("torch.")}
        if isinstance(value, torch.memory_format):
            return {"memory_format": str(value).removeprefix("torch.")}
        if isinstance(value, (list, tuple)):
            return [argument(item) for item in cast("Sequence[object]", value)]
        if value is None or isinstance(value, (bool, int, float, str)):
            return value
        raise _RefusedError

    return json.dumps(
        {
            "inputs": [_layout(node) for node in inputs],
            "steps": [
                [
                    str(node.target),
                    [argument(value) for value in node.args],
                    {name: argument(value) for name, value in sorted(node.kwargs.items())},
                ]
                for node in steps
            ],
            "result": _layout(steps[-1]),
        },
        separators=(",", ":"),
        sort_keys=True,
    )


def _layout(node: fx.Node) -> list[object]:
    """Sizes, strides, type and device of a node's tensor, which must not vary."""
    value = node.meta["val"]
    numbers = [*value.shape, *value.stride()]
    if not all(isinstance(number, int) for number in numbers):
        raise _RefusedError
    dtype = str(value.dtype).removeprefix("torch.")
    return [list(value.shape), list(value.stride()), dtype, str(value.device)]


@dataclass(frozen=True, slots=True, kw_only=True)
class CompiledRecipe:
    """A recipe that can be followed."""

    run: Callable[[Sequence[torch.Tensor], torch.Tensor], None]
    """Computes from the inputs into a tensor of `result_layout`."""
    input_layouts: tuple[tuple[tuple[int, ...], tuple[int, ...], torch.dtype], ...]
    result_layout: tuple[tuple[int, ...], tuple[int, ...], torch.dtype]
    temporary_bytes: int
    """Memory that it takes beside inputs and result."""


def compile_recipe(program: str, *, fused: bool) -> CompiledRecipe:
    """What `program` describes, as one kernel of Inductor's or by PyTorch's own kernels."""
    data = json.loads(program)
    module = _decode(data)
    fake_mode = FakeTensorMode()
    with fake_mode:
        inputs = [_empty(layout) for layout in (*data["inputs"], data["result"])]
    FakeTensorProp(module, fake_mode).propagate_dont_convert_inputs(*inputs)
    copied = module.graph.output_node().prev
    if fused:
        compiled: Any = compile_kernels(module, inputs)

        def run(values: Sequence[torch.Tensor], result: torch.Tensor) -> None:
            compiled([*values, result])
    else:

        def run(values: Sequence[torch.Tensor], result: torch.Tensor) -> None:
            module(*values, result)

    return CompiledRecipe(
        run=run,
        input_layouts=tuple(_parsed(layout) for layout in data["inputs"]),
        result_layout=_parsed(data["result"]),
        temporary_bytes=0 if fused else workspace_nbytes(module.graph, {copied}),
    )


def _parsed(layout: Sequence[Any]) -> tuple[tuple[int, ...], tuple[int, ...], torch.dtype]:
    shape, stride, dtype, _ = layout
    return tuple(shape), tuple(stride), getattr(torch, dtype)


def _empty(layout: Sequence[Any]) -> torch.Tensor:
    shape, stride, dtype, device = layout
    return torch.empty_strided(shape, stride, dtype=getattr(torch, dtype), device=device)


def _decode(data: dict[str, Any]) -> fx.GraphModule:
    """A module of the program's inputs and a tensor that takes its result."""
    graph = fx.Graph()
    values = [graph.placeholder(f"input_{i}") for i in range(len(data["inputs"]))]
    result = graph.placeholder("result")

    def argument(value: Any) -> Any:
        if isinstance(value, list):
            return [argument(item) for item in cast("list[object]", value)]
        if isinstance(value, dict):
            ((kind, what),) = cast("dict[str, Any]", value).items()
            return values[what] if kind == "value" else getattr(torch, what)
        return value

    for target, args, kwargs in data["steps"]:
        namespace, name, overload = target.split(".")
        op = getattr(getattr(getattr(torch.ops, namespace), name), overload)
        made = {name: argument(value) for name, value in kwargs.items()}
        values.append(graph.call_function(op, tuple(argument(value) for value in args), made))
    graph.call_function(torch.ops.aten.copy_.default, (result, values[-1]))
    graph.output(())
    return fx.GraphModule({}, graph)
