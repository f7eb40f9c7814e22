"""Blocks with activation checkpoints are computed again one by one, whatever their last op is."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch._functorch import config
from torch.utils.checkpoint import checkpoint

from teraplan.values.graph_table import GraphTable
from tests.passes.instrumented import instrumented

_ROWS, _WIDTH = 64, 512
_NBYTES = _ROWS * _WIDTH * 4


def _normed(y: Tensor) -> Tensor:
    """One of three results of an op."""
    return torch.nn.functional.layer_norm(y, (_WIDTH,))


def _viewed(y: Tensor) -> Tensor:
    return (y * 2).view(_ROWS // 4, 4, _WIDTH).view(_ROWS, _WIDTH)


def _view_of_normed(y: Tensor) -> Tensor:
    return _normed(y).view(_ROWS // 4, 4, _WIDTH).view(_ROWS, _WIDTH)


def _by_itself(y: Tensor) -> Tensor:
    return y * 2


def _blocks(last: Callable[[Tensor], Tensor], num: int, *, fused: bool) -> GraphTable:
    def block(x: Tensor, weight: Tensor) -> Tensor:
        y = x
        for _ in range(4):
            y = torch.tanh(y @ weight)
        return last(x + y)

    def function(x: Tensor, *weights: Tensor) -> Tensor:
        for weight in weights:
            x = checkpoint(block, x, weight, use_reentrant=False)
        return x.sum()

    weights = [torch.randn(_WIDTH, _WIDTH, requires_grad=True) for _ in range(num)]
    _, _, table = instrumented(function, torch.randn(_ROWS, _WIDTH), *weights, fused=fused)
    return table


CASES = [
    (_normed, False),
    (_viewed, True),
    *(
        pytest.param(last, fused, marks=pytest.mark.slow)
        for last, fused in (
            *((_normed, True), (_viewed, False), (_view_of_normed, False), (_view_of_normed, True)),
            *((_by_itself, False), (_by_itself, True)),
        )
    ),
]


@pytest.mark.slow
@pytest.mark.parametrize(("last", "fused"), CASES)
def test_what_lies_between_blocks_is_saved(last: Callable[[Tensor], Tensor], fused: bool) -> None:
    few, many = _blocks(last, 3, fused=fused), _blocks(last, 5, fused=fused)
    saved = [slot for slot in many.slots if not slot.given and slot.nbytes == _NBYTES]
    assert len(saved) == 4
    of_weights = 2 * _WIDTH * _WIDTH * 4
    assert many.backward.least_bytes == few.backward.least_bytes + of_weights, (
        "no more than one block is computed again at once"
    )


@pytest.mark.slow
@pytest.mark.parametrize("budget", [0.5, 1.0])
def test_a_budget_of_torch_itself_chooses(budget: float) -> None:
    def function(x: Tensor, *weights: Tensor) -> Tensor:
        for weight in weights:
            x = checkpoint(lambda x, w: _normed(torch.tanh(x @ w)), x, weight, use_reentrant=False)
        return x.sum()

    weights = [torch.randn(_WIDTH, _WIDTH, requires_grad=True) for _ in range(3)]
    with config.patch(activation_memory_budget=budget):
        _, _, table = instrumented(function, torch.randn(_ROWS, _WIDTH), *weights)
    assert table.slots
