"""A bidirectional encoder: post-norm blocks, a padding mask, masked-token prediction.

tokens (B, T) -> embed, norm (B, T, D) -> [norm(x + attention x); norm(x + mlp x)] * L
              -> logits (B, T, V) -> mean cross entropy over the masked places, a scalar
"""

from dataclasses import dataclass
from typing import cast, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.models.seeded import generator, seeded

PADDING, MASK = 0, 1
"""Token ids with a meaning; the others are data."""
IGNORED = -100
"""Target of a place that is not predicted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderConfig:
    """Sizes of an encoder."""

    vocab_size: int = 512
    context: int = 64
    num_layers: int = 3
    num_heads: int = 4
    width: int = 128
    dropout: float = 0.0
    seed: int = 0


@final
class Block(nn.Module):
    """Attention over all unmasked places, then an MLP, (B, T, D) to (B, T, D)."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.num_heads = config.num_heads
        self.dropout = config.dropout
        self.query = nn.Linear(config.width, config.width)
        self.key = nn.Linear(config.width, config.width)
        self.value = nn.Linear(config.width, config.width)
        self.out = nn.Linear(config.width, config.width)
        self.attention_norm = nn.LayerNorm(config.width)
        self.up = nn.Linear(config.width, 4 * config.width)
        self.down = nn.Linear(4 * config.width, config.width)
        self.mlp_norm = nn.LayerNorm(config.width)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        """The block's output; `mask` (B, 1, 1, T) is true where a place may be attended to."""
        batch, time, width = x.shape
        heads = (batch, time, self.num_heads, width // self.num_heads)
        query, key, value = (
            cast("Tensor", project(x)).view(heads).transpose(1, 2)
            for project in (self.query, self.key, self.value)
        )
        dropout = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, dropout_p=dropout)
        y = F.dropout(self.out(y.transpose(1, 2).reshape(batch, time, width)), dropout)
        x = self.attention_norm(x + y)
        hidden = self.down(F.gelu(self.up(x)))
        return cast("Tensor", self.mlp_norm(x + F.dropout(hidden, dropout)))


@final
class Encoder(nn.Module):
    """The masked language model."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.tokens = nn.Embedding(config.vocab_size, config.width, padding_idx=PADDING)
        self.positions = nn.Parameter(torch.randn(config.context, config.width) * 0.02)
        self.norm = nn.LayerNorm(config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.head = nn.Linear(config.width, config.vocab_size)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Mean cross entropy over the places of `targets` (B, T) that are not IGNORED."""
        mask = (tokens != PADDING)[:, None, None, :]
        x = self.norm(self.tokens(tokens) + self.positions[: tokens.shape[1]])
        for block in self.blocks:
            x = block(x, mask)
        logits = self.head(x)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED)


def build(config: EncoderConfig) -> Encoder:
    """The model with the parameters that `config.seed` gives, on the CPU."""
    with seeded(config.seed):
        return Encoder(config)


def batch(config: EncoderConfig, batch_size: int, step: int = 0) -> tuple[Tensor, Tensor]:
    """Tokens with masked and padded places, and targets, each (batch_size, context), int64."""
    random = generator(config.seed, step)
    shape = (batch_size, config.context)
    targets = torch.randint(MASK + 1, config.vocab_size, shape, generator=random)
    lengths = torch.randint(
        config.context // 2, config.context + 1, (batch_size, 1), generator=random
    )
    padded = torch.arange(config.context) >= lengths
    masked = (torch.rand(shape, generator=random) < 0.15) & ~padded
    masked[:, 0] = True
    tokens = targets.masked_fill(masked, MASK).masked_fill(padded, PADDING)
    return tokens, targets.masked_fill(~masked, IGNORED)
