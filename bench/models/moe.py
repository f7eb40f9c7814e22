"""A mixture of experts with data-dependent routing: sizes of tensors differ from step to step.

    tokens (B, T) -> embed (B*T, D) -> [x + sum of the top-k experts of each row] * L
                  -> logits (B*T, V) -> mean cross entropy, a scalar

A row goes to an expert at most once, so that no two rows of an `index_add` meet and the order of
additions, and with it every bit of the result, is always the same.
"""

from dataclasses import dataclass
from typing import cast, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.models.seeded import generator, seeded


@dataclass(frozen=True, slots=True, kw_only=True)
class MoEConfig:
    """Sizes of a mixture of experts."""

    vocab_size: int = 256
    context: int = 32
    num_layers: int = 2
    num_experts: int = 4
    experts_per_token: int = 2
    """1 or 2 of them are usual; at most `num_experts`."""
    width: int = 64
    seed: int = 0


@final
class Expert(nn.Module):
    """An MLP, (rows, D) to (rows, D)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, rows: Tensor) -> Tensor:
        """The expert's output, whatever the number of rows, none included."""
        return cast("Tensor", self.down(F.silu(self.up(rows))))


@final
class Block(nn.Module):
    """Sends each row to its best experts and adds their weighted outputs, (rows, D) to same."""

    def __init__(self, config: MoEConfig) -> None:
        super().__init__()
        self.experts_per_token = config.experts_per_token
        self.norm = nn.LayerNorm(config.width)
        self.router = nn.Linear(config.width, config.num_experts, bias=False)
        self.experts = nn.ModuleList(Expert(config.width) for _ in range(config.num_experts))

    def forward(self, x: Tensor) -> Tensor:
        """The block's output."""
        rows = cast("Tensor", self.norm(x))
        weights, chosen = self.router(rows).softmax(dim=-1).topk(self.experts_per_token, dim=-1)
        for index, expert in enumerate(self.experts):
            here = chosen == index
            places = here.any(dim=-1).nonzero().squeeze(-1)
            weight = (weights * here).sum(dim=-1, keepdim=True).index_select(0, places)
            x = x.index_add(0, places, weight * expert(rows.index_select(0, places)))
        return x


@final
class MoE(nn.Module):
    """A language model that looks at one token only."""

    def __init__(self, config: MoEConfig) -> None:
        super().__init__()
        self.tokens = nn.Embedding(config.vocab_size, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.head = nn.Linear(config.width, config.vocab_size)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Mean cross entropy of `targets` (B, T) after `tokens` (B, T), both int64."""
        x = cast("Tensor", self.tokens(tokens)).flatten(0, 1)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x), targets.flatten())


def build(config: MoEConfig) -> MoE:
    """The model with the parameters that `config.seed` gives, on the CPU."""
    with seeded(config.seed):
        return MoE(config)


def batch(config: MoEConfig, batch_size: int, step: int = 0) -> tuple[Tensor, Tensor]:
    """Tokens and the tokens that follow them, each (batch_size, context), int64, random."""
    shape = (batch_size, config.context + 1)
    row = torch.randint(config.vocab_size, shape, generator=generator(config.seed, step))
    return row[:, :-1].contiguous(), row[:, 1:].contiguous()
