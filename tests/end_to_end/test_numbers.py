"""Inductor's kernels give the same numbers under teraplan as plain PyTorch.

Other tests compare runs of one set of graphs; this compares them with what nobody has compiled.
"""

import copy

import pytest
import torch
from torch import Tensor, nn


class Images(nn.Module):
    """Convolutions of several kinds, and what stands between them in nets for images.

    Inductor has such tensors in another order of memory than they are traced with.
    """

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(16)
        self.pool = nn.MaxPool2d(3, 2, 1)
        self.same = nn.Conv2d(16, 16, 3, padding=1, groups=4)
        self.last = nn.LayerNorm(16)
        self.wide = nn.Linear(16, 32)
        self.up = nn.ConvTranspose2d(32, 16, 2, stride=2)
        self.line = nn.Conv1d(16, 8, 3, padding=1)
        self.head = nn.Linear(8, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Logits, (N, 10), of images, (N, 3, H, W)."""
        x = self.pool(torch.relu(self.norm(self.stem(x))))
        x = x + torch.nn.functional.gelu(self.same(x))
        x = torch.sigmoid(self.wide(self.last(x.permute(0, 2, 3, 1)))).permute(0, 3, 1, 2)
        x = torch.tanh(self.up(x))
        return self.head(torch.relu(self.line(x.flatten(2))).mean(-1))  # type: ignore[no-any-return]


def _gradients(model: nn.Module, num_images: int) -> dict[str, Tensor]:
    """Of the second of two steps' worth of images; the first may have had other sizes."""
    generator = torch.Generator().manual_seed(num_images)
    x = torch.randn(num_images, 3, 32, 32, generator=generator)
    labels = torch.arange(num_images) % 10
    model.zero_grad()
    torch.autograd.backward(torch.nn.functional.cross_entropy(model(x), labels))
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.slow
@pytest.mark.parametrize("dynamic", [False, pytest.param(True, marks=pytest.mark.exhaustive)])
def test_nets_for_images(dynamic: bool) -> None:
    torch._dynamo.reset()
    torch.manual_seed(3)
    plain = Images()  # as it is: to compile it once more takes a minute
    model = copy.deepcopy(plain)
    model.compile(backend="teraplan", dynamic=dynamic)
    for num_images in (16, 24) if dynamic else (16, 16):
        expected, found = _gradients(plain, num_images), _gradients(model, num_images)
        assert expected.keys() == found.keys()
        for name, gradient in expected.items():
            torch.testing.assert_close(found[name], gradient, rtol=1e-3, atol=1e-5, msg=name)
