"""An MLP-Mixer: no attention, no convolution; mixes places, then channels.

images (B, 3, S, S) -> patches (B, N, 3*P*P) -> embed (B, N, D)
    -> [x + mlp over N; x + mlp over D] * L -> mean (B, D) -> logits (B, K) -> loss, a scalar
"""

from dataclasses import dataclass
from typing import cast, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.models.seeded import generator, seeded


@dataclass(frozen=True, slots=True, kw_only=True)
class MixerConfig:
    """Sizes of a mixer."""

    image_size: int = 32
    patch_size: int = 4
    num_layers: int = 4
    width: int = 128
    num_classes: int = 10
    seed: int = 0

    @property
    def num_patches(self) -> int:
        """Patches of one image."""
        return (self.image_size // self.patch_size) ** 2


@final
class Block(nn.Module):
    """Mixes places, then channels, (B, N, D) to (B, N, D)."""

    def __init__(self, config: MixerConfig) -> None:
        super().__init__()
        places, width = config.num_patches, config.width
        self.place_norm = nn.LayerNorm(width)
        self.place_mlp = nn.Sequential(
            nn.Linear(places, 2 * places), nn.GELU(), nn.Linear(2 * places, places)
        )
        self.channel_norm = nn.LayerNorm(width)
        self.channel_mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        """The block's output."""
        x = x + self.place_mlp(self.place_norm(x).transpose(1, 2)).transpose(1, 2)
        return x + cast("Tensor", self.channel_mlp(self.channel_norm(x)))


@final
class Mixer(nn.Module):
    """The classifier."""

    def __init__(self, config: MixerConfig) -> None:
        super().__init__()
        self.patch_size = config.patch_size
        self.embed = nn.Linear(3 * config.patch_size**2, config.width)
        self.blocks = nn.Sequential(*(Block(config) for _ in range(config.num_layers)))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, config.num_classes)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        """Mean cross entropy of `labels` (B,), int64, for `images` (B, 3, S, S)."""
        size = self.patch_size
        patches = images.unfold(2, size, size).unfold(3, size, size)
        x = self.embed(patches.permute(0, 2, 3, 1, 4, 5).flatten(3).flatten(1, 2))
        logits = cast("Tensor", self.head(self.norm(self.blocks(x)).mean(dim=1)))
        return F.cross_entropy(logits, labels)


def build(config: MixerConfig) -> Mixer:
    """The model with the parameters that `config.seed` gives, on the CPU."""
    with seeded(config.seed):
        return Mixer(config)


def batch(config: MixerConfig, batch_size: int, step: int = 0) -> tuple[Tensor, Tensor]:
    """Images (batch_size, 3, S, S), float32, and their labels (batch_size,), int64, random."""
    random = generator(config.seed, step)
    shape = (batch_size, 3, config.image_size, config.image_size)
    labels = torch.randint(config.num_classes, (batch_size,), generator=random)
    return torch.randn(shape, generator=random), labels
