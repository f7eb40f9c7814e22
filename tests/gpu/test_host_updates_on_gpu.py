"""Updates on the host's cores beside a GPU. Written without one at hand: not run yet."""

import gc
from collections.abc import Callable, Iterable
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn

import teraplan
from bench.models import gpt
from teraplan.values.status import Status
from tests.end_to_end.training import UNLIMITED

pytestmark = [pytest.mark.gpu, pytest.mark.slow]

GPT = gpt.GPTConfig(num_layers=4, width=512, num_heads=8, context=256)
OPTIMIZERS: dict[str, Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]] = {
    "AdamW": lambda p: torch.optim.AdamW(p, lr=1e-4),
    "AdamW fused": lambda p: torch.optim.AdamW(p, lr=1e-4, fused=True),
    "SGD": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-3),
}


class Trained(NamedTuple):
    """After four steps."""

    parameters: list[Tensor]
    optimizer: torch.optim.Optimizer
    nbytes: int
    """What tensors have of the device more than before."""
    status: Status

    @property
    def devices(self) -> set[str]:
        """On which the optimizer's state is."""
        states = self.optimizer.state.values()
        return {v.device.type for state in states for v in state.values() if v.ndim}


def tensor_nbytes() -> int:
    """On the device; the allocator's blocks are a little larger."""
    torch.cuda.synchronize()
    gc.collect()
    return int(torch.cuda.memory_stats().get("requested_bytes.all.current", 0))


def trained(name: str, *, clip: bool = True, **options: object) -> Trained:
    torch._dynamo.reset()
    before = tensor_nbytes()
    torch.manual_seed(7)
    model = gpt.build(GPT).cuda()
    model.compile(
        backend="teraplan",
        options={"device_budget": UNLIMITED, "host_budget": "4GiB", **options},
    )
    optimizer = OPTIMIZERS[name](model.parameters())
    for step in range(4):
        loss = model(*(tensor.cuda() for tensor in gpt.batch(GPT, 8, step)))
        loss.backward()
        if clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    nbytes, status = tensor_nbytes() - before, teraplan.status()
    return Trained([p.detach().cpu() for p in model.parameters()], optimizer, nbytes, status)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_updates_on_the_host_are_those_of_the_device_within_rounding(name: str) -> None:
    expected = trained(name).parameters
    found = trained(name, host_updates=0.5)
    torch.testing.assert_close(found.parameters, expected, rtol=1e-4, atol=1e-5)
    assert found.status.host_updates > 0
    assert found.devices == {"cpu", "cuda"}


def test_gradients_are_on_the_host_before_the_step_begins() -> None:
    expected = trained("AdamW", clip=False).parameters
    found = trained("AdamW", clip=False, host_updates=0.5)
    torch.testing.assert_close(found.parameters, expected, rtol=1e-4, atol=1e-5)
    assert found.status.host_gradients_sent_early == found.status.host_updates > 0


def test_state_leaves_the_device() -> None:
    everything = trained("AdamW").nbytes
    found = trained("AdamW", host_updates=1.0)
    left = found.status.host_state_bytes
    assert left > 0
    assert everything - found.nbytes == pytest.approx(left, rel=0.05)
    teraplan.detach(found.optimizer)
    found.optimizer.step()
    assert found.devices == {"cuda"}
