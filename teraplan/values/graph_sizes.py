"""What a graph takes at the sizes of one call, where these vary from call to call.

Bytes are polynomials in sizes: of a batch of `s0` sequences of `s1` tokens, activations take
`c * s0 * s1`, scores of attention `c * s0 * s1 ** 2`.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

Monomial = tuple[tuple[int, int], ...]
"""Number and power of each size that is multiplied, in order; () is 1."""
Polynomial = tuple[tuple[int, Monomial], ...]
"""Coefficients, and what each is multiplied by."""


def value_at(polynomial: Polynomial, sizes: Sequence[int]) -> int:
    """The polynomial's value."""
    return sum(
        coefficient * math.prod(sizes[size] ** power for size, power in monomial)
        for coefficient, monomial in polynomial
    )


def most_at(polynomials: Sequence[Polynomial], sizes: Sequence[int]) -> int:
    """The most of them; 0 of none."""
    return max((value_at(polynomial, sizes) for polynomial in polynomials), default=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryOfSizes:
    """What one graph takes at once; the most of several polynomials counts."""

    workspace: tuple[Polynomial, ...]
    least: tuple[Polynomial, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphSizes:
    """What a forward graph and its backward take, in bytes."""

    slots: tuple[Polynomial, ...]
    forward: MemoryOfSizes
    backward: MemoryOfSizes
    backward_of_moving: MemoryOfSizes

    @classmethod
    def from_data(cls, data: dict[str, Any]) -> "GraphSizes":
        """What `dataclasses.asdict` made, read from JSON."""
        graphs = {
            name: MemoryOfSizes(**{key: _tuples(value) for key, value in memory.items()})
            for name, memory in data.items()
            if name != "slots"
        }
        return cls(slots=_tuples(data["slots"]), **graphs)


def _tuples(value: Any) -> Any:  # noqa: ANN401
    return tuple(map(_tuples, value)) if isinstance(value, list) else value
