"""Updates on the host's cores beside a GPU. Written without one at hand: not run yet."""

from collections.abc import Callable, Iterable

import pytest
import torch
from torch import Tensor, nn

import teraplan
from bench.models import gpt
from tests.end_to_end.training import UNLIMITED

pytestmark = [pytest.mark.gpu, pytest.mark.slow]

GPT = gpt.GPTConfig(num_layers=4, width=512, num_heads=8, context=256)
OPTIMIZERS: dict[str, Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]] = {
    "AdamW": lambda p: torch.optim.AdamW(p, lr=1e-4),
    "AdamW fused": lambda p: torch.optim.AdamW(p, lr=1e-4, fused=True),
    "SGD": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-3),
}


def trained(
    name: str, *, clip: bool = True, **options: object
) -> tuple[list[Tensor], torch.optim.Optimizer, int]:
    """Parameters after four steps, the optimizer, and the bytes allocated then."""
    torch._dynamo.reset()
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
    torch.cuda.synchronize()
    values = [p.detach().cpu() for p in model.parameters()]
    return values, optimizer, torch.cuda.memory_allocated()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_updates_on_the_host_are_those_of_the_device_within_rounding(name: str) -> None:
    expected, _, _ = trained(name)
    found, optimizer, _ = trained(name, host_updates=0.5)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    assert teraplan.status().host_updates > 0
    devices = {v.device.type for s in optimizer.state.values() for v in s.values() if v.ndim}
    assert devices == {"cpu", "cuda"}


def test_gradients_are_on_the_host_before_the_step_begins() -> None:
    expected, _, _ = trained("AdamW", clip=False)
    found, _, _ = trained("AdamW", clip=False, host_updates=0.5)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    status = teraplan.status()
    assert status.host_gradients_sent_early == status.host_updates > 0


def test_state_leaves_the_device() -> None:
    _, _, everything = trained("AdamW")
    _, optimizer, less = trained("AdamW", host_updates=1.0)
    left = teraplan.status().host_state_bytes
    assert left > 0
    assert everything - less == pytest.approx(left, rel=0.05)
    teraplan.detach(optimizer)
    optimizer.step()
    devices = {v.device.type for s in optimizer.state.values() for v in s.values() if v.ndim}
    assert devices == {"cuda"}
