"""Transformers of Hugging Face's library, from a configuration, with random parameters.

ids (B, T), labels (B, T) -> mean cross entropy, a scalar
"""

from typing import Any, final

import torch
from torch import Tensor, nn

from bench.models.seeded import generator, seeded

FAMILIES = ("llama", "t5")
_VOCABULARY = 1024
_LENGTH = {"llama": 512, "t5": 384}


@final
class LanguageModel(nn.Module):
    """One of the library's models; its loss is the result."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        """Mean cross entropy of `labels` for `ids`, both (B, T), int64."""
        loss: Tensor = self.model(input_ids=ids, labels=labels).loss
        return loss


def build(family: str) -> LanguageModel:
    """Eight layers of width 512: some 23 M parameters, on the CPU."""
    with seeded(0):
        return LanguageModel(_llama() if family == "llama" else _t5())


def batch(family: str, batch_size: int, step: int = 0) -> tuple[Tensor, Tensor]:
    """Random ids and labels, each (batch_size, T), int64."""
    shape = (batch_size, _LENGTH[family])
    numbers = generator(0, step)
    ids, labels = (torch.randint(3, _VOCABULARY, shape, generator=numbers) for _ in range(2))
    return ids, labels


def _llama() -> Any:  # noqa: ANN401  the library's classes have no types
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=_VOCABULARY,
            hidden_size=512,
            intermediate_size=1376,
            num_hidden_layers=8,
            num_attention_heads=8,
            num_key_value_heads=4,
            use_cache=False,
        )
    )


def _t5() -> Any:  # noqa: ANN401
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=_VOCABULARY,
        d_model=512,
        d_kv=64,
        d_ff=1536,
        num_layers=4,
        num_decoder_layers=4,
        num_heads=8,
        use_cache=False,
    )
    config.decoder_start_token_id = 0
    return T5ForConditionalGeneration(config)
