"""Tensors to storage and back through bounded pinned memory, in pieces, beside the computation.

    out   device --copy--> slot --write--> storage      `leaving` waits for the copy, then queues
                           the write; the slot is free when the write has ended
    back  storage --read--> slot --copy--> device       `conductor` queues the copy when the read
                           has ended; `arriving` waits for the copy, then the slot is free

A slot is a lease: it is free when the last one who needs its bytes lets go. A piece that comes
back while its write is under way is copied from its slot. Writes and reads have a pool each, so
neither can take the other's memory. What finds no slot waits in line, and the conductor goes on
with it when a slot comes back. No thread here waits for another: the conductor waits for nothing
but its next message, `leaving` and `arriving` for events of copies that have been queued. So
nothing can dead-lock, and only the thread that computes ever waits for bytes, with a deadline.
"""

import logging
import threading
import weakref
from collections import deque
from collections.abc import Callable
from functools import partial
from queue import SimpleQueue
from time import perf_counter_ns

import torch

from teraplan.errors import DeadlineError, StorageError
from teraplan.runtime.cuda.event_waiter import EventWaiter
from teraplan.runtime.cuda.log import DeviceLog
from teraplan.runtime.cuda.runtime import CudaRuntime
from teraplan.runtime.cuda.staged import Incoming, Outgoing, Piece, Read
from teraplan.runtime.process.pinned_pool import Lease, PinnedPool
from teraplan.runtime.process.threads import start_thread
from teraplan.runtime.storage import Storage
from teraplan.units import MIB, format_nbytes

_log = logging.getLogger(__name__)

PIECE_BYTES = 16 * MIB
"""Most bytes of a slot: two chunks of storage, and half a millisecond on the host link."""
LEAST_BYTES = 4 * MIB
"""Least staging memory with which this works at all (pieces of 1 MiB)."""


class _ReadEnd:
    """What storage holds on to while it reads into a slot: its end is the message of the end."""

    __slots__ = ("_inbox", "_message")

    def __init__(self, inbox: "SimpleQueue[_Message]", message: Callable[[], None]) -> None:
        self._inbox, self._message = inbox, message

    def __del__(self) -> None:
        self._inbox.put(self._message)  # documented as safe in finalizers


_Message = Callable[[], None] | None


