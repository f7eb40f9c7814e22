"""What the CUDA back end asks of CUDA: streams, events, copies, pinning, the allocator's figures.

`torch_runtime` makes the calls through torch. Tests put a runtime in its place that runs
streams as threads, late and in any legal order, so that everything above is tested without a GPU.

Streams and events are those of torch. Work of one stream runs in order; between streams there is no
order but what `wait` makes. Memory from `empty` belongs to the stream that was current: when it is
freed, later work of that stream may use it again at once.
"""

from abc import ABC, abstractmethod
from typing import NamedTuple, Protocol, runtime_checkable

import torch


class Stream(Protocol):
    """A queue of work on the device."""


@runtime_checkable
class Event(Protocol):
    """A point in a stream, recorded when the event is made."""

    def query(self) -> bool:
        """Whether all work before it has ended."""
        ...

    def synchronize(self) -> None:
        """Block this thread, without the GIL, until all work before it has ended."""
        ...


class Reserved(NamedTuple):
    """Memory that the allocator has of the device."""

    nbytes: int
    releasable_bytes: int
    """Of these, what `empty_cache` can give back: segments in which no tensor has a part."""


class CudaRuntime(ABC):
    """One device. Methods may be called from any thread; none blocks unless it says so.

    A thread of ours calls `enter_thread` before anything else, and before it waits for events: in
    one that does not, some of CUDA's calls take memory of the machine's first GPU for themselves.
    """

    name: str
    type: str
    device: torch.device

    @abstractmethod
    def current_stream(self) -> Stream:
        """The stream on which the calling thread computes."""

    @abstractmethod
    def new_stream(self) -> Stream:
        """A stream that nothing else is ordered with."""

    @abstractmethod
    def record(self, stream: Stream, *, timing: bool = False) -> Event:
        """An event after all work that `stream` has been given so far."""

    @abstractmethod
    def wait(self, stream: Stream, event: Event) -> None:
        """Let later work of `stream` begin after `event`; does not block the caller."""

    @abstractmethod
    def copy(self, target: torch.Tensor, source: torch.Tensor, stream: Stream) -> None:
        """Queue a copy of bytes on `stream`. Both tensors must live until it has ended.

        Blocks until it has ended if the host's side is not pinned.
        """

    @abstractmethod
    def empty(self, nbytes: int) -> torch.Tensor:
        """Device memory of the current stream, (nbytes,), uint8."""

    @abstractmethod
    def used_by(self, tensor: torch.Tensor, stream: Stream) -> None:
        """The memory of `tensor` may be used again only after the work that `stream` has now.

        Costs nothing if the memory is of that stream.
        """

    @abstractmethod
    def bytes_of(self, storage: torch.UntypedStorage) -> torch.Tensor:
        """All of `storage`, (nbytes,), uint8; shares and keeps its memory.

        Raises:
            UnsupportedError: it is on another device.
        """

    @abstractmethod
    def elapsed_ns(self, start: Event, end: Event) -> int:
        """Time between two timing events that have ended."""

    @abstractmethod
    def enter_thread(self) -> None:
        """Make this device current in the calling thread, for good."""

    @abstractmethod
    def work_on(self, stream: Stream) -> None:
        """Make `stream` and this device current in the calling thread, for good."""

    @abstractmethod
    def pin(self, address: int, nbytes: int) -> str:
        """Register pages of host memory with the device; "" or why that failed."""

    @abstractmethod
    def unpin(self, address: int) -> None:
        """Undo `pin`."""

    @abstractmethod
    def why_not_shown(self, address: int) -> str:
        """Why kernels cannot use pinned host memory by its address; "" if they can."""

    @abstractmethod
    def allocated(self, which: str) -> int:
        """Bytes that the allocator has given to tensors; `which` "current" or "peak"."""

    @abstractmethod
    def reserved(self) -> Reserved:
        """What the allocator has of the device. Some 300 numbers are put together for that."""

    @abstractmethod
    def reset_peaks(self) -> None:
        """Let the peak start from what is in use now."""

    @abstractmethod
    def empty_cache(self) -> None:
        """Give memory that no tensor uses back to the device; blocks until the device is idle."""

    @abstractmethod
    def free_bytes(self) -> int:
        """Device memory that no process has, and that the allocator of this one may take."""
