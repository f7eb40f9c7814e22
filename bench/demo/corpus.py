"""Text that every machine has: the sources of Python's own standard library, as bytes."""

import sysconfig
from pathlib import Path

import torch
from torch import Tensor

from bench.models.gpt import GPTConfig
from bench.models.seeded import generator

ENOUGH_NBYTES = 4_000_000


def standard_library_text() -> Tensor:
    """The first ENOUGH_NBYTES of the library's modules in order of name, (N,), uint8."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    text = bytearray()
    for path in sorted(folder.glob("*.py")):
        text += path.read_bytes()
        if len(text) >= ENOUGH_NBYTES:
            break
    if len(text) < ENOUGH_NBYTES // 8:
        raise SystemExit(f"{folder} has only {len(text)} bytes of Python to train on")
    return torch.frombuffer(text[:ENOUGH_NBYTES], dtype=torch.uint8)


def text_batch(
    text: Tensor, config: GPTConfig, batch_size: int, step: int
) -> tuple[Tensor, Tensor]:
    """Random stretches of `text` and the bytes that follow, each (batch_size, context), int64."""
    last = text.numel() - config.context - 1
    starts = torch.randint(last, (batch_size, 1), generator=generator(config.seed, step))
    rows = text[starts + torch.arange(config.context + 1)].long()
    return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()