class Staging:
    """See the module's text. Safe from any thread; only `wait_out` and `wait_back` wait."""

    def __init__(
        self,
        cuda: CudaRuntime,
        log: DeviceLog,
        storage: Storage,
        *,
        nbytes: int,
        deadline_s: float,
    ) -> None:
        self.piece_bytes = min(PIECE_BYTES, nbytes // 4 // MIB * MIB)
        assert self.piece_bytes, f"{format_nbytes(nbytes)} are too little for staging"
        self.streams = (cuda.new_stream(), cuda.new_stream())
        self._cuda, self._log, self._storage = cuda, log, storage
        self._deadline_s = deadline_s
        self._num_copies = 0
        self._inbox: SimpleQueue[_Message] = SimpleQueue()
        self._stuck_out: deque[Outgoing] = deque()
        self._stuck_back: deque[Incoming] = deque()
        half = nbytes // 2
        self.writes, self.reads = (
            PinnedPool(half, pin=cuda.pin, unpin=cuda.unpin, slab_bytes=half, on_return=self._wake)
            for _ in range(2)
        )
        for pool in (self.writes, self.reads):
            pool.prepare()
        self.leaving, self.arriving = (
            EventWaiter(name, cuda.enter_thread) for name in ("teraplan-out", "teraplan-back")
        )
        self._starting = threading.Lock()
        self._closed = False
        self._conductor = threading.Thread(target=self._conduct, name="teraplan-turn", daemon=True)
        start_thread(self._conductor)

    # -- called by the thread that computes ----------------------------------------------------

    def send(self, source: torch.Tensor, label: str) -> Outgoing:
        """Start moving `source` (all bytes of a storage, uint8) to storage; keeps it alive."""
        outgoing = Outgoing(self._cuda, self._log, source, label, piece_bytes=self.piece_bytes)
        if self._stuck_out or not self._issue(outgoing):
            self._stuck_out.append(outgoing)
            self._wake()  # a slot may have come back before it was in line
        return outgoing

    def fetch(
        self, outgoing: Outgoing, *, urgent: bool, into: torch.Tensor | None = None
    ) -> Incoming:
        """Take device memory for a tensor that has left, unless given; start bringing it back."""
        incoming = Incoming(self._cuda, self._log, outgoing, urgent=urgent, into=into)
        if (self._stuck_back and not urgent) or not self._begin(incoming):
            self._get_in_line(incoming)
        return incoming

    def drop(self, outgoing: Outgoing) -> None:
        """Give back what the tensor takes here and in storage. Idempotent, safe in finalizers."""
        outgoing.drop()
        # Whoever queues the last copy looks whether it is dropped after it has set `issued`.
        if outgoing.issued.is_set():
            outgoing.let_go()
        for piece in outgoing.pieces:
            if piece.record is not None:
                self._storage.drop(piece.record)

    def wait_out(self, outgoing: Outgoing) -> int:
        """Wait until the source may be freed; ns that the caller was blocked.

        It is blocked only if a copy is not queued yet because all slots are taken.

        Raises:
            StorageError: a piece could not leave; the source is whole.
            DeadlineError: no slot came free in time; likewise.
        """
        waited_ns = self._wait(outgoing.issued, outgoing.label, "leave", self.writes)
        if outgoing.error is not None:
            raise outgoing.error
        outgoing.let_go()
        return waited_ns

    def wait_written(self, outgoing: Outgoing) -> int:
        """As `wait_out`, but until storage has the bytes: then they cannot be lost any more.

        Raises:
            StorageError: they could not be written; the source is whole.
            DeadlineError: they were not in time; likewise.
        """
        label = outgoing.label
        waited_ns = self._wait(outgoing.issued, label, "leave", self.writes)
        waited_ns += self._wait(outgoing.queued, label, "leave", self.writes)
        if outgoing.error is not None:
            raise outgoing.error
        for record in outgoing.records:
            waited_ns += self._storage.wait(record.write, what=f"{label} to leave")
        outgoing.let_go()
        return waited_ns

    def wait_back(self, incoming: Incoming) -> tuple[torch.Tensor, int]:
        """Wait until the bytes are there for the calling thread's stream: memory, ns blocked.

        Blocks until the copy from host memory is queued; the stream waits for the copy itself.

        Raises:
            StorageError, IntegrityError: the bytes could not be had.
            DeadlineError: they did not come in time.
        """
        began_ns = perf_counter_ns()
        label = incoming.label
        if incoming.waiting and not incoming.urgent and incoming.error is None:
            incoming.urgent = True
            self._get_in_line(incoming)
        if not incoming.landed.is_set():
            for transfer in list(incoming.transfers):
                # waiting for it puts it first in storage's queue
                self._storage.wait(transfer, what=f"{label} to come back")
            self._wait(incoming.landed, label, "come back", self.reads)
            waited_ns = perf_counter_ns() - began_ns
        else:
            waited_ns = 0
        if incoming.error is not None:
            raise incoming.error
        return incoming.hand_over(self._cuda.current_stream()), waited_ns

    def close(self) -> None:
        """End the threads and unregister the memory; after storage has been closed. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._inbox.put(None)
        ended = [waiter.close(self._deadline_s) for waiter in (self.leaving, self.arriving)]
        self._conductor.join(self._deadline_s)
        if not all(ended) or self._conductor.is_alive():
            _log.warning("copies hang on the device; their host memory stays registered")
            return
        for pool in (self.writes, self.reads):
            pool.close()

    def _wait(self, event: threading.Event, label: str, verb: str, pool: PinnedPool) -> int:
        if event.is_set():
            return 0
        began_ns = perf_counter_ns()
        num_copies = -1
        while not event.wait(self._deadline_s):
            if self._num_copies != num_copies:  # slow, but something moves
                num_copies = self._num_copies
                continue
            raise DeadlineError(
                f"{label} did not {verb}, and nothing moved for {self._deadline_s:g} s: of "
                f"{format_nbytes(pool.limit_bytes)} staging memory "
                f"{format_nbytes(pool.free_bytes)} are free, "
                f"{len(self._stuck_out)} tensors wait to leave and {len(self._stuck_back)} to come "
                "back; storage or the device hangs or is very slow; if that is expected, raise "
                "deadline_s"
            )
        return perf_counter_ns() - began_ns

    # -- out -----------------------------------------------------------------------------------

    def _issue(self, outgoing: Outgoing) -> bool:
        """Queue copies while there are slots; True if there is nothing left to queue.

        One thread at a time works on one tensor: the sender, then the conductor.
        """
        source = outgoing.source
        while outgoing.num_issued < len(outgoing.pieces) and not outgoing.is_dropped():
            if outgoing.error is not None or source is None:
                break
            piece = outgoing.pieces[outgoing.num_issued]
            lease = self.writes.try_take(piece.nbytes)
            if lease is None:
                return False
            self._copy_out(outgoing, piece, lease, source)
            outgoing.num_issued += 1
        outgoing.issued.set()
        if outgoing.is_dropped():
            outgoing.let_go()
        return True

    def _copy_out(
        self, outgoing: Outgoing, piece: Piece, lease: Lease, source: torch.Tensor
    ) -> None:
        cuda, stream = self._cuda, self.streams[0]
        if not outgoing.num_issued:
            cuda.wait(stream, outgoing.ready)
            outgoing.trip.began = cuda.record(stream, timing=True)
        cuda.copy(lease.parts[0].tensor, source.narrow(0, piece.offset, piece.nbytes), stream)
        piece.event = cuda.record(stream, timing=True)
        piece.slot = weakref.ref(lease)
        self._num_copies += 1
        self.leaving.when(piece.event, partial(self._write, outgoing, piece, lease))

    def _write(
        self, outgoing: Outgoing, piece: Piece, lease: Lease, error: Exception | None
    ) -> None:
        """The bytes are in the slot."""
        if outgoing.is_dropped():
            return
        if error is not None:
            outgoing.fail(StorageError(f"{outgoing.label}: not copied to host memory: {error}"))
            return
        part = lease.parts[0]
        try:
            record = self._storage.put(part.address, part.nbytes, owner=lease, label=outgoing.label)
        except StorageError as caught:
            outgoing.fail(caught.with_traceback(None))
            return
        outgoing.add(piece, record)
        if outgoing.is_dropped():
            self._storage.drop(record)

    # -- back ----------------------------------------------------------------------------------

    def _begin(self, incoming: Incoming) -> bool:
        """Start reads while there are slots; True if there is none left to start.

        One thread at a time works on one tensor: the one that fetches it, then the conductor.
        """
        while incoming.waiting and incoming.error is None:
            try:
                if not self._start(incoming, incoming.waiting[0]):
                    return False
            except Exception as error:  # noqa: BLE001  whoever waits for the bytes must hear of it
                incoming.fail(error)
                return True
            incoming.waiting.popleft()
        return True

    def _start(self, incoming: Incoming, piece: Piece) -> bool:
        outgoing = incoming.outgoing
        assert not outgoing.is_dropped(), f"{outgoing.label} was dropped and cannot come back"
        slot = piece.slot() if piece.slot is not None else None
        if slot is not None:
            assert piece.event is not None, "a slot is filled before an event"
            self._cuda.wait(self.streams[1], piece.event)
            self._land(incoming, piece, slot)
            return True
        if piece.record is None:
            raise outgoing.error or StorageError(f"{outgoing.label} has not left")
        lease = self.reads.try_take(piece.nbytes)
        if lease is None:
            return False
        read = Read(incoming, piece)
        with self._starting:
            end = _ReadEnd(self._inbox, partial(self._read_ended, read, lease))
            read.transfer = self._storage.get(
                piece.record, lease.parts[0].address, owner=end, urgent=incoming.urgent
            )
        incoming.transfers.append(read.transfer)
        incoming.trip.transfers.append(read.transfer)
        return True

    def _read_ended(self, read: Read, lease: Lease) -> None:
        with self._starting:  # a read may end before `get` has returned
            transfer = read.transfer
        if transfer is None:
            return  # `get` has raised, and whoever called it heard of it
        try:
            self._storage.wait(transfer, what=f"{transfer.label} to come back")  # it has ended
            self._land(read.incoming, read.piece, lease)
        except Exception as error:  # noqa: BLE001  whoever waits for the bytes must hear of it
            read.incoming.fail(error)

    def _land(self, incoming: Incoming, piece: Piece, lease: Lease) -> None:
        """Queue the copy of a piece from its slot to the landing."""
        cuda, stream, landing = self._cuda, self.streams[1], incoming.landing
        assert landing is not None, f"{incoming.label} was handed over before it had landed"
        cuda.wait(stream, incoming.allocated)
        if incoming.trip.began is None:
            incoming.trip.began = cuda.record(stream, timing=True)
        cuda.copy(landing.narrow(0, piece.offset, piece.nbytes), lease.parts[0].tensor, stream)
        event = cuda.record(stream, timing=True)
        self._num_copies += 1
        self.arriving.when(event, keep=lease)
        incoming.add(event)

    def _get_in_line(self, incoming: Incoming) -> None:
        if incoming.urgent:
            self._stuck_back.appendleft(incoming)
        else:
            self._stuck_back.append(incoming)
        self._wake()

    # -- the conductor -------------------------------------------------------------------------

    def _wake(self) -> None:
        self._inbox.put(self._go_on)

    def _conduct(self) -> None:
        self._cuda.enter_thread()
        while True:
            message = self._inbox.get()
            if message is None:
                self._give_up()
                return
            try:
                message()
            except Exception:  # noqa: BLE001  the others' bytes must move on
                _log.critical("a transfer could not go on", exc_info=True)
            del message  # it may hold a slot

    def _go_on(self) -> None:
        """Start what waits for a slot, in order, as long as there are slots."""
        while self._stuck_out and self._try_issue(self._stuck_out[0]):
            self._stuck_out.popleft()
        while self._stuck_back:
            incoming = self._stuck_back.popleft()
            if not self._begin(incoming):
                self._stuck_back.appendleft(incoming)
                return

    def _try_issue(self, outgoing: Outgoing) -> bool:
        try:
            return self._issue(outgoing)
        except Exception as error:  # noqa: BLE001  whoever waits for it must hear of it
            outgoing.fail(error)
            outgoing.issued.set()
            return True

    def _give_up(self) -> None:
        closed = StorageError("the storage was closed")
        for outgoing in self._stuck_out:
            outgoing.fail(closed)
            outgoing.issued.set()
        for incoming in self._stuck_back:
            incoming.fail(closed)
