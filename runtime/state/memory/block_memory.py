"""What the arena of the training state asks of a device: memory for blocks, and the ways out of it.

One implementation per kind of device: `page_memory` (a CPU's), `swapped_memory` (a GPU's).

    start_out -> wait_out -> take_out          the tensors now show what is away
    start_back -> land                         they show the device's memory again
"""

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable

import torch

from teraplan.runtime.state.memory.block import Block
from teraplan.runtime.state.memory.held_memory import HeldMemory, Source
from teraplan.runtime.state.memory.move_log import MoveLog
from teraplan.runtime.state.memory.tenants import Tenants
from teraplan.values.hardware import Hardware, Link


class BlockMemory(ABC):
    """Its methods are called with `lock` held, unless they say otherwise.

    Beside a device that keeps account of its other memory it tells what it has (`Beside`).
    """

    device: torch.device
    transfer_ns: int
    """What a transfer takes beside its bytes, however small."""
    is_read_by_host = True
    """The host sees the bytes of blocks in memory at their addresses."""
    is_told_by_device = False
    """Its transfers and waits are in the device's log, under the labels of the blocks."""
    hides = False
    """Some tensors cannot be read while they are away; then there is `readable`."""

    def __init__(self, source: Source, *, keeps: bool) -> None:
        self.lock = threading.RLock()
        """Held while anything changes what a tensor shows."""
        self.blocks: dict[Block, None] = {}
        """All that there are, in the order in which they were made."""
        self.held = HeldMemory(source, keeps=keeps)
        self.tenants = Tenants()
        self.log = MoveLog()
        self.limit_bytes = 0
        """What the blocks may take."""
        self.planned_host_bytes = 0
        """What a plan takes of host memory: the rest is for what leaves otherwise."""

    # -- tensors -----------------------------------------------------------------------------------

    @abstractmethod
    def size_of(self, nbytes: int) -> int:
        """Bytes that a block for `nbytes` takes. Needs no lock."""

    @abstractmethod
    def block_of(self, tensor: torch.Tensor) -> Block | None:
        """The block of a tensor that is in one, None for any other. Needs no lock."""

    @abstractmethod
    def place(self, block: Block, like: torch.Tensor, offset: int) -> torch.Tensor:
        """An uninitialized tensor as `like`, `offset` bytes from the beginning of a block."""

    @abstractmethod
    def cut(self, block: Block, nbytes: int) -> None:
        """Keep the first `nbytes` of a block in memory, if what is behind them can be given up."""

    @abstractmethod
    def end(self, block: Block) -> None:
        """A block's last tensor has ended: give back what it has."""

    def readable(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor, or what can be read in its place: a CPU tensor of what it is now."""
        return tensor

    def tidy(self) -> None:  # noqa: B027  most have nothing of the kind
        """Take out of memory what user code has touched of blocks that are away. Takes the lock."""

    def watch(self) -> None:  # noqa: B027  most have nothing of the kind
        """Do so from now on whenever it is much, until `close`."""

    def close(self, release: Callable[[], None]) -> None:
        """Nobody will ask which blocks are empty: call `release` whenever a tensor has ended."""
        self.tenants.close(release)

    # -- out ---------------------------------------------------------------------------------------

    @abstractmethod
    def start_out(self, block: Block, host_bytes: int | None) -> None:
        """Start copying a block out, to a new record.

        Args:
            block: is in memory.
            host_bytes: of it go to host memory, whole pages or all; None: where there is room.

        Raises:
            StorageFullError: there is no room for it anywhere; nothing has happened.
        """

    @abstractmethod
    def is_as_written(self, block: Block, *, since_user_ran: bool) -> bool:
        """True if a block in memory, not known to have changed, has the bytes of its record.

        Args:
            block: has one.
            since_user_ran: the record was made, or read, after any code that nobody tells of.
        """

    @abstractmethod
    def wait_out(self, block: Block) -> None:
        """Let the block's bytes have left before anything else happens to its memory.

        Raises:
            StorageError, DeadlineError: they could not leave; the block is still whole.
        """

    @abstractmethod
    def take_out(self, block: Block) -> None:
        """Show the record in the place of the block's memory, and give that to `held`."""

    @abstractmethod
    def drop(self, block: Block) -> None:
        """Give back the room that the block's record takes."""

    # -- back --------------------------------------------------------------------------------------

    @abstractmethod
    def start_back(self, block: Block, *, is_touched: bool, urgent: bool) -> None:
        """Start reading the block's record into the memory at `block.landing`.

        Args:
            block: is away.
            is_touched: that memory has been used before.
            urgent: somebody waits for it.
        """

    @abstractmethod
    def land(self, block: Block, *, since_user_ran: bool) -> None:
        """Wait for the block's bytes, and let its tensors show them.

        Args:
            block: is coming.
            since_user_ran: nothing but graphs has run since `start_back`.

        Raises:
            StorageError, IntegrityError, DeadlineError: they could not be had.
        """

    def may_come_beside_user_code(self, block: Block) -> bool:
        """Whether a block that is away may be on its way while code runs that nobody tells of."""
        return True

    def changes(self, block: Block) -> None:  # noqa: B027  most see by the bytes what has changed
        """A use that has begun may write to the block."""

    # -- facts, for which no lock is needed --------------------------------------------------------

    @property
    def total_bytes(self) -> int:
        """Of all blocks, wherever they are."""
        return sum(block.nbytes for block in list(self.blocks))

    @property
    def held_bytes(self) -> int:
        """In memory, waiting memory included."""
        return self.held.nbytes

    def take_peak(self) -> int:
        """The most that was held since the last call."""
        return self.held.take_peak()

    @property
    def coming_bytes(self) -> int:
        """Of blocks that are being read: their memory may not have been touched yet."""
        return 0

    @property
    def waited_ns(self) -> int:
        """Time that computing has waited so far."""
        return self.log.waited_ns

    def holds(self, address: int) -> bool | None:
        """Whether the tensor whose memory begins there is in memory; None if it is another's."""
        raise NotImplementedError("the device counts its memory by itself")

    @abstractmethod
    def link(self, hardware: Hardware) -> Link | None:
        """The way that most of the state takes."""
