"""What the engine asks of a device: how much memory is in use, and how bytes leave and come back.

One implementation per kind of device (`cpu_device`, `cuda_device`); nothing else in the project
knows which one it is. A copy out and a copy back run beside the computation:

    copy    = device.start_out(tensor, tier, label)     the bytes are on their way out
    waited  = copy.wait_out()                           ... and have left: the tensor may be freed
    arrival = device.start_back(copy)                   memory is taken, the bytes are on their way
    storage, waited = arrival.wait()                    ... and are there
    copy.drop()                                         the copy is no longer needed
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import torch

from teraplan.runtime.host_lane import HostLane, PlainLane
from teraplan.runtime.process.pinned_pool import PinnedPool
from teraplan.runtime.storage import Storage, StoreInfo
from teraplan.values.hardware import Hardware, Tier
from teraplan.values.run_record import TransferRecord
from teraplan.values.step_trace import TensorKind

if TYPE_CHECKING:
    from teraplan.runtime.state.memory.block_memory import BlockMemory

MEASURED_WITHIN_BYTES = 2 << 20
"""So much free memory of a process may be counted as used, in one run more than in another."""


DeviceStall = tuple[str, int, int]
"""A wait of the device for a tensor: its name, start (`time.perf_counter_ns`) and length in ns."""


class Copy(ABC):
    """The bytes of one storage in another tier, or on their way there."""

    nbytes: int
    tier: Tier

    @abstractmethod
    def wait_out(self) -> int:
        """Wait until the bytes have left; the time waited in ns.

        Raises:
            StorageError, DeadlineError: the bytes could not leave; the tensor is still whole.
        """

    @abstractmethod
    def drop(self) -> None:
        """Give back the room that the copy takes. Idempotent, safe with the copy under way."""


class Arrival(ABC):
    """Device memory that the bytes of a copy are coming to."""

    @abstractmethod
    def wait(self) -> tuple[torch.UntypedStorage, int, int]:
        """Wait for the bytes: the storage that holds them, their byte offset in it, ns waited.

        Raises:
            StorageError, IntegrityError, DeadlineError: the bytes could not be had.
        """


class Beside(Protocol):
    """Memory on the device that somebody else accounts for: the moving training state's."""

    @property
    def held_bytes(self) -> int:
        """On the device now."""
        ...

    def take_peak(self) -> int:
        """The most on the device since the last call."""
        ...

    @property
    def coming_bytes(self) -> int:
        """Part of `held_bytes` that may not have been touched yet."""
        ...

    @property
    def waited_ns(self) -> int:
        """Time that computing has waited for it."""
        ...

    @property
    def total_bytes(self) -> int:
        """Of all its tensors, on the device or not."""
        ...

    def holds(self, address: int) -> bool | None:
        """Whether a tensor whose memory begins there is on the device; None if it is another's."""
        ...


class SparePages(Protocol):
    """Touched memory of this process that nothing needs now. In whole pages, each time in a row."""

    def lend(self, nbytes: int) -> int | None:
        """Address of so many bytes, which may be moved elsewhere; None if there are none."""
        ...

    def hand_in(self, address: int, nbytes: int) -> None:
        """Keep what lies there for whoever needs it next."""
        ...


