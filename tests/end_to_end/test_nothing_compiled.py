"""PyTorch compiles nothing of some models; users are told."""

import logging
import subprocess
import sys

import pytest
import torch
from torch import nn

from teraplan.dynamo_entry import warn_at_first_step


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


def test_a_closure_is_given_the_chance_to_compile(caplog: pytest.LogCaptureFixture) -> None:
    """Its forward is within the optimizer's step, and so after the hooks of the first one."""
    compiled: list[str] = []
    warn_at_first_step(lambda: bool(compiled))
    weight = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=0.1)

    def closure() -> float:
        return 0.0

    with caplog.at_level(logging.WARNING, logger="teraplan"):
        optimizer.step(closure)
        assert not caplog.text
        optimizer.step(closure)
        assert "no graph has been compiled" in caplog.text


@pytest.mark.slow
def test_only_for_our_backend_and_only_where_nothing_is_compiled() -> None:
    """In a process that has imported teraplan for its status."""
    code = """
import torch, teraplan
from teraplan import backend
class Own(torch.nn.Linear):
    def forward(self, x):
        return super().forward(x).tanh()
model = MODEL(2, 2)
model.compile(backend=BACKEND, options=OPTIONS)
optimizer = torch.optim.SGD(model.parameters())
model(torch.ones(1, 2)).sum().backward()
optimizer.step()
"""
    ours = '{"kernels": "aot_eager"}'
    for backend, options, model, told in (
        ("eager", "None", "torch.nn.Linear", False),
        ("teraplan", ours, "torch.nn.Linear", True),
        ("teraplan", ours, "Own", False),  # it saves nothing that could move
    ):
        lines = code.replace("BACKEND", repr(backend)).replace("OPTIONS", options)
        command = [sys.executable, "-c", lines.replace("MODEL", model)]
        found = subprocess.run(command, capture_output=True, text=True, check=True)
        assert ("no graph has been compiled" in found.stderr) is told, found.stderr
