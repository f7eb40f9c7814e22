"""What is under way: a Record lies in stores, a Transfer moves it, in Chunks.

    address                                     address + nbytes
    | head |          body, in chunks          | tail |      head, tail: copies in RAM
           |  chunk 0  |  chunk 1  | .. |                    body: straight to the file

Direct I/O wants aligned memory. A tensor is where it is, so what lies before the first aligned
address and after the last whole block (a few KiB at most) stays in RAM and no byte of the body is
copied. It comes back without a copy, too, if it lands at an address with the same remainder. Each
chunk has a place of its own: those of a large tensor are spread over all stores.
"""

import ctypes
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from time import perf_counter_ns
from typing import NamedTuple

from teraplan.errors import StorageError, bare
from teraplan.runtime.storage.lane import Group
from teraplan.runtime.storage.memory import copy_in, copy_out
from teraplan.units import MIB
from teraplan.values.run_record import Direction

CHUNK_BYTES = 8 * MIB
"""Smaller chunks cost twice the CPU per byte, larger ones make urgent reads wait longer."""


class Transfer:
    """One record on its way out or back. Times are those of `time.perf_counter_ns`."""

    __slots__ = (
        "__weakref__",
        "_done",
        "after",
        "direction",
        "end_ns",
        "error",
        "group",
        "label",
        "nbytes",
        "num_chunks_left",
        "owner",
        "progress_ns",
        "queued_ns",
        "record",
        "start_ns",
        "store",
        "urgent",
    )

    def __init__(
        self,
        *,
        label: str,
        nbytes: int,
        direction: Direction,
        store: str,
        owner: object,
        after: Callable[[], object] | None,
    ) -> None:
        self.label = label
        self.nbytes = nbytes
        self.direction = direction
        self.store = store
        self.owner = owner
        """Keeps the memory alive; None as soon as the transfer has ended."""
        self.after = after
        """Called by a worker before it touches the memory, e.g. an event's `synchronize`."""
        self.queued_ns = perf_counter_ns()
        self.start_ns = 0
        self.end_ns = 0
        self.progress_ns = self.queued_ns
        self.error: StorageError | None = None
        self.urgent = False
        self.num_chunks_left = 0
        self.record: Record | None = None
        """The record while the transfer is under way (later it would be a reference cycle)."""
        self.group: Group | None = None
        """Its chunks, where they are moved without Python."""
        self._done = False

    def __repr__(self) -> str:
        state = "failed" if self.error else "done" if self._done else "under way"
        return f"<Transfer {self.direction} {self.label!r} {self.nbytes} B {state}>"

    @property
    def done(self) -> bool:
        """Whether it has ended, well or with `error`; its owner has then been let go."""
        if not self._done and self.has_ended:
            self._settle()
        return self._done

    @property
    def has_ended(self) -> bool:
        """The same, where it is too early to let anything go."""
        return self._done or (self.group is not None and self.group.left == 0)

    def raise_if_failed(self) -> None:
        """Raise its error, a new one each time: the frames that it passes would stay with it."""
        if self.error is not None:
            raise bare(self.error) from self.error.__cause__

    def count_down(self) -> bool:
        """A chunk of it has ended; whether that was the last."""
        self.num_chunks_left -= 1
        self.progress_ns = perf_counter_ns()
        return self.num_chunks_left == 0

    def let_go(self) -> None:
        """It is over with the memory."""
        self.owner = self.after = None

    def mark_done(self) -> None:
        """Ends it: times, and everything it held is let go."""
        if self.has_ended:
            self._settle()
        else:
            self.end_ns = perf_counter_ns()
            self.start_ns = self.start_ns or self.end_ns
        self.let_go()
        self.record = None
        self._done = True

    def _settle(self) -> None:
        """What was moved without Python has ended; an interrupt leaves it to be done again."""
        if self.group is not None and self.group.left == 0:
            self.start_ns, self.end_ns = self.group.start_ns, self.group.end_ns
            self.let_go()
            self._done = True