class Device(ABC):
    """Memory and transfers of one device."""

    has_host_beside = False
    """True if the host's cores and memory are not the device's own."""

    name: str
    type: str
    """As in `torch.device(type)`."""
    spare_pages: SparePages | None = None
    """What training state does not need others take, and the other way round."""
    host_pool: PinnedPool
    """Host memory for what is updated on the host's cores; part of the host budget."""

    waits_to_tell = False
    """To tell when a step did what, the host has to wait until the device has ended it."""
    moves_state_unasked = True
    """Parameters, gradients and optimizer state may start to leave it where that is needed."""
    waits_for: Beside | None = None
    """What `keeps_beside` was told of, where the thread that computes waits for it."""
    shows_state_in_files = True
    """What has left is read where it lies in storage, so it cannot be encrypted there."""

    @property
    @abstractmethod
    def storage(self) -> Storage:
        """The spill files."""

    @property
    def why_state_stays(self) -> str:
        """Why parameters, gradients and optimizer state cannot leave it; "" if they can."""
        return "not implemented"

    def state_memory(self) -> "BlockMemory":
        """Memory for those that move."""
        raise NotImplementedError(f"training state cannot leave {self.name}")

    def tier_of_state(self, kind: TensorKind) -> Tier | None:
        """The one tier that training state of a kind goes to; None: any."""
        return None

    def open_lane(self) -> HostLane:
        """Copies of gradients to the host's cores, and of parameters back."""
        return PlainLane()

    def keeps_beside(self, beside: Beside) -> None:
        """Leave the memory of `beside` out of all figures but `peak_bytes`."""
        raise NotImplementedError(f"training state cannot leave {self.name}")

    @abstractmethod
    def hardware(self) -> Hardware:
        """Capacities and link speeds, measured if they are not known yet."""

    @abstractmethod
    def capacity_bytes(self) -> int:
        """Memory that this process may have of the device, what it uses already included."""

    @abstractmethod
    def state_bytes(self) -> int:
        """Bytes of all tensors on the device now."""

    @abstractmethod
    def measure_exactly(self) -> None:
        """Make `take_peak` exact, at the cost of speed, until `run_fast`."""

    @abstractmethod
    def run_fast(self) -> None:
        """Prepare memory for steps at full speed."""

    def limit_host(self, nbytes: int) -> None:  # noqa: B027  most keep to what plans say
        """Of a host budget in per cent it is known by now how many bytes that is for some steps."""

    def has_compiled(self) -> None:  # noqa: B027  most do not share memory with it
        """The first graphs were compiled: what that took and does not need any more is free again.

        Called once, since to look for it takes some time.
        """

    def give_back_heap(self, *, cycles: bool) -> None:  # noqa: B027  most do not share memory with it
        """What was done between steps of training is over: the memory that it took is free again.

        Args:
            cycles: it leaves some behind, as the making of a plan does. Looking for them takes a
                third of a second in a process with a compiler in it.
        """

    def hold_less(self, nbytes: int) -> None:
        """The process is to hold `nbytes` less of the device from now on than it has so far."""
        self.run_fast()

    def let_go(self, nbytes: int) -> None:  # noqa: B027  most keep nothing
        """Code between two steps has taken `nbytes` more than a step does, and left them."""

    @abstractmethod
    def resident_bytes(self) -> int:
        """Bytes that the process holds of the device now, tensors or not."""

    def tensors_and_overhead(self) -> tuple[int, int]:
        """`state_bytes`, and what the process holds of the device beside, what is free given back.

        Two figures of one count, which takes a while.
        """
        tensors_bytes = self.state_bytes()
        return tensors_bytes, self.resident_bytes() - tensors_bytes

    def overhead_bytes(self) -> int:
        """The second of `tensors_and_overhead`."""
        return self.tensors_and_overhead()[1]

    @abstractmethod
    def take_peak(self) -> int:
        """The most `resident_bytes` has been since the last call of this."""

    @abstractmethod
    def keep_under(self, limit_bytes: int, headroom_bytes: int, free_bytes: int = 0) -> None:
        """Give free memory back to the system if the process holds too much. Called at every site.

        Args:
            limit_bytes: what the process may hold of the device.
            headroom_bytes: what it may hold more for a while where giving back costs time.
            free_bytes: what it is to hold less where so much is not in use, so that other code has
                room between two sites.
        """

    def make_room(self, nbytes: int) -> None:
        """Training state is about to take `nbytes`: give free memory back that is in its way."""
        raise NotImplementedError(f"training state cannot leave {self.name}")

    def make_room_for_tensors(self, nbytes: int) -> None:
        """Tensors of `nbytes` are about to be made between two sites, in a step that moves state.

        Needed only where their memory does not come out of what is free anyway.
        """
        self.make_room(nbytes)

    @abstractmethod
    def peak_bytes(self) -> int:
        """The same, measuring on."""

    @abstractmethod
    def mark(self) -> object:
        """A point in the computation, for `elapsed_ns`."""

    @abstractmethod
    def elapsed_ns(self, start: object, end: object) -> int:
        """Time of the computation between two marks; may wait for the device."""

    @abstractmethod
    def start_out(
        self, tensor: torch.Tensor, tier: Tier, label: str, *, host_bytes: int = 0
    ) -> Copy:
        """Start copying all bytes of `tensor`'s storage to `tier`; keeps them alive meanwhile.

        With `host_bytes`, which is less than all, so many of its first bytes go to the host tier
        and the rest to storage, both at the same time; it is one copy all the same.

        Raises:
            StorageFullError: there is no room; nothing has happened. A device that stages bytes in
                host memory may learn it later: then `wait_out` or the copy's arrival raises it.
        """

    @abstractmethod
    def start_back(self, copy: Copy, *, urgent: bool = False) -> Arrival:
        """Take device memory for a copy and start bringing its bytes back into it."""

    @abstractmethod
    def empty(self, size: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """An uninitialized dense tensor on the device, in a storage of its own."""

    @abstractmethod
    def take_transfers(self) -> tuple[TransferRecord, ...]:
        """Transfers finished since the last call, with `time.perf_counter_ns` times."""

    def take_stalls(self) -> tuple[DeviceStall, ...]:
        """Waits of the computation that did not block its thread, ended since the last call.

        Called at the end of every step. Devices that compute in the calling thread have none:
        there, `wait_out` and `wait` tell all.
        """
        return ()

    @property
    def fallbacks(self) -> tuple[str, ...]:
        """What takes a slower path than it should, one sentence each."""
        return tuple(fallback for store in self.stores() for fallback in store.fallbacks)

    @abstractmethod
    def stores(self) -> tuple[StoreInfo, ...]:
        """The storage directories and how they are reached."""

    def describe(self) -> str:
        """What is on its way, for people. From anywhere, a signal handler too: takes no lock."""
        return self.storage.describe()

    @abstractmethod
    def close(self) -> None:
        """Release all files, threads and memory. Idempotent."""
