"""When things happened on the device, told in the host's time, and found out without waiting.

A copy's times are events; they are read when the device has long passed them. One event on a stream
of its own, which is always idle, ties the device's clock to the host's anew for every step.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from time import perf_counter_ns

from teraplan.runtime.cuda.runtime import CudaRuntime, Event, Stream
from teraplan.runtime.device import DeviceStall
from teraplan.runtime.storage import Transfer
from teraplan.values.hardware import Tier
from teraplan.values.run_record import Direction, TransferRecord


@dataclass(slots=True, kw_only=True)
class Trip:
    """One transfer of a tensor. Holds no memory of it."""

    tensor: str
    nbytes: int
    direction: Direction
    tier: Tier
    num_left: int
    """Pieces of which nothing is known yet."""
    began: Event | None = None
    last: Event | None = None
    """Before and after its copies between host and device."""
    transfers: list[Transfer] = field(default_factory=list[Transfer])
    """Its reads or writes of storage."""
    abandoned: bool = False
    """It will not be finished."""

    def finished(self) -> bool:
        """Whether every part of it has ended."""
        if self.num_left > 0 or not all(transfer.done for transfer in self.transfers):
            return False
        return self.last is None or self.last.query()

    def failed(self) -> bool:
        """Whether a part of it has ended with an error."""
        return any(transfer.error is not None for transfer in self.transfers)


class DeviceLog:
    """Transfers, and the computation's waits for them. Methods are safe from any thread."""

    def __init__(self, cuda: CudaRuntime) -> None:
        self._cuda = cuda
        self._idle = cuda.new_stream()
        self._trips: deque[Trip] = deque()
        self._stalls: deque[tuple[str, Event, Event]] = deque()
        self._tie_clocks()

    def add(self, trip: Trip) -> Trip:
        """A transfer has been started; returns it."""
        self._trips.append(trip)
        return trip

    def order(self, label: str, stream: Stream, events: Iterable[Event]) -> None:
        """Let later work of `stream` begin after `events`, and note how long it waited.

        Does not block. A wait for events that have passed is not noted: it takes no time.
        """
        cuda = self._cuda
        coming = [event for event in events if not event.query()]
        if not coming:
            return
        before = cuda.record(stream, timing=True)
        for event in coming:
            cuda.wait(stream, event)
        self._stalls.append((label, before, cuda.record(stream, timing=True)))

    def take_transfers(self) -> tuple[TransferRecord, ...]:
        """Transfers that have ended since the last call; those that failed are left out."""
        records = []
        for _ in range(len(self._trips)):
            trip = self._trips.popleft()
            if trip.finished():
                if not trip.failed():
                    records.append(self._record(trip))
            elif not trip.abandoned:
                self._trips.append(trip)
        self._tie_clocks()
        return tuple(records)

    def take_stalls(self) -> tuple[DeviceStall, ...]:
        """Waits of the device that have ended: label, start (`perf_counter_ns`), ns."""
        stalls = []
        while self._stalls and self._stalls[0][2].query():
            label, before, after = self._stalls.popleft()
            stalls.append((label, self._host_ns(before), self._cuda.elapsed_ns(before, after)))
        return tuple(stalls)

    def _record(self, trip: Trip) -> TransferRecord:
        starts = [transfer.start_ns for transfer in trip.transfers]
        ends = [transfer.end_ns for transfer in trip.transfers]
        if trip.began is not None:
            starts.append(self._host_ns(trip.began))
        if trip.last is not None:
            ends.append(self._host_ns(trip.last))
        start_ns = min(starts, default=0)
        return TransferRecord(
            tensor=trip.tensor,
            nbytes=trip.nbytes,
            direction=trip.direction,
            tier=trip.tier,
            store=trip.transfers[0].store if trip.transfers else "",
            start_ns=start_ns,
            end_ns=max([start_ns, *ends]),
        )

    def _host_ns(self, event: Event) -> int:
        return self._tied_ns + self._cuda.elapsed_ns(self._tie, event)

    def _tie_clocks(self) -> None:
        # Once per step: CUDA tells times between events as a float of milliseconds.
        self._tie = self._cuda.record(self._idle, timing=True)
        self._tie.synchronize()
        self._tied_ns = perf_counter_ns()
