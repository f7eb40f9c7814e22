"""What a user can do today without a planner: save every activation to disk with PyTorch's hooks.

As `torch.autograd.graph.save_on_cpu`, with a file in the place of host memory: each tensor of 1 MiB
and more is written when it is saved and read when it is needed, the computation waiting.
"""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

_MIN_BYTES = 1 << 20


class _OnDisk:
    """A tensor in a file without a name."""

    def __init__(self, tensor: Tensor, directory: Path) -> None:
        self.shape, self.stride, self.dtype = tensor.shape, tensor.stride(), tensor.dtype
        flat = torch.as_strided(tensor.detach(), (_span(tensor),), (1,)).view(torch.uint8)
        self.file = tempfile.TemporaryFile(dir=directory)  # noqa: SIM115  (lives as long as this)
        os.write(self.file.fileno(), flat.numpy().data)

    def load(self) -> Tensor:
        flat = torch.empty(os.fstat(self.file.fileno()).st_size, dtype=torch.uint8)
        os.preadv(self.file.fileno(), [flat.numpy().data], 0)
        return flat.view(self.dtype).as_strided(self.shape, self.stride)


def _span(tensor: Tensor) -> int:
    return 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))


@contextmanager
def saved_on_disk(directory: Path) -> Iterator[None]:
    """Within this, autograd keeps large saved tensors in files in `directory`."""

    def pack(tensor: Tensor) -> Tensor | _OnDisk:
        if tensor.nbytes < _MIN_BYTES or isinstance(tensor, torch.nn.Parameter):
            return tensor
        return _OnDisk(tensor, directory)

    def unpack(packed: Tensor | _OnDisk) -> Tensor:
        return packed.load() if isinstance(packed, _OnDisk) else packed

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        yield
