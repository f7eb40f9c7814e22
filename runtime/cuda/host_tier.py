"""Tensors in pinned host memory: copied out and back on streams of their own.

    out   the side stream waits for the computation, copies, records `left`; the computation waits
          for `left` when the tensor is freed
    back  the side stream waits for `left` and for the landing's memory, copies, records `arrived`;
          the computation waits for `arrived` when the tensor is needed

The pool's memory is held by whoever copies from or to it, so it can be dropped at any time.
"""

import torch

from teraplan.errors import StorageFullError
from teraplan.runtime.cuda.event_waiter import EventWaiter
from teraplan.runtime.cuda.log import DeviceLog, Trip
from teraplan.runtime.cuda.runtime import CudaRuntime, Event, Stream
from teraplan.runtime.process.pinned_pool import Lease, PinnedPool
from teraplan.units import format_nbytes
from teraplan.values.hardware import Tier
from teraplan.values.run_record import Direction


class InHost:
    """A tensor in the host tier, or on its way there."""

    def __init__(
        self,
        lease: Lease,
        source: torch.Tensor,
        label: str,
        *,
        home: Stream,
        left: Event,
    ) -> None:
        self.label, self.nbytes = label, source.nbytes
        self.lease: Lease | None = lease
        self.source: torch.Tensor | None = source
        self.home, self.left = home, left


class Landing:
    """A tensor on its way back from the host tier."""

    def __init__(self, cuda: CudaRuntime, label: str, memory: torch.Tensor, home: Stream) -> None:
        self.arrived: Event | None = None
        self.label, self.home = label, home
        self.memory: torch.Tensor | None = memory
        self._cuda = cuda

    def __del__(self) -> None:
        # Not taken: its memory may be used again only after the copy to it.
        if self.memory is not None and self.arrived is not None:
            self._cuda.wait(self.home, self.arrived)


class HostTier:
    """Copies between the device and a pool of host memory. Safe from any thread; never blocks."""

    def __init__(
        self,
        cuda: CudaRuntime,
        log: DeviceLog,
        pool: PinnedPool,
        *,
        streams: tuple[Stream, Stream],
        waiters: tuple[EventWaiter, EventWaiter],
    ) -> None:
        self.pool = pool
        self._cuda, self._log = cuda, log
        self._out, self._back = streams
        self._leaving, self._arriving = waiters

    def send(self, source: torch.Tensor, label: str, *, is_shown: bool = False) -> InHost:
        """Start copying `source` (all bytes of a storage, uint8); keeps it alive.

        Args:
            source: on the device.
            label: for people.
            is_shown: kernels may use what lies there.

        Raises:
            StorageFullError: the pool has no room; nothing has happened.
        """
        cuda = self._cuda
        lease = self.pool.try_take(source.nbytes, in_one_part=is_shown, is_shown=is_shown)
        if lease is None:
            pageable = f" ({self.pool.why_not_pinned})" if self.pool.why_not_pinned else ""
            whole = " in one piece" if is_shown else ""
            raise StorageFullError(
                f"{label}: {format_nbytes(source.nbytes)} do not fit{whole} in the host tier, of "
                f"whose {format_nbytes(self.pool.limit_bytes)} "
                f"{format_nbytes(self.pool.free_bytes)} are free; raise host_budget{pageable}"
            )
        home = cuda.current_stream()
        cuda.wait(self._out, cuda.record(home))
        began, offset = cuda.record(self._out, timing=True), 0
        for part in lease.parts:
            cuda.copy(part.tensor, source.narrow(0, offset, part.nbytes), self._out)
            offset += part.nbytes
        left = cuda.record(self._out, timing=True)
        self._leaving.when(left, keep=lease)
        self._note(label, source.nbytes, Direction.OUT, began, left)
        return InHost(lease, source, label, home=home, left=left)

    def let_go(self, copy: InHost) -> None:
        """Free the source for its stream, after the copy. The stream waits, not the caller."""
        source, copy.source = copy.source, None
        if source is not None:
            self._log.order(copy.label, copy.home, (copy.left,))
            self._cuda.used_by(source, copy.home)

    def fetch(self, copy: InHost, into: torch.Tensor | None = None) -> Landing:
        """Take device memory, unless it is given, and start copying a tensor into it."""
        cuda, lease = self._cuda, copy.lease
        assert lease is not None, f"{copy.label} was dropped and cannot come back"
        home = cuda.current_stream()
        memory = cuda.empty(copy.nbytes) if into is None else into
        landing = Landing(cuda, copy.label, memory, home)
        cuda.wait(self._back, cuda.record(home))
        cuda.wait(self._back, copy.left)
        began, offset = cuda.record(self._back, timing=True), 0
        for part in lease.parts:
            cuda.copy(memory.narrow(0, offset, part.nbytes), part.tensor, self._back)
            offset += part.nbytes
        landing.arrived = cuda.record(self._back, timing=True)
        self._arriving.when(landing.arrived, keep=lease)
        self._note(copy.label, copy.nbytes, Direction.BACK, began, landing.arrived)
        return landing

    def take(self, landing: Landing) -> torch.Tensor:
        """The memory, for use on the current stream, which waits for the copy."""
        memory = landing.memory
        assert memory is not None, f"{landing.label} has been handed over"
        assert landing.arrived is not None, "set when the copy was queued"
        stream = self._cuda.current_stream()
        self._log.order(landing.label, stream, (landing.arrived,))
        if stream != landing.home:
            self._log.order(landing.label, landing.home, (landing.arrived,))
            self._cuda.used_by(memory, stream)
        landing.memory = None
        return memory

    def drop(self, copy: InHost) -> None:
        """Give back what the tensor takes here. Idempotent, safe in finalizers."""
        self.let_go(copy)
        copy.lease = None  # a copy under way still holds it

    def _note(
        self, label: str, nbytes: int, direction: Direction, began: Event, last: Event
    ) -> None:
        self._log.add(
            Trip(
                tensor=label,
                nbytes=nbytes,
                direction=direction,
                tier=Tier.HOST,
                num_left=0,
                began=began,
                last=last,
            )
        )
