"""The budget that a refusal names before the first step, from the graphs alone, is enough."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from teraplan.errors import InfeasibleBudgetError
from tests.end_to_end.training import UNLIMITED, Run, assert_same, run

MIB = 1 << 20


class Pooled(nn.Module):
    """Batch norm's backward reads a gradient twice over; that of max pooling adds up pieces."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 32, 3, 1, 1), nn.Conv2d(32, 32, 3, 1, 1)
        self.norms = nn.ModuleList(nn.BatchNorm2d(32) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.norms[0](self.first(x))), 2)
        result: Tensor = F.silu(self.norms[1](self.second(x))).square().mean()
        return result


def training(this: Run) -> None:
    net = Pooled()
    this.compile(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    x = torch.randn(8, 3, 64, 64)
    for _ in range(12):
        loss = net(x)
        torch.autograd.backward(loss)
        optimizer.step()
        this.record(loss, net)
        optimizer.zero_grad()


@pytest.mark.slow
@pytest.mark.parametrize("kernels", ["aot_eager", "inductor"])
def test_a_net_with_batch_norm_and_pooling(kernels: str) -> None:
    reference = run(training, device_budget=UNLIMITED, kernels=kernels)
    with pytest.raises(InfeasibleBudgetError) as caught:
        run(training, device_budget=MIB, kernels=kernels)
    named = caught.value.least_budget_bytes
    assert "which they predict to be enough" in str(caught.value), "before the first step"
    limited = run(training, device_budget=named, kernels=kernels)
    assert_same(reference, limited)
