"""Models of Hugging Face's library, from a configuration, with random parameters.

bert, gpt2, llama, t5    ids (B, T), labels (B, T)           -> mean cross entropy, a scalar
resnet                   images (B, 3, H, W), labels (B,)    -> the same
"""

from typing import Any, final

import torch
from torch import Tensor, nn

from bench.models.seeded import generator, seeded

_VOCABULARY = 1024
_LENGTH = {"bert": 384, "gpt2": 512, "llama": 512, "t5": 384}
_IMAGES_PER_SEQUENCE = 4
"""A step over images has so many times the batch size, for about as many saved activations."""
_IMAGE_SIZE = 128


@final
class Trained(nn.Module):
    """One of the library's models; its loss is the result."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, inputs: Tensor, labels: Tensor) -> Tensor:
        """Mean cross entropy of `labels`."""
        loss: Tensor = self.model(inputs, labels=labels).loss
        return loss


def build(family: str) -> Trained:
    """Some 23 M parameters, on the CPU: eight layers of width 512, or 50 convolutions."""
    with seeded(0):
        return Trained(_BUILDERS[family]())


def batch(family: str, batch_size: int, step: int = 0) -> tuple[Tensor, Tensor]:
    """Random ids or images, and labels, int64."""
    numbers = generator(0, step)
    if family == "resnet":
        num = batch_size * _IMAGES_PER_SEQUENCE
        images = torch.randn(num, 3, _IMAGE_SIZE, _IMAGE_SIZE, generator=numbers)
        return images, torch.randint(_VOCABULARY, (num,), generator=numbers)
    shape = (batch_size, _LENGTH[family])
    ids, labels = (torch.randint(3, _VOCABULARY, shape, generator=numbers) for _ in range(2))
    return ids, labels


def _bert() -> Any:  # noqa: ANN401  the library's classes have no types
    from transformers import BertConfig, BertForMaskedLM

    return BertForMaskedLM(
        BertConfig(
            vocab_size=_VOCABULARY,
            hidden_size=512,
            intermediate_size=1536,
            num_hidden_layers=8,
            num_attention_heads=8,
        )
    )


def _gpt2() -> Any:  # noqa: ANN401
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=_VOCABULARY,
            n_embd=512,
            n_layer=8,
            n_head=8,
            n_positions=512,
            use_cache=False,
        )
    )


def _llama() -> Any:  # noqa: ANN401
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


def _resnet() -> Any:  # noqa: ANN401
    from transformers import ResNetConfig, ResNetForImageClassification

    config = ResNetConfig()
    config.num_labels = _VOCABULARY
    return ResNetForImageClassification(config)


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


_BUILDERS = {"bert": _bert, "gpt2": _gpt2, "llama": _llama, "t5": _t5, "resnet": _resnet}
FAMILIES = tuple(_BUILDERS)
