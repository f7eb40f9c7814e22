"""Bytes of a graph's tensors as polynomials in the sizes that vary from call to call."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import sympy
import torch
from torch import fx

from teraplan.values.graph_sizes import Monomial, Polynomial


class SizePolynomials:
    """Of a forward graph and its backward, in sizes that follow from the forward's inputs."""

    def __init__(
        self, values: Mapping[Any, int], can_compute: Callable[[Any], bool] = lambda _: True
    ) -> None:
        """Polynomials without a size yet.

        Args:
            values: of the sizes that the forward is given, when it was traced.
            can_compute: of an expression of these, whether the forward can be given it.
        """
        self._values, self._can_compute = values, can_compute
        self.sizes: dict[sympy.Expr, int] = {}
        """Number of each size, or expression of some, that polynomials are in."""
        self.all_known = True
        """Each size that was met follows from the forward's inputs; others count as traced."""
        self.any_of_values = False
        """One of the others follows from values: nothing is known of it, and it counts as 1."""
        self._factors: dict[sympy.Expr, Polynomial] = {}

    @property
    def traced(self) -> tuple[int, ...]:
        """What the sizes were when the graph was traced."""
        return tuple(self._traced(size) for size in self.sizes)

    def nbytes_of(self, node: fx.Node) -> Polynomial:
        """Of the node's tensor; () if it is no tensor. Of a sparse one, of what it is made of."""
        value = node.meta.get("val")
        if not isinstance(value, torch.Tensor):
            return ()
        if value.layout is not torch.strided:
            return total(map(self.nbytes_of, node.all_input_nodes))
        fixed, varying = value.dtype.itemsize, sympy.Integer(1)
        shape: Iterable[Any] = value.shape
        for size in shape:
            if not isinstance(size, torch.SymInt):
                fixed *= size
            elif self._is_known(size.node.expr):
                varying *= size.node.expr
            else:
                hint = size.node.hint
                self.all_known = False
                self.any_of_values |= hint is None
                fixed *= int(hint) if hint is not None else 1
        if varying not in self._factors:
            self._factors[varying] = self.polynomial(varying)
        return tuple((fixed * c, m) for c, m in self._factors[varying] if fixed)

    def _is_known(self, expr: sympy.Expr) -> bool:
        known = all(symbol in self._values for symbol in expr.free_symbols)
        return known and self._can_compute(expr)

    def polynomial(self, expr: sympy.Expr) -> Polynomial:
        """An expression of sizes that are known."""
        if expr.is_Integer:
            return ((int(expr), ()),)
        terms = sympy.Poly(expr)
        whole = all(c.is_Integer for c in terms.coeffs()) and all(g.is_integer for g in terms.gens)
        if not whole:  # a quotient, say
            return ((1, ((self._number(expr), 1),)),)
        numbers = [self._number(size) for size in terms.gens]
        return tuple(
            (
                int(coefficient),
                tuple(sorted((n, p) for n, p in zip(numbers, powers, strict=True) if p)),
            )
            for powers, coefficient in terms.terms()
        )

    def _number(self, size: sympy.Expr) -> int:
        return self.sizes.setdefault(size, len(self.sizes))

    def _traced(self, size: sympy.Expr) -> int:
        return int(size.subs(dict(self._values)))


def total(polynomials: Iterable[Polynomial]) -> Polynomial:
    """Their sum."""
    found: dict[Monomial, int] = {}
    for coefficient, monomial in (term for polynomial in polynomials for term in polynomial):
        found[monomial] = found.get(monomial, 0) + coefficient
    return tuple((c, m) for m, c in sorted(found.items()) if c)


def peaks(spans: Sequence[tuple[int, int, Polynomial]]) -> tuple[Polynomial, ...]:
    """The sums of what is there at once, but for those that are less at any sizes.

    Args:
        spans: first and last position of each, and its bytes.
    """
    monomials = sorted({monomial for *_, nbytes in spans for _, monomial in nbytes})
    column = {monomial: i for i, monomial in enumerate(monomials)}
    positions = sorted({p for start, end, _ in spans for p in (start, end + 1)})
    row = {position: i for i, position in enumerate(positions)}
    changes = np.zeros((len(positions), len(monomials)), dtype=np.int64)
    for start, end, nbytes in spans:
        for coefficient, monomial in nbytes:
            changes[row[start], column[monomial]] += coefficient
            changes[row[end + 1], column[monomial]] -= coefficient
    at_once = np.unique(changes.cumsum(axis=0), axis=0)
    kept = np.empty((0, len(monomials)), dtype=np.int64)
    for candidate in at_once[np.argsort(-at_once.sum(axis=1), kind="stable")]:
        if not (kept >= candidate).all(axis=1).any():
            kept = np.vstack((kept, candidate))
    return tuple(
        tuple((int(c), m) for c, m in zip(candidate, monomials, strict=True) if c)
        for candidate in kept
    )
