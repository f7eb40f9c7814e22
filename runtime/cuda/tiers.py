"""Where a CUDA device's tensors go: pinned host memory, storage, or both for one tensor.

put   to the host tier at the speed of the link; to storage through staging memory, or straight
      from the device where GDS has been proved to work
get   the same ways back, to memory that is taken for it or that is given
"""

from collections.abc import Callable
from functools import partial

import torch

from teraplan.errors import FallbackRefusedError, StorageFullError
from teraplan.runtime.cuda.copies import (
    CudaArrival,
    CudaCopy,
    DirectArrival,
    DirectCopy,
    HostArrival,
    HostCopy,
    SplitArrival,
    SplitCopy,
    StagedArrival,
    StagedCopy,
    aligned_landing,
)
from teraplan.runtime.cuda.host_tier import HostTier
from teraplan.runtime.cuda.log import DeviceLog, Trip
from teraplan.runtime.cuda.runtime import CudaRuntime, Event
from teraplan.runtime.cuda.staging import Staging
from teraplan.runtime.device import Copy
from teraplan.runtime.storage import Storage
from teraplan.values.hardware import Tier
from teraplan.values.run_record import Direction


class CudaTiers:
    """The host tier, and storage. Safe from any thread."""

    def __init__(
        self,
        cuda: CudaRuntime,
        log: DeviceLog,
        storage: Storage,
        *,
        host: HostTier,
        staging: Staging | None,
        require_pinned: Callable[[], None],
    ) -> None:
        """With GDS there is no `staging`.

        `require_pinned` is called whenever host memory has been taken, and raises where pageable
        memory must not be.
        """
        self.host, self.storage = host, storage
        self._cuda, self._log, self._staging = cuda, log, staging
        self._require_pinned = require_pinned
        self._worker_stream = cuda.new_stream()

    # -- out ---------------------------------------------------------------------------------------

    def put(self, source: torch.Tensor, tier: Tier, label: str, *, host_bytes: int = 0) -> CudaCopy:
        """Start copying `source`, (nbytes,) uint8; keeps it alive; see `Device.start_out`."""
        if tier is Tier.HOST:
            return self._to_host(source, label)
        return self.put_in_storage(source, label, host_bytes=host_bytes)

    def put_in_storage(self, source: torch.Tensor, label: str, *, host_bytes: int = 0) -> CudaCopy:
        """The same for storage, but for the first `host_bytes`."""
        if not host_bytes:
            return self._to_storage(source, label)
        # Storage first: it is the slower one, and has to wait for its first piece alone.
        rest = self._to_storage(source.narrow(0, host_bytes, source.nbytes - host_bytes), label)
        try:
            first = self._to_host(source.narrow(0, 0, host_bytes), label)
        except (StorageFullError, FallbackRefusedError):
            rest.drop()
            raise
        return SplitCopy(first, rest)

    def _to_host(self, source: torch.Tensor, label: str) -> HostCopy:
        copy = HostCopy(self.host, self.host.send(source, label))
        self._require_pinned()
        return copy

    def _to_storage(self, source: torch.Tensor, label: str) -> StagedCopy | DirectCopy:
        if self._staging is not None:
            return StagedCopy(self._staging, self._staging.send(source, label))
        ready = self._cuda.record(self._cuda.current_stream())
        record = self.storage.put(
            source.data_ptr(),
            source.nbytes,
            owner=source,
            label=label,
            after=partial(self._enter_worker, ready),
        )
        self._note(label, source.nbytes, Direction.OUT).transfers.append(record.write)
        return DirectCopy(self.storage, record, label)

    # -- back --------------------------------------------------------------------------------------

    def get(
        self, copy: Copy, *, urgent: bool = False, into: torch.Tensor | None = None
    ) -> CudaArrival:
        """Start bringing a copy back, to memory that is taken, or `into` memory of its size.

        That has to begin at an address as aligned as where the copy came from.
        """
        if isinstance(copy, HostCopy):
            return HostArrival(self.host, self.host.fetch(copy.inner, into))
        if isinstance(copy, SplitCopy):
            return self._both_back(copy, urgent, into)
        place = (into, 0) if into is not None else None
        return self._from_storage(copy, urgent, place)

    def _both_back(self, copy: SplitCopy, urgent: bool, into: torch.Tensor | None) -> CudaArrival:
        """Take memory for a tensor in two tiers, and start both parts into it."""
        first, rest = copy.first, copy.rest
        if into is not None:
            landing, offset = into, 0
        elif isinstance(rest, DirectCopy):
            landing, offset = aligned_landing(self._cuda, rest.record, first.nbytes)
        else:
            landing, offset = self._cuda.empty(copy.nbytes), 0
        split = self._from_storage(rest, urgent, (landing, offset + first.nbytes))
        before = landing.narrow(0, offset, first.nbytes)
        arrival = HostArrival(self.host, self.host.fetch(first.inner, into=before))
        return SplitArrival(landing, offset, split, arrival)

    def _from_storage(
        self, copy: Copy, urgent: bool, place: tuple[torch.Tensor, int] | None
    ) -> CudaArrival:
        """`place`: memory, and where in it the bytes go; taken for them if None."""
        if isinstance(copy, StagedCopy):
            into = None
            if place is not None:
                landing, offset = place
                into = landing.narrow(0, offset, copy.nbytes)
            incoming = copy.staging.fetch(copy.outgoing, urgent=urgent, into=into)
            return StagedArrival(copy.staging, incoming)
        assert isinstance(copy, DirectCopy), f"{copy} was not made here"
        enter = self._enter_worker
        arrival = DirectArrival(self._cuda, copy, enter_worker=enter, urgent=urgent, into=place)
        trip = self._note(copy.label, copy.nbytes, Direction.BACK)
        trip.transfers.append(arrival.transfer)
        return arrival

    def _enter_worker(self, event: Event) -> None:
        """In a thread of storage: its own stream for what it computes there, then wait."""
        self._cuda.work_on(self._worker_stream)
        event.synchronize()

    def _note(self, label: str, nbytes: int, direction: Direction) -> Trip:
        """The log's entry for a transfer between device and storage."""
        return self._log.add(
            Trip(tensor=label, nbytes=nbytes, direction=direction, tier=Tier.STORAGE, num_left=0)
        )
