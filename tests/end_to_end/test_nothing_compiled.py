"""PyTorch compiles nothing of some models; users are told."""

import logging

import pytest
import torch
from torch import nn

from teraplan.nothing_compiled import warn_at_first_step


@pytest.mark.parametrize("in_use", [False, True])
def test_the_first_step_of_an_optimizer_tells(
    caplog: pytest.LogCaptureFixture, in_use: bool
) -> None:
    compiled: list[str] = []
    warn_at_first_step(lambda: bool(compiled))
    if in_use:
        compiled.append("a graph")
    weight = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    with caplog.at_level(logging.WARNING, logger="teraplan"):
        optimizer.step()
        assert ("no graph has been compiled" in caplog.text) is not in_use
        caplog.clear()
        optimizer.step()
        assert not caplog.text, "once is enough"
