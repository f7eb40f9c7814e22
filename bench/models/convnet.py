"""A residual convolutional network with batch norm, whose running statistics change in forward.

images (B, 3, S, S) -> stem (B, C, S, S) -> stages, each halving S and doubling C
                    -> mean over places (B, C') -> logits (B, K) -> cross entropy, a scalar
"""

from dataclasses import dataclass
from typing import cast, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.models.seeded import generator, seeded


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvNetConfig:
    """Sizes of a convolutional network."""

    image_size: int = 32
    channels: int = 16
    num_stages: int = 3
    blocks_per_stage: int = 2
    num_classes: int = 10
    seed: int = 0


@final
class Block(nn.Module):
    """Two convolutions beside an identity or a strided projection."""

    def __init__(self, channels_in: int, channels: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels_in, channels, 3, stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(channels)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or channels_in != channels:
            projection = nn.Conv2d(channels_in, channels, 1, stride, bias=False)
            self.shortcut = nn.Sequential(projection, nn.BatchNorm2d(channels))

    def forward(self, x: Tensor) -> Tensor:
        """(B, channels_in, S, S) to (B, channels, S / stride, S / stride)."""
        y = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(y)) + self.shortcut(x))


@final
class ConvNet(nn.Module):
    """The classifier."""

    def __init__(self, config: ConvNetConfig) -> None:
        super().__init__()
        channels = config.channels
        self.stem = nn.Conv2d(3, channels, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(channels)
        blocks: list[nn.Module] = []
        for stage in range(config.num_stages):
            for index in range(config.blocks_per_stage):
                first = stage > 0 and index == 0
                blocks.append(Block(channels, channels * (2 if first else 1), 2 if first else 1))
                channels *= 2 if first else 1
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(channels, config.num_classes)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        """Mean cross entropy of `labels` (B,), int64, for `images` (B, 3, S, S)."""
        x = self.blocks(F.relu(self.norm(self.stem(images))))
        logits = cast("Tensor", self.head(x.mean(dim=(2, 3))))
        return F.cross_entropy(logits, labels)


def build(config: ConvNetConfig) -> ConvNet:
    """The model with the parameters that `config.seed` gives, on the CPU."""
    with seeded(config.seed):
        return ConvNet(config)


def batch(config: ConvNetConfig, batch_size: int, step: int = 0) -> tuple[Tensor, Tensor]:
    """Images (batch_size, 3, S, S), float32, and their labels (batch_size,), int64, random."""
    random = generator(config.seed, step)
    shape = (batch_size, 3, config.image_size, config.image_size)
    labels = torch.randint(config.num_classes, (batch_size,), generator=random)
    return torch.randn(shape, generator=random), labels
