"""PyTorch compiles nothing of some models; users are told."""

import logging
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

import teraplan
from teraplan.dynamo_entry import warn_at_first_step
from teraplan.errors import FallbackRefusedError


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


@pytest.mark.parametrize("strict", [False, True])
def test_the_status_tells_too_and_strict_refuses(strict: bool) -> None:
    nets = [nn.Sequential(nn.Linear(2, 2)) for _ in range(2)]
    for net, options in zip(nets, ({"strict": strict}, {"strict": True}), strict=True):
        net.compile(backend="teraplan", options=options)
    warn_at_first_step(lambda: False)
    optimizer = torch.optim.SGD(nets[0].parameters(), lr=0.1)
    if strict:
        with pytest.raises(FallbackRefusedError, match="no graph has been compiled"):
            optimizer.step()
    else:
        optimizer.step()
    assert "no graph has been compiled" in str(teraplan.status().fallbacks)


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


def test_a_checkpoint_that_makes_the_state_of_an_optimizer_trains_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    warn_at_first_step(lambda: False)
    net = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(net.parameters())
    with caplog.at_level(logging.WARNING, logger="teraplan"):
        get_optimizer_state_dict(net, optimizer)
        assert optimizer.state
        assert not caplog.text
        optimizer.step()
        assert "no graph has been compiled" in caplog.text


def _loss(parameters: Mapping[str, torch.Tensor], net: nn.Module, x: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = torch.func.functional_call(net, dict(parameters), (x,))
    return result.square().mean()


@pytest.mark.slow
def test_gradients_taken_within_a_graph_are_told_of() -> None:
    """There is one graph then, from which nothing leaves."""
    net, x = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1)), torch.ones(4, 8)
    parameters = {name: p.detach() for name, p in net.named_parameters()}
    for strict in (False, True):
        options: dict[str, Any] = {"kernels": "aot_eager", "strict": strict}
        torch._dynamo.reset()
        call = torch.compile(torch.func.grad(_loss), backend="teraplan", options=options)
        if strict:
            with pytest.raises(FallbackRefusedError, match="gradients are taken within what"):
                call(parameters, net, x)
        else:
            call(parameters, net, x)
            assert "take the gradients outside" in str(teraplan.status().fallbacks)


def test_gradients_within_a_graph_that_is_trained_are_all_right() -> None:
    """A penalty on the gradient by the inputs: the graph has a backward all the same."""
    net, x = nn.Sequential(nn.Linear(64, 512), nn.Tanh(), nn.Linear(512, 1)), torch.ones(64, 64)

    def penalty(x: torch.Tensor) -> torch.Tensor:
        by_inputs: torch.Tensor = torch.func.grad(lambda v: net(v).sum())(x)
        return by_inputs.square().mean()

    torch._dynamo.reset()
    options: dict[str, Any] = {"kernels": "aot_eager", "device_budget": "1GiB", "strict": True}
    loss = torch.compile(penalty, backend="teraplan", options=options)(x)
    torch.autograd.backward(loss)
    assert teraplan.status().sites > 0


@pytest.mark.exhaustive
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


class Masked(nn.Module):
    """Sizes that depend on values: AOTAutograd cannot compile its backward."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.filling = nn.Linear(64, 64), nn.Parameter(torch.zeros(64))

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.layer(x)).clone()
        x[mask] = self.filling
        return x.square().mean()


def test_a_graph_that_pytorch_cannot_compile_is_told_of() -> None:
    """Dynamo runs it eagerly, beside graphs that are compiled."""
    torch.manual_seed(0)
    net, other = Masked(), nn.Linear(64, 64)
    options: dict[str, Any] = {"kernels": "aot_eager"}
    first = torch.compile(other, backend="teraplan", options=options)
    net.compile(backend="teraplan", options=options)
    x, mask = torch.randn(512, 64), torch.rand(512) < 0.2
    loss = net(first(x), mask)
    assert torch.equal(loss, Masked.forward(net, other(x), mask))
    told = teraplan.status().fallbacks[0]  # and once more for what Dynamo tries then
    assert "test_nothing_compiled.py" in told
    assert "(aten.nonzero.default)" in told
    assert "torch.where" in told
    torch._dynamo.reset()
    net.compile(backend="teraplan", options={**options, "strict": True})
    with pytest.raises(FallbackRefusedError, match=r"could not compile a graph of \d+ operations"):
        net(x, mask)
