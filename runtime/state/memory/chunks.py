"""Small tensors share blocks, since a transfer takes time beside its bytes.

    chunk   | p0 | p1 | p2 |  free  |     tensors of one sort, one after another as they are made

Tensors that are made one after another are used one after another (PatrickStar, arXiv 2108.05818,
which has all tensors in chunks of one size, chosen to waste little). Here a chunk is as
large as makes that time a small part, and no tensor is in one that would fill half of it.
"""

import torch

from teraplan.runtime.process import pages
from teraplan.runtime.state.memory.arena import StateArena
from teraplan.runtime.state.memory.block import Block
from teraplan.runtime.state.memory.lease import span_nbytes
from teraplan.values.graph_table import MIN_SLOT_BYTES
from teraplan.values.hardware import Link
from teraplan.values.step_trace import TensorKind

Sort = tuple[TensorKind, bool]
"""What shares a chunk: the kind, and whether it is frozen, since a chunk is written as a whole."""

_OVERHEAD = 0.1
"""Part of a chunk's transfer that this may be."""
_LIMIT_FRACTION = 1 / 64
"""Of the state's memory, one chunk: several are in use at once, and some are not full."""
_ALIGNMENT = 64
"""Of tensors in a chunk, as PyTorch's own on CPUs have it."""
_NAMES = {
    TensorKind.PARAMETER: "parameters",
    TensorKind.GRADIENT: "gradients",
    TensorKind.OPTIMIZER_STATE: "optimizer state",
}


def chunk_nbytes(link: Link | None, limit_bytes: int, *, transfer_ns: int) -> int:
    """Bytes of a chunk; 0 where there is nothing to gain.

    Args:
        link: that most of the state takes.
        limit_bytes: memory for the whole state.
        transfer_ns: that a transfer takes of the cores, however small.
    """
    if link is None:
        return 0
    slowest = min(link.out_bytes_per_s, link.back_bytes_per_s)
    enough = slowest * (transfer_ns + link.latency_ns) / _OVERHEAD / 1e9
    nbytes = int(min(enough, limit_bytes * _LIMIT_FRACTION)) // pages.PAGE_BYTES * pages.PAGE_BYTES
    return nbytes if nbytes >= 2 * MIN_SLOT_BYTES else 0


class Chunks:
    """Gives the tensors of one arena their blocks: one of their own, or a chunk."""

    def __init__(self, arena: StateArena, nbytes: int) -> None:
        self.nbytes = nbytes
        """Of each chunk; 0: there are none."""
        self._arena = arena
        self._open: dict[Sort, Block] = {}
        """Chunks that have room."""
        self._num_lasting = self._num_gradients = 0

    def begin_step(self) -> None:
        """Gradients are counted anew, so that those of each step have the same keys.

        Parameters and optimizer state that come later have chunks of their own.
        """
        self._num_gradients = 0
        self.close()

    def end_gradients(self) -> None:
        """The gradients that come next are others: parameters are updated."""
        for sort in [s for s in self._open if s[0] is TensorKind.GRADIENT]:
            self._close(sort)

    def with_room(self, like: torch.Tensor, sort: Sort) -> Block | None:
        """The open chunk for a tensor as `like`, None if it needs a new block."""
        block = self._open.get(sort)
        if block is None or not self._takes(like):
            return None
        return block if block.filled_bytes + span_nbytes(like) <= block.nbytes else None

    def make(self, like: torch.Tensor, sort: Sort, what: str) -> Block:
        """A new block for a tensor as `like`, in memory; for a small one a chunk, open from now on.

        Args:
            like: the tensor.
            sort: what else comes into such a chunk.
            what: it is, for people.
        """
        key = (sort[0], self._next_number(sort[0]))
        if not self._takes(like):
            shape, dtype = tuple(like.shape), str(like.dtype)[6:]
            return self._arena.open(span_nbytes(like), key, what, shape=shape, dtype=dtype)
        self._close(sort)
        name = _NAMES[sort[0]]
        nbytes = self.nbytes
        if key in self._arena.sizes:  # of gradients, and those of the step before are as many
            nbytes = max(span_nbytes(like), min(nbytes, self._arena.sizes[key]))
        block = self._arena.open(nbytes, key, name, shape=(nbytes,), dtype="uint8")
        block.is_open = True
        self._open[sort] = block
        return block

    def add(self, block: Block, like: torch.Tensor) -> torch.Tensor:
        """An uninitialized tensor in a block that has room for it and is in memory."""
        offset = block.filled_bytes
        block.filled_bytes += pages.round_up(span_nbytes(like), _ALIGNMENT)
        return self._arena.place(block, like, offset)

    def close(self) -> None:
        """No more tensors come into the chunks that are open."""
        for sort in list(self._open):
            self._close(sort)

    def _takes(self, like: torch.Tensor) -> bool:
        return 2 * span_nbytes(like) <= self.nbytes

    def _next_number(self, kind: TensorKind) -> int:
        if kind is TensorKind.GRADIENT:
            self._num_gradients += 1
            return self._num_gradients - 1
        self._num_lasting += 1
        return self._num_lasting - 1

    def _close(self, sort: Sort) -> None:
        block = self._open.pop(sort, None)
        if block is not None:
            self._arena.close_block(block)
