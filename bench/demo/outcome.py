"""What one training run of the demonstration hands to the program that compares two of them."""

import dataclasses
import hashlib
import json
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """One run. Sizes in bytes, times in ns; of teraplan's own account, -1 where it gives none."""

    losses: tuple[str, ...]
    """The bits of each step's loss, float32 in hexadecimal."""
    parameters: str
    """Hash of all parameters after the last step."""
    optimizer_state: str
    """Hash of all of the optimizer's tensors after the last step."""
    num_parameters: int
    measured_peak_bytes: int
    """As the operating system or the driver counts, beyond what there was before the model."""
    step_ns: tuple[int, ...]
    """The measured steps."""
    coverage: float = 0.0
    budget_bytes: int = -1
    state_bytes: int = -1
    held_back_bytes: int = -1
    unlimited_peak_bytes: int = -1
    predicted_peak_bytes: int = -1
    actual_peak_bytes: int = -1
    predicted_step_ns: int = -1
    actual_step_ns: int = -1
    stall_ns: int = -1
    bytes_out: int = 0
    bytes_back: int = 0
    stores: tuple[str, ...] = ()
    plan_path: str = ""
    trace_path: str = ""
    run_path: str = ""

    def write(self, path: Path) -> None:
        """Write it as JSON."""
        path.write_text(json.dumps(dataclasses.asdict(self), indent=1))

    @classmethod
    def read(cls, path: Path) -> "Outcome":
        """What `write` wrote."""
        data: dict[str, Any] = json.loads(path.read_text())
        for name in ("losses", "step_ns", "stores"):
            data[name] = tuple(data[name])
        return cls(**data)

    def loss_values(self) -> list[float]:
        """The losses as numbers."""
        return [struct.unpack("<f", bytes.fromhex(bits))[0] for bits in self.losses]


def loss_bits(loss: float) -> str:
    """The bits of a float32 in hexadecimal."""
    return struct.pack("<f", loss).hex()


def hash_of(tensors: Iterable[Tensor]) -> str:
    """Hash of the bits of all tensors in order."""
    digest = hashlib.blake2b(digest_size=16)
    for tensor in tensors:
        digest.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
