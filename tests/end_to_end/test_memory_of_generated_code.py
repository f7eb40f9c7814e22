"""Code that Inductor generated takes its tensors from the pool, from the first call on."""

import pytest
import torch
from torch import nn

from teraplan.runtime.cpu.device import CpuDevice
from tests.end_to_end.training import sessions


class Wide(nn.Module):
    """Two layers whose saved activations are larger than the pool's smallest blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 1024), nn.Linear(1024, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.down(torch.tanh(self.up(x))).square().mean()
        return result


@pytest.mark.slow
def test_the_first_forward_takes_its_memory_from_the_pool() -> None:
    model = Wide()
    model.compile(backend="teraplan", options={"device_budget": "100GiB"})
    loss = model(torch.randn(512, 64))
    (session,) = sessions()
    device = session.device
    assert isinstance(device, CpuDevice)
    assert device.pool.in_use_bytes >= 512 * 1024 * 4
    loss.backward()
