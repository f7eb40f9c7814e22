"""Files that tensors have been taken over from where they were mapped: `torch.load(mmap=True)`.

Their pages stay in memory as long as anything has the mapping, and one small tensor is enough for
that. They can be read again, so they go as soon as they have been copied.
"""

import torch

from teraplan.runtime.process.pages import is_of_file, page_out
from teraplan.runtime.process.process_memory import mappings_with


class ReadFiles:
    """Of one training state."""

    def __init__(self) -> None:
        self._addresses: set[int] = set()

    def copied(self, source: torch.Tensor) -> None:
        """All of `source` has been read. If it lies in a mapped file, its pages may go."""
        if source.device.type == "cpu" and is_of_file(source.data_ptr()):
            self._addresses.add(source.data_ptr())
            page_out(source.data_ptr(), source.nbytes)

    def let_go(self) -> None:
        """What else has been read of these files may go, too."""
        for address, nbytes in mappings_with(self._addresses):
            page_out(address, nbytes)
        self._addresses.clear()
