"""The modules that Inductor has generated: where they are, and what they are called with.

What is read here stands in each of them (torch 2.13):

    def call(self, args):
        primals_1, primals_2, token_view = args
        s77 = primals_1
        assert_size_stride(primals_2, (s77, 64), (64, 1), 'input')
        ...
    def get_args():
        primals_1 = 8
        _shared_storage_0 = rand_strided((96,), (1,), device='cpu', dtype=torch.float32)
        primals_2 = rand_strided((8, 64), (64, 1), device='cpu', dtype=torch.float32)
        primals_3 = torch.as_strided(_shared_storage_0, (8, 4), (12, 1))
        ...

Where some of it is missing the code is one that is not known here.
"""

import ast
import contextlib
import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

import torch
from torch._inductor.codecache import PyCodeCache

_KNOWN = {"math": math, "torch": torch}
"""What expressions of sizes may name beside sizes."""
_MOST_KEPT = 64
"""So many modules that have been read are remembered."""


@dataclass(frozen=True, slots=True)
class SharedMemory:
    """What several inputs are views of."""

    name: str
    nbytes: int


@dataclass(frozen=True, slots=True)
class TensorInput:
    """A tensor that generated code is called with."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: str
    shared: SharedMemory | None = None
    """None: its memory is its own."""

    @property
    def nbytes(self) -> int:
        """Of its elements."""
        return math.prod(self.size) * self.dtype.itemsize


@dataclass(frozen=True, slots=True, eq=False)
class GeneratedCode:
    """One module, which computes a forward or a backward."""

    module: ModuleType
    call: FunctionType
    """What computes; its last argument is the list of inputs."""
    inputs: tuple[str, ...]
    """Their names."""
    traced: Mapping[str, TensorInput | int]
    """What they were when the code was generated, as far as it says."""
    sizes: Mapping[str, str]
    """Names of the inputs that are sizes, by the names that these have in the code."""
    layouts: tuple[tuple[str, CodeType, CodeType], ...]
    """Of inputs, the expressions of size and stride."""
    given_sizes: tuple[tuple[str, CodeType], ...]
    """What `enter` is given, with the name where it is one of `sizes`."""

    def values(self, sizes: Mapping[str, int]) -> dict[str, TensorInput | int | None]:
        """What it is called with where sizes are so; else as they were when it was generated."""
        symbols = {**self._traced_sizes(), **sizes}
        found: dict[str, TensorInput | int | None] = dict(self.traced)
        found |= {given: symbols[name] for name, given in self.sizes.items()}
        for name, size, stride in self.layouts:
            like = found.get(name)
            if isinstance(like, TensorInput):
                with contextlib.suppress(NameError):  # a size that follows from values
                    shape = {"size": _value(size, symbols), "stride": _value(stride, symbols)}
                    found[name] = replace(like, **shape)
        return {name: found.get(name) for name in self.inputs}

    def named_sizes(self, values: Sequence[int]) -> dict[str, int]:
        """What the sizes are, by their names, where `enter` is given these values.

        Raises:
            LookupError: they follow from others that it is not given.
        """
        found = self._traced_sizes()
        pairs = list(zip(self.given_sizes, values, strict=True))
        found |= {name: value for (name, _), value in pairs if name in self.sizes}
        if any(_value(size, found) != value for (_, size), value in pairs):
            raise LookupError("sizes follow from others that are not given")
        return found

    def _traced_sizes(self) -> dict[str, Any]:
        return {name: self.traced[given] for name, given in self.sizes.items()}


def code_with(constant: str) -> GeneratedCode | None:
    """The code that was loaded last in which this text stands; None: it is in none.

    Raises:
        LookupError: it is not as expected.
    """
    for module in reversed(PyCodeCache.modules):
        call = _call_of(module)
        if call is not None and constant in call.__code__.co_consts:
            return _read(module, call)
    return None


def _call_of(module: ModuleType) -> FunctionType | None:
    call = getattr(module, "call", None)
    function = getattr(call, "__func__", call)  # a method of what has the parts of the graph
    return function if isinstance(function, FunctionType) else None


@functools.lru_cache(maxsize=_MOST_KEPT)
def _read(module: ModuleType, call: FunctionType) -> GeneratedCode:
    if module.__file__ is None:
        raise LookupError("it is in no file")
    tree = ast.parse(Path(module.__file__).read_text("utf-8"))
    body, example = _function(tree, "call"), _function(tree, "get_args")
    inputs, sizes = _inputs(body)
    return GeneratedCode(
        module=module,
        call=call,
        inputs=inputs,
        traced=_traced(example, sizes),
        sizes=sizes,
        layouts=tuple(_layouts(body, inputs)),
        given_sizes=tuple(_given_sizes(body)),
    )


def _inputs(body: ast.FunctionDef) -> tuple[tuple[str, ...], dict[str, str]]:
    inputs: tuple[str, ...] = ()
    sizes: dict[str, str] = {}
    for target, value in _assignments(body):
        if isinstance(value, ast.Name) and value.id == "args" and isinstance(target, ast.Tuple):
            inputs = tuple(map(_name, target.elts))
        elif isinstance(value, ast.Name) and value.id in inputs and not sizes.get(_name(target)):
            sizes[_name(target)] = value.id
    return inputs, sizes


def _traced(example: ast.FunctionDef, sizes: Mapping[str, str]) -> Mapping[str, TensorInput | int]:
    made = {_name(target): value for target, value in _assignments(example)}
    numbers = {
        name: value.value
        for name, value in made.items()
        if isinstance(value, ast.Constant) and isinstance(value.value, int)
    }
    symbols = {name: numbers[given] for name, given in sizes.items() if given in numbers}

    def shape(args: Sequence[ast.expr]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        size, stride = (_value(_compiled(arg), symbols) for arg in args)
        return size, stride

    tensors: dict[str, TensorInput] = {}
    for name, value in made.items():
        if not isinstance(value, ast.Call):
            continue
        if _name(value.func) == "rand_strided":
            given = {keyword.arg: keyword.value for keyword in value.keywords}
            dtype = getattr(torch, _attribute(given["dtype"]))
            device = ast.literal_eval(given["device"])
            tensors[name] = TensorInput(*shape(value.args), dtype, device)
        elif _attribute(value.func) == "as_strided":
            whole = tensors[_name(value.args[0])]
            memory = SharedMemory(_name(value.args[0]), whole.nbytes)
            size, stride = shape(value.args[1:3])
            tensors[name] = replace(whole, size=size, stride=stride, shared=memory)
    return {**numbers, **tensors}


def _layouts(
    body: ast.FunctionDef, inputs: Sequence[str]
) -> Iterator[tuple[str, CodeType, CodeType]]:
    for node in ast.walk(body):
        if isinstance(node, ast.Call) and _name(node.func) == "assert_size_stride":
            tensor, size, stride = node.args[:3]
            if _name(tensor) in inputs:
                yield _name(tensor), _compiled(size), _compiled(stride)


def _given_sizes(body: ast.FunctionDef) -> Iterator[tuple[str, CodeType]]:
    for node in ast.walk(body):
        if isinstance(node, ast.Call) and _attribute(node.func) == "enter":
            sizes = node.args[-1]
            if isinstance(sizes, ast.List):
                yield from ((_name(size), _compiled(size)) for size in sizes.elts)


def _assignments(body: ast.FunctionDef) -> Iterator[tuple[ast.expr, ast.expr]]:
    for node in body.body:
        if isinstance(node, ast.Assign) and len(node.targets) == 1:
            yield node.targets[0], node.value


def _function(tree: ast.Module, name: str) -> ast.FunctionDef:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and node.name == name:
            return node
    raise LookupError(f"it has no {name}")


def _value(expression: CodeType, symbols: Mapping[str, Any]) -> Any:  # noqa: ANN401
    return eval(expression, dict(_KNOWN), symbols)


def _compiled(expression: ast.expr) -> CodeType:
    return compile(ast.Expression(expression), "<size>", "eval")


def _name(node: ast.expr) -> str:
    return node.id if isinstance(node, ast.Name) else ""


def _attribute(node: ast.expr) -> str:
    return node.attr if isinstance(node, ast.Attribute) else ""
