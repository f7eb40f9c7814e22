"""Tensors on their way through staging memory: what `Staging` moves, and what it knows of them."""

import threading
import weakref
from collections import deque

import torch

from teraplan.runtime.cuda.log import DeviceLog, Trip
from teraplan.runtime.cuda.runtime import CudaRuntime, Event, Stream
from teraplan.runtime.process.pinned_pool import Lease
from teraplan.runtime.storage import Record, Transfer
from teraplan.values.hardware import Tier
from teraplan.values.run_record import Direction


class Piece:
    """A part of a tensor that travels as one record."""

    __slots__ = ("event", "nbytes", "offset", "record", "slot")

    def __init__(self, offset: int, nbytes: int) -> None:
        self.offset, self.nbytes = offset, nbytes
        self.event: Event | None = None
        """After the copy into the slot."""
        self.slot: weakref.ref[Lease] | None = None
        """Alive while the bytes are in host memory."""
        self.record: Record | None = None
        """Set before the slot's end, unless the write could not be queued."""


class Outgoing:
    """A tensor on its way out, and the record of it afterwards."""

    def __init__(
        self,
        cuda: CudaRuntime,
        log: DeviceLog,
        source: torch.Tensor,
        label: str,
        *,
        piece_bytes: int,
    ) -> None:
        self.label, self.nbytes = label, source.nbytes
        self.home = cuda.current_stream()
        """Computes with the source: its memory may be used again for later work of this stream."""
        self.ready = cuda.record(self.home)
        self.pieces = [
            Piece(start, min(piece_bytes, self.nbytes - start))
            for start in range(0, self.nbytes, piece_bytes)
        ]
        self.source: torch.Tensor | None = source
        self.num_issued = 0
        self.issued = threading.Event()
        """Set when no further piece will be copied from the source."""
        self.queued = threading.Event()
        """Set when every piece has its record, or one never will."""
        self.error: Exception | None = None
        self._dropped = False
        self.trip = log.add(
            Trip(
                tensor=label,
                nbytes=self.nbytes,
                direction=Direction.OUT,
                tier=Tier.STORAGE,
                num_left=len(self.pieces),
            )
        )
        self._cuda, self._log = cuda, log
        if not self.pieces:
            self.queued.set()

    @property
    def written(self) -> bool:
        """Whether storage has all bytes, or never will."""
        if self.error is not None:
            return True
        return self.queued.is_set() and all(record.write.done for record in self.records)

    @property
    def failed(self) -> bool:
        """Whether some bytes could not be written."""
        errors = (record.write.error for record in self.records)
        return self.error is not None or any(error is not None for error in errors)

    @property
    def records(self) -> list[Record]:
        """Of the pieces, in order, as far as their writes are queued."""
        return [piece.record for piece in self.pieces if piece.record is not None]

    def add(self, piece: Piece, record: Record) -> None:
        """The write of one more piece is queued."""
        piece.record = record
        self.trip.transfers.append(record.write)
        self.trip.num_left -= 1
        if not self.trip.num_left:
            self.queued.set()

    def drop(self) -> None:
        """Nobody needs the bytes any more."""
        self._dropped = self.trip.abandoned = True
        self.queued.set()

    def is_dropped(self) -> bool:
        """Whether nobody needs the bytes any more; another thread may have said so just now."""
        return self._dropped

    def fail(self, error: Exception) -> None:
        """A piece could not leave."""
        # A traceback would hold the frames that it went through, and with them slots.
        error = error.with_traceback(None)
        self.error = self.error or error
        self.trip.abandoned = True
        self.queued.set()

    def let_go(self) -> None:
        """Free the source for `home`, after the copies. Any thread, any number of times.

        Call it after `issued`. The computation's stream waits, not the caller.
        """
        source, self.source = self.source, None
        if source is None:
            return
        if self.num_issued:
            last = self.pieces[self.num_issued - 1].event
            assert last is not None, "an issued piece has an event"
            self._log.order(self.label, self.home, (last,))
        self._cuda.used_by(source, self.home)


class Incoming:
    """A tensor on its way back. Takes device memory when it is made, unless it is given."""

    def __init__(
        self,
        cuda: CudaRuntime,
        log: DeviceLog,
        outgoing: Outgoing,
        *,
        urgent: bool,
        into: torch.Tensor | None,
    ) -> None:
        self.events: list[Event] = []
        """After each copy to the landing that is queued."""
        self.label, self.outgoing, self.urgent = outgoing.label, outgoing, urgent
        self.home = cuda.current_stream()
        self.landing: torch.Tensor | None = cuda.empty(outgoing.nbytes) if into is None else into
        self.allocated = cuda.record(self.home)
        """Before this, earlier work may still use the landing's memory."""
        self.waiting = deque(outgoing.pieces)
        """Pieces that have not found a slot yet."""
        self.transfers: list[Transfer] = []
        self.landed = threading.Event()
        """Set when every copy to the landing is queued, or with `error`."""
        self.error: Exception | None = None
        self.trip = log.add(
            Trip(
                tensor=self.label,
                nbytes=outgoing.nbytes,
                direction=Direction.BACK,
                tier=Tier.STORAGE,
                num_left=len(outgoing.pieces),
            )
        )
        self._count = threading.Lock()
        self._cuda, self._log = cuda, log
        if not outgoing.pieces:
            self.landed.set()

    @property
    def done(self) -> bool:
        """Whether no byte is under way, whether or not it went well."""
        return self.landed.is_set() and all(event.query() for event in self.events)

    def add(self, event: Event) -> None:
        """The copy of one more piece is queued, before `event`."""
        with self._count:
            self.events.append(event)
            self.trip.last = event
            self.trip.num_left -= 1
            if not self.trip.num_left:
                self.landed.set()

    def fail(self, error: Exception) -> None:
        """The bytes cannot be had."""
        # A traceback would hold the frames that it went through, and with them slots.
        error = error.with_traceback(None)
        self.error = self.error or error
        self.trip.abandoned = True
        self.landed.set()

    def hand_over(self, stream: Stream) -> torch.Tensor:
        """The landing, for use on `stream`, which waits for the copies; call it after `landed`."""
        landing, self.landing = self.landing, None
        assert landing is not None, f"{self.label} has been handed over"
        self._log.order(self.label, stream, self.events)
        if stream != self.home:
            self._log.order(self.label, self.home, self.events)
            self._cuda.used_by(landing, stream)
        self.events = []
        return landing

    def __del__(self) -> None:
        # Nobody took the landing: its memory may be used again, but only after the copies to it.
        # Reads and copies that are not queued yet hold on to this object.
        if self.events:
            self.trip.abandoned = True
            for event in self.events:
                self._cuda.wait(self.home, event)


class Read:
    """The read of one piece."""

    __slots__ = ("incoming", "piece", "transfer")

    def __init__(self, incoming: Incoming, piece: Piece) -> None:
        self.incoming, self.piece = incoming, piece
        self.transfer: Transfer | None = None
