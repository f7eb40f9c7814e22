"""One saved activation while it is alive: where its bytes are, and who still needs them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from teraplan.errors import UnsupportedError
from teraplan.runtime.device import Arrival, Copy
from teraplan.values.graph_table import MIN_SLOT_BYTES, GraphTable

if TYPE_CHECKING:
    from teraplan.runtime.engine.recompute import Remake


_LARGEST_ITEM_BYTES = 16
_LARGEST_SHARE = 2


@dataclass(slots=True)
class Saved:
    """The memory of one storage that backward passes will need.

    Exactly one of these holds: `tensor` is set (on the device, perhaps with a copy on its way
    out), `arrival` is set (coming back), only `copy` is (elsewhere), or only `remake` is (dropped,
    to be computed again).
    """

    name: str
    nbytes: int
    address: int
    """Of the object that is the storage which was saved."""
    tensor: torch.Tensor | None
    version: int
    """Of `tensor` when it was saved: autograd's counter of modifications in place."""
    order: int
    """Number of this storage in the step."""
    saved_version: int
    """`version` before the tensor has been away: where it comes back to, it counts anew."""
    saved_by: int
    """The call that saved it first."""
    offset: int = 0
    """Of the tensor's first byte in the storage that came back, against the one that left."""
    origin: StorageWeakRef | None = None
    """The storage that was saved, once it has been let go: it may stay, in views of the user's."""
    copy: Copy | None = None
    arrival: Arrival | None = None
    tokens: int = 0
    """Tokens of the graphs that have not been used up."""
    in_use: int = 0
    """Views handed to a running backward graph."""
    remake: "Remake | None" = None
    """How its bytes can be computed again."""

    @property
    def resident(self) -> bool:
        """True if its bytes take device memory."""
        return self.tensor is not None or self.arrival is not None

    @property
    def expired(self) -> bool:
        """True if the storage that was saved is gone, so that its address may mean another one."""
        return self.origin is not None and bool(self.origin.expired())  # type: ignore[no-untyped-call]

    @property
    def modified(self) -> bool:
        """True if user code has changed the tensor since it was saved."""
        return self.tensor is not None and self.tensor._version != self.version

    def let_go(self) -> None:
        """Free the memory of `tensor`, of which there is a copy, or which can be computed again."""
        assert self.tensor is not None, f"{self.name} is not on the device"
        if self.origin is None:
            self.origin = StorageWeakRef(self.tensor.untyped_storage())  # type: ignore[no-untyped-call]
        self.tensor = None

    def check_version(self) -> None:
        """Raise if user code has changed the tensor since it was saved."""
        tensor = self.tensor
        if tensor is not None and tensor._version != self.version:
            raise UnsupportedError(
                f"{self.name}: modified in place (version {self.version} -> "
                f"{tensor._version}) after the forward saved it for the backward; "
                "clone the tensor before changing it"
            )


class View(NamedTuple):
    """What one token stands for: a place in a saved storage."""

    saved: Saved
    byte_offset: int
    stride: tuple[int, ...]
    call: int
    """The call of a graph that saved it."""
    table: GraphTable
    """Of that call."""

    def require(self, size: Sequence[int], stride: Sequence[int]) -> None:
        """Raise UnsupportedError if the backward reads the elements in another order."""
        if self.stride == tuple(stride):
            return
        for length, kept, wanted in zip(size, self.stride, stride, strict=True):
            if length > 1 and kept != wanted:
                raise UnsupportedError(
                    f"{self.saved.name} was saved with strides {self.stride}, but its backward is "
                    f"compiled for {tuple(stride)}: numbers would be wrong. Please report this; "
                    'kernels="aot_eager" keeps to the strides that were traced'
                )

    def on_device(
        self, size: Sequence[int], stride: Sequence[int], dtype: torch.dtype
    ) -> torch.Tensor:
        """The tensor itself, whose storage is on the device."""
        assert self.saved.tensor is not None
        storage = self.saved.tensor.untyped_storage()
        offset = (self.saved.offset + self.byte_offset) // dtype.itemsize
        result = torch.empty(0, dtype=dtype, device=storage.device)
        result.set_(storage, offset, size, stride)
        return result


def detach_results(results: Sequence[object], by_storage: Mapping[int, Saved]) -> None:
    """Let what is saved of a graph's results keep none of autograd's nodes.

    A result that the graph's own backward needs has its node by now, which has the tokens, which
    keep what is saved: dropped, the graph would stay for ever. Here `detach` shares the counter of
    modifications; within an op it does not.

    Args:
        results: of the graph, for the user.
        by_storage: what is saved, by address of the storage that was.
    """
    tensors = [r for r in results if isinstance(r, torch.Tensor) and r.grad_fn is not None]
    bases = [tensor._base for tensor in tensors if tensor._base is not None]
    for tensor in (*tensors, *bases):
        if tensor.layout is not torch.strided:
            continue
        saved = by_storage.get(tensor.untyped_storage()._cdata)
        if saved is not None and saved.tensor is tensor:
            saved.tensor = tensor.detach()


def is_movable(x: torch.Tensor, storage: torch.UntypedStorage, *, given: bool) -> bool:
    """False if moving the storage is of no use or not possible.

    Where sizes vary, it may be too small in this call. A graph's input may be a small part of
    something larger that the user holds, a batch of a data set: that must not travel. And memory
    that is not the allocator's may begin at any address, so that it would not be aligned for its
    type where it comes back to.
    """
    if storage.nbytes() < MIN_SLOT_BYTES or storage.data_ptr() % _LARGEST_ITEM_BYTES:
        return False
    if not given or x.numel() == 0:
        return True
    last = sum((size - 1) * step for size, step in zip(x.shape, x.stride(), strict=True))
    return storage.nbytes() <= _LARGEST_SHARE * (last + 1) * x.element_size()
