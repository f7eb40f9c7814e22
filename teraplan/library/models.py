"""Models by name, with the sizes that their authors publish.

Llama-3: arXiv 2407.21783, table 3. Granite-8B-code: arXiv 2405.04324, table 1. Mixtral-8x7B: arXiv
2401.04088, table 1. ViT-g/14: arXiv 2106.04560, table 2. T5-11B: arXiv 1910.10683, section 3.7.
U-Net: arXiv 1505.04597, figure 1, with padded convolutions and 64 channels in the first level.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from teraplan.errors import ConfigError
from teraplan.library.convolutional import UNet, unet
from teraplan.library.costs import Roofline
from teraplan.library.machines import Machine
from teraplan.library.training import Forward, Schedule, training_step
from teraplan.library.transformers import (
    Batch,
    EncoderDecoder,
    Transformer,
    encoder_decoder,
    transformer,
)
from teraplan.values.step_trace import StepTrace

Model = Transformer | EncoderDecoder | UNet

_LLAMA_8B = Transformer(layers=32, hidden=4096, ffn=14336, heads=32, kv_heads=8, vocab=128256)
_LLAMA_70B = Transformer(layers=80, hidden=8192, ffn=28672, heads=64, kv_heads=8, vocab=128256)
MODELS: Mapping[str, Model] = MappingProxyType(
    {
        "llama3-8b": _LLAMA_8B,
        "llama3-70b": _LLAMA_70B,
        "granite-8b": Transformer(
            layers=36, hidden=4096, ffn=14336, heads=32, kv_heads=8, vocab=49152
        ),
        "mixtral-8x7b": Transformer(
            layers=32,
            hidden=4096,
            ffn=14336,
            heads=32,
            kv_heads=8,
            vocab=32000,
            experts=8,
            active_experts=2,
        ),
        "vit-g": Transformer(
            layers=40,
            hidden=1408,
            ffn=6144,
            heads=16,
            kv_heads=16,
            vocab=1000,
            gated=False,
            causal=False,
        ),
        "t5-11b": EncoderDecoder(layers=24, hidden=1024, ffn=65536, inner=16384, vocab=32128),
        "unet": UNet(levels=5, channels=64, image_channels=3, classes=21),
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """A model and how it is trained."""

    model: str
    dtype: str = "bfloat16"
    batch: int = 1
    """Sequences or images of one micro-batch."""
    length: int = 2048
    """Tokens of a sequence; for a U-Net, pixels of a side."""
    micro_batches: int = 1
    stages: int = 1
    """Pipeline stages; the step of the first one is built, with as many micro-batches in flight."""
    kernels: int = 1
    """Sites that each operation is cut into."""
    clipped: bool = False
    """Whether gradients are scaled by the norm of all of them before the update."""


def trace_of(workload: Workload, machine: Machine) -> StepTrace:
    """The step of `workload` on the device of `machine`, by the cost model.

    Raises:
        ConfigError: if there is no such model, or it cannot be cut into stages.
    """
    schedule = Schedule(
        micro_batches=workload.micro_batches,
        in_flight=workload.stages,
        kernels=workload.kernels,
        clipped=workload.clipped,
    )
    return training_step(
        _forward(workload),
        Roofline(processor=machine.processor),
        workload.dtype,
        schedule,
        machine.hardware.device,
    )


def _forward(workload: Workload) -> Forward:
    model = MODELS.get(workload.model)
    if model is None:
        raise ConfigError(f'model "{workload.model}" is not one of {", ".join(MODELS)}')
    batch = Batch(sequences=workload.batch, length=workload.length)
    if workload.stages > 1 and not isinstance(model, Transformer):
        raise ConfigError(f"{workload.model} cannot be cut into stages; leave stages at 1")
    if isinstance(model, Transformer) and workload.stages > model.layers:
        raise ConfigError(
            f"{workload.model} has {model.layers} layers, which {workload.stages} stages cannot "
            f"share; ask for at most {model.layers}"
        )
    if isinstance(model, EncoderDecoder):
        return encoder_decoder(model, batch)
    if isinstance(model, UNet):
        return unet(model, batch)
    staged = Transformer(
        layers=model.layers,
        hidden=model.hidden,
        ffn=model.ffn,
        heads=model.heads,
        kv_heads=model.kv_heads,
        vocab=model.vocab,
        gated=model.gated,
        experts=model.experts,
        active_experts=model.active_experts,
        causal=model.causal,
        first_stage_of=workload.stages,
    )
    return transformer(staged, batch)
