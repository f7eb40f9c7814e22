"""How large a model the demonstration trains, so that it takes minutes and fits the machine."""

from dataclasses import dataclass

import torch

from bench.models.gpt import GPTConfig
from teraplan.units import GIB


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """A model, its batch and the number of steps."""

    model: GPTConfig
    batch_size: int
    warmup_steps: int
    """Steps before peak and time are measured: compilation, profile, first step of the plan."""
    measured_steps: int

    @property
    def steps(self) -> int:
        """All steps."""
        return self.warmup_steps + self.measured_steps


CPU = Size(
    model=GPTConfig(context=256, num_layers=8, num_heads=8, width=512),
    batch_size=10,
    warmup_steps=5,
    measured_steps=5,
)
"""25 million parameters; about 650 MiB of saved activations."""
TINY = Size(
    model=GPTConfig(context=128, num_layers=2, num_heads=4, width=256),
    batch_size=16,
    warmup_steps=5,
    measured_steps=4,
)
"""For tests of the demonstration itself."""


def fitting_size(device: torch.device) -> Size:
    """The size for this device."""
    if device.type == "cpu":
        return CPU
    free_bytes, _ = torch.accelerator.get_memory_info()
    width, batch_size = (2048, 8) if free_bytes > 70 * GIB else (1024, 8)
    if free_bytes < 24 * GIB:
        width, batch_size = 512, 16
    model = GPTConfig(context=1024, num_layers=24, num_heads=width // 64, width=width)
    return Size(model=model, batch_size=batch_size, warmup_steps=6, measured_steps=20)
