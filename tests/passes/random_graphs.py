"""Random programs of tensor operations, each given by its seed."""

import random
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

WIDTH = 144
"""A square of it in float32 is large enough to get migration ops."""

_IN_CI = (2, True), (3, False)
SLOW_CASES = [
    pytest.param(seed, ordered, marks=[] if (seed, ordered) in _IN_CI else pytest.mark.exhaustive)
    for seed in (0, *range(2, 14))
    for ordered in (True, False)
]
"""Seeds besides 1, with and without Inductor's own order of ops for the peak of memory."""

Program = Callable[..., Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class RandomProgram:
    """A function and the tensors that it is made for."""

    function: Program
    """Of `x` and all of `parameters`, to a scalar that shares memory with nothing."""
    x: Tensor
    parameters: list[Tensor]


def random_program(seed: int, *, least_ops: int = 12, most_ops: int = 20) -> RandomProgram:
    """A chain of products, sums, views and reductions that looks back a few steps."""
    choice = random.Random(seed)
    kinds = [choice.choice(("matrix", "vector", "full")) for _ in range(choice.randint(3, 5))]
    ops = []
    for index in range(1, 1 + choice.randint(least_ops, most_ops)):
        op = choice.choice(("use", "use", "both", "one", "one", "view", "reduce", "chunk"))
        left = choice.randrange(max(0, index - 3), index)
        right = choice.randrange(max(0, index - 4), index)
        ops.append((op, choice.randrange(len(kinds)), left, right, choice.randrange(3)))

    def function(x: Tensor, *parameters: Tensor) -> Tensor:
        values = [x]
        for op, which, left, right, variant in ops:
            a, b, p = values[left], values[right], parameters[which]
            values.append(_apply(op, kinds[which], a, b, p, variant))
        return (values[-1] + values[-2]).square().mean() + values[-3].sum() * 1e-3

    shapes = {"matrix": (WIDTH, WIDTH), "vector": (WIDTH,), "full": (WIDTH, WIDTH)}
    generator = torch.Generator().manual_seed(seed)
    return RandomProgram(
        function=function,
        x=torch.randn(WIDTH, WIDTH, generator=generator),
        parameters=[torch.randn(*shapes[kind], generator=generator) * 0.5 for kind in kinds],
    )


_UNARY = (torch.sin, torch.tanh, torch.sigmoid)


def _apply(op: str, kind: str, a: Tensor, b: Tensor, p: Tensor, variant: int) -> Tensor:
    if op == "use":
        if kind == "matrix":
            return (a @ p if variant else a @ p.t()) * 0.1
        return a * p if kind == "vector" else a + p.t() * 0.5
    if op == "both":
        return a + b * 0.5 if variant else a * torch.sigmoid(b)
    if op == "one":
        return _UNARY[variant](a)
    if op == "view":
        return a.t().contiguous() if variant else a.t() + 1
    if op == "chunk":
        first, second = a.chunk(2, dim=1)
        return torch.cat([torch.sin(second), torch.tanh(first)], dim=1)
    return a + a.sum(0, keepdim=True) * 0.01