class Record:
    """Bytes that lie in one or several stores.

    Attributes:
        nbytes: how many.
        alignment: a landing address modulo this must equal `address_remainder`.
        write: the transfer that put it there.
        is_compared: by whoever put it, when it is back: it needs no checksums.
    """

    __slots__ = (
        "_head",
        "_head_bytes",
        "_tail",
        "_tail_bytes",
        "address_remainder",
        "alignment",
        "body_bytes",
        "checksums",
        "dropped",
        "give_back",
        "is_compared",
        "nbytes",
        "num_chunks",
        "places",
        "under_way",
        "waiting_reads",
        "write",
    )

    def __init__(
        self,
        address: int,
        nbytes: int,
        *,
        alignment: int,
        block_bytes: int,
        is_compared: bool,
        give_back: Callable[["Record"], None],
    ) -> None:
        self.nbytes = nbytes
        self.is_compared = is_compared
        self.give_back = give_back
        self._head_bytes = min(-address % alignment, nbytes)
        self.body_bytes = (nbytes - self._head_bytes) // block_bytes * block_bytes
        self._tail_bytes = nbytes - self._head_bytes - self.body_bytes
        self._head = self._tail = b""
        # A record that is small enough to be all ends may land anywhere.
        self.alignment = alignment if self.body_bytes else 1
        self.address_remainder = address % self.alignment
        self.num_chunks = max(1, -(-self.body_bytes // CHUNK_BYTES))
        self.checksums = (ctypes.c_uint64 * self.num_chunks)()
        self.places: list[Place] = []
        """Of each chunk."""
        self.under_way: list[Transfer] = []
        """Transfers whose end has not been seen to."""
        self.waiting_reads: list[tuple[Transfer, int]] = []
        """Reads, with their addresses, that came while the write was still queued."""
        self.write: Transfer
        self.dropped = False  # last: from here on `__del__` has something to give back

    def __del__(self) -> None:
        # An interrupt may come before whoever put it has got hold of it.
        if not getattr(self, "dropped", True):
            self.give_back(self)

    @property
    def is_unused(self) -> bool:
        """Whether nothing of it is being moved, or will be."""
        return all(transfer.has_ended for transfer in self.under_way)

    def keep_ends(self, address: int) -> None:
        """Copies head and tail of the memory at `address` into the record."""
        if self._head_bytes:
            self._head = copy_out(address, self._head_bytes)
        if self._tail_bytes:
            self._tail = copy_out(address + self.nbytes - self._tail_bytes, self._tail_bytes)

    def restore_ends(self, address: int) -> None:
        """Copies head and tail back into the memory at `address`."""
        if self._head_bytes:
            copy_in(address, self._head)
        if self._tail_bytes:
            copy_in(address + self.nbytes - self._tail_bytes, self._tail)

    def chunks(self, transfer: Transfer, address: int) -> Iterator["Chunk"]:
        """The body's parts, for `transfer` with the record's memory at `address`.

        There is at least one, so that the ends, too, are copied by a worker after `after`.
        """
        for index, place in enumerate(self.places):
            yield Chunk(
                transfer=transfer,
                record=self,
                index=index,
                record_address=address,
                address=address + self._head_bytes + index * CHUNK_BYTES,
                place=place,
                nbytes=self.chunk_bytes(index),
            )

    def checksum_address(self, index: int) -> int:
        """Where that of a chunk lies."""
        return ctypes.addressof(self.checksums) + index * ctypes.sizeof(ctypes.c_uint64)

    def chunk_bytes(self, index: int) -> int:
        """Length of the chunk of this number."""
        return min(CHUNK_BYTES, self.body_bytes - index * CHUNK_BYTES)


class Place(NamedTuple):
    """Where a chunk lies."""

    store: int
    offset: int


@dataclass(slots=True, kw_only=True, eq=False)
class Chunk:
    """What one worker moves in one piece."""

    transfer: Transfer
    record: Record
    index: int
    record_address: int
    address: int
    place: Place
    nbytes: int
    taken: bool = False
    """Set when a worker has it: a promoted chunk is in two queues."""
    start_ns: int = 0
    """When a worker took it, 0 before."""
    abandoned: bool = False
    """Its worker is stuck, and another one writes the same bytes elsewhere."""
    owner: object = None
    """What an abandoned chunk keeps alive until its worker comes back."""
    failure: int = 0
    """Of a lane that has tried it: an errno, or see `lane`."""
    was_moved: bool = False
    """It was to be written to another store at first."""
    failed_in: frozenset[int] = frozenset()
    """Stores that could not write it."""

    def moved(self, place: Place, failed_in: frozenset[int]) -> "Chunk":
        """The same bytes, to be written at another place since these stores could not."""
        return Chunk(
            transfer=self.transfer,
            record=self.record,
            index=self.index,
            record_address=self.record_address,
            address=self.address,
            place=place,
            nbytes=self.nbytes,
            was_moved=True,
            failed_in=failed_in,
        )
