"""Sizes of dynamic shapes as nodes of the backward graph."""

from collections.abc import Iterable
from typing import Any

import sympy
import torch
from torch import fx
from torch.fx.proxy import GraphAppendingTracer
from torch.utils._sympy.interp import sympy_interp
from torch.utils._sympy.reference import PythonReferenceAnalysis


class UnknownSymbolError(Exception):
    """A size depends on a symbol that the backward graph is not given."""


class SizeNodes:
    """Makes nodes for symbolic sizes in one graph, out of its SymInt placeholders."""

    def __init__(self, graph: fx.Graph) -> None:
        self._graph = graph
        self._tracer = GraphAppendingTracer(graph)
        self._symbols: dict[sympy.Expr, fx.Node] = {}
        self._computable: dict[sympy.Expr, bool] = {}
        for node in graph.nodes:
            value = node.meta.get("val")
            if node.op == "placeholder" and isinstance(value, torch.SymInt):
                self._symbols[value.node.expr] = node

    def nodes(self, sizes: Iterable[Any]) -> list[Any]:
        """Each size as an int or a node, inserted at the graph's current insertion point.

        Raises:
            UnknownSymbolError: if a size cannot be had from the placeholders.
        """
        return [self._node(size) for size in sizes]

    def values(self) -> dict[sympy.Expr, int]:
        """What the placeholders were when the graph was traced, as far as that is known."""
        hints = ((expr, node.meta["val"].node.hint) for expr, node in self._symbols.items())
        return {expr: hint for expr, hint in hints if isinstance(hint, int)}

    def expressions(self, found: Iterable[sympy.Expr]) -> list[Any]:
        """Each expression of placeholders as an int or a node, inserted as `nodes` does."""
        return [self._expression(expr) for expr in found]

    def check(self, sizes: Iterable[Any]) -> None:
        """Raise UnknownSymbolError if `nodes` would; inserts nothing."""
        for size in sizes:
            if not isinstance(size, torch.SymInt):
                continue
            expr = size.node.expr
            missing = expr.free_symbols - set(self._symbols)
            if missing and expr not in self._symbols:
                raise UnknownSymbolError(", ".join(sorted(map(str, missing))))
            if not self.can_compute(expr):
                raise UnknownSymbolError(str(expr))

    def can_compute(self, expr: Any) -> bool:
        """True if a graph has operations for an expression of placeholders: none has for some that
        go through numbers that are not whole (`int(size * 0.7)`)."""
        if expr in self._symbols or not expr.args:
            return True
        if expr not in self._computable:
            trial = fx.Graph()
            for symbol in expr.free_symbols:
                node = self._symbols[symbol]
                trial.placeholder(node.name).meta["val"] = node.meta["val"]
            try:
                SizeNodes(trial)._expression(expr)
            except Exception:  # noqa: BLE001 of no one kind: these are functions of torch's
                self._computable[expr] = False
            else:
                self._computable[expr] = True
        return self._computable[expr]

    def _node(self, size: Any) -> Any:
        return self._expression(size.node.expr) if isinstance(size, torch.SymInt) else size

    def _expression(self, expr: Any) -> Any:
        if expr.is_Integer:
            return int(expr)
        if expr in self._symbols:
            return self._symbols[expr]
        before = set(self._graph.nodes)
        bound = {s: fx.Proxy(self._symbols[s], self._tracer) for s in expr.free_symbols}
        result = sympy_interp(PythonReferenceAnalysis, bound, expr)
        for node in self._graph.nodes:
            if node not in before:
                node.meta["val"] = _evaluate(node)
        self._symbols[expr] = result.node
        return result.node


def _evaluate(node: fx.Node) -> Any:
    """The symbolic value of an arithmetic node from those of its arguments."""
    arguments = [a.meta["val"] if isinstance(a, fx.Node) else a for a in node.args]
    target = node.target
    assert callable(target), f"{node.name}: sizes are computed by function calls only"
    return target(*arguments)
