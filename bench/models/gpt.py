"""A GPT: pre-norm blocks, causal attention, learned positions.

tokens (B, T) -> embed (B, T, D) -> [x + attention(norm x); x + mlp(norm x)] * L
              -> norm -> logits (B, T, V) -> mean cross entropy, a scalar
"""

from dataclasses import dataclass
from typing import cast, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from bench.models.seeded import generator, seeded


@dataclass(frozen=True, slots=True, kw_only=True)
class GPTConfig:
    """Sizes of a GPT."""

    vocab_size: int = 256
    context: int = 128
    num_layers: int = 4
    num_heads: int = 4
    width: int = 128
    dropout: float = 0.0
    tie_embeddings: bool = False
    checkpoint: bool = False
    """Recompute each block in the backward pass instead of saving its activations."""
    seed: int = 0


@final
class Attention(nn.Module):
    """Causal self-attention, (B, T, D) to (B, T, D)."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.num_heads = config.num_heads
        self.dropout = config.dropout
        self.qkv = nn.Linear(config.width, 3 * config.width, bias=False)
        self.out = nn.Linear(config.width, config.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """The attention's output before the residual sum."""
        batch, time, width = x.shape
        heads = (batch, time, self.num_heads, width // self.num_heads)
        query, key, value = (
            part.view(heads).transpose(1, 2) for part in self.qkv(x).split(width, dim=2)
        )
        dropout = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(query, key, value, dropout_p=dropout, is_causal=True)
        return cast("Tensor", self.out(y.transpose(1, 2).reshape(batch, time, width)))


@final
class Block(nn.Module):
    """Attention and MLP, each on the normalized input and added to it, (B, T, D) to (B, T, D)."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.width)
        self.attention = Attention(config)
        self.mlp_norm = nn.LayerNorm(config.width)
        self.up = nn.Linear(config.width, 4 * config.width)
        self.down = nn.Linear(4 * config.width, config.width)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        """The block's output."""
        x = x + self.dropout(self.attention(self.attention_norm(x)))
        hidden = F.gelu(self.up(self.mlp_norm(x)), approximate="tanh")
        return x + cast("Tensor", self.dropout(self.down(hidden)))


@final
class GPT(nn.Module):
    """The language model."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.checkpoint = config.checkpoint
        self.tokens = nn.Embedding(config.vocab_size, config.width)
        self.positions = nn.Parameter(torch.zeros(config.context, config.width))
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, config.vocab_size, bias=False)
        self.apply(_initialize)
        if config.tie_embeddings:
            self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Mean cross entropy of `targets` (B, T) after `tokens` (B, T), both int64."""
        x = self.tokens(tokens) + self.positions[: tokens.shape[1]]
        x = cast("Tensor", self.dropout(x))
        for block in self.blocks:
            if self.checkpoint:
                x = cast("Tensor", checkpoint(block, x, use_reentrant=False))
            else:
                x = block(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def _initialize(module: nn.Module) -> None:
    if isinstance(module, (nn.Linear, nn.Embedding)):
        nn.init.normal_(module.weight, std=0.02)


def build(config: GPTConfig) -> GPT:
    """The model with the parameters that `config.seed` gives, on the CPU."""
    with seeded(config.seed):
        return GPT(config)


def batch(config: GPTConfig, batch_size: int, step: int = 0) -> tuple[Tensor, Tensor]:
    """Tokens and the tokens that follow them, each (batch_size, context), int64, random."""
    shape = (batch_size, config.context + 1)
    row = torch.randint(config.vocab_size, shape, generator=generator(config.seed, step))
    return row[:, :-1].contiguous(), row[:, 1:].contiguous()
