"""Copies of a CUDA device's tensors, and their ways back: what `CudaDevice` hands out.

HostCopy      in pinned host memory (`host_tier`)
StagedCopy    in storage, through pinned staging memory (`staging`)
DirectCopy    in storage, straight from the device by GDS
SplitCopy     the first bytes in host memory, the rest in storage in one of the two ways
"""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from functools import partial

import torch

from teraplan.runtime.cuda.host_tier import HostTier, InHost, Landing
from teraplan.runtime.cuda.runtime import CudaRuntime, Event
from teraplan.runtime.cuda.staged import Incoming, Outgoing
from teraplan.runtime.cuda.staging import Staging
from teraplan.runtime.device import Arrival, Copy
from teraplan.runtime.storage import Record, Storage
from teraplan.values.hardware import Tier


class CudaCopy(Copy):
    """`wait_out` lets the tensor's memory go; that its bytes are in storage it does not say."""

    @property
    @abstractmethod
    def written(self) -> bool:
        """True if no byte is under way, whether or not it went well."""

    @property
    def failed(self) -> bool:
        """True if some bytes could not be written."""
        return any(record.write.error is not None for record in self.records)

    @property
    def host_bytes(self) -> int:
        """Of its bytes, those in the host tier: the first ones."""
        return 0

    @property
    def records(self) -> Sequence[Record]:
        """Of the others, in order, once they are `written`."""
        return ()

    def wait_written(self) -> None:
        """Wait until its bytes cannot be lost any more; then the tensor may be freed.

        Raises:
            StorageError, DeadlineError: they could not be written; the tensor is still whole.
        """
        self.wait_out()


class CudaArrival(Arrival):
    """On its way to memory of the device."""

    @property
    @abstractmethod
    def done(self) -> bool:
        """True if no byte is under way, whether or not it went well."""


class HostCopy(CudaCopy):
    """A tensor in pinned host memory."""

    tier = Tier.HOST

    def __init__(self, host: HostTier, inner: InHost) -> None:
        self.nbytes, self.inner, self.host = inner.nbytes, inner, host

    @property
    def shown(self) -> torch.Tensor:
        """Where it lies in one piece, (nbytes,), uint8."""
        lease = self.inner.lease
        assert lease is not None, "dropped copies are shown nowhere"
        (part,) = lease.parts
        return part.tensor

    def wait_out(self) -> int:
        """See `Copy`."""
        self.host.let_go(self.inner)
        return 0

    @property
    def written(self) -> bool:
        """See `CudaCopy`."""
        return self.inner.left.query()

    @property
    def host_bytes(self) -> int:
        """See `CudaCopy`."""
        return self.nbytes

    def drop(self) -> None:
        """See `Copy`."""
        self.host.drop(self.inner)


class HostArrival(CudaArrival):
    """A tensor on its way back from there."""

    def __init__(self, host: HostTier, landing: Landing) -> None:
        self._host, self._landing = host, landing

    @property
    def done(self) -> bool:
        """See `CudaArrival`."""
        return self._landing.arrived is None or self._landing.arrived.query()

    def wait(self) -> tuple[torch.UntypedStorage, int, int]:
        """See `Arrival`."""
        return self._host.take(self._landing).untyped_storage(), 0, 0


class StagedCopy(CudaCopy):
    """A tensor in storage, through staging memory."""

    tier = Tier.STORAGE

    def __init__(self, staging: Staging, outgoing: Outgoing) -> None:
        self.nbytes, self.outgoing, self.staging = outgoing.nbytes, outgoing, staging

    def wait_out(self) -> int:
        """See `Copy`."""
        return self.staging.wait_out(self.outgoing)

    @property
    def written(self) -> bool:
        """See `CudaCopy`."""
        return self.outgoing.written

    @property
    def failed(self) -> bool:
        """See `CudaCopy`."""
        return self.outgoing.failed

    @property
    def records(self) -> Sequence[Record]:
        """See `CudaCopy`."""
        return self.outgoing.records

    def wait_written(self) -> None:
        """See `CudaCopy`."""
        self.staging.wait_written(self.outgoing)

    def drop(self) -> None:
        """See `Copy`."""
        self.staging.drop(self.outgoing)


class StagedArrival(CudaArrival):
    """A tensor on its way back the same way."""

    def __init__(self, staging: Staging, incoming: Incoming) -> None:
        self._staging, self._incoming = staging, incoming

    @property
    def done(self) -> bool:
        """See `CudaArrival`."""
        return self._incoming.done

    def wait(self) -> tuple[torch.UntypedStorage, int, int]:
        """See `Arrival`."""
        memory, waited_ns = self._staging.wait_back(self._incoming)
        return memory.untyped_storage(), 0, waited_ns


class DirectCopy(CudaCopy):
    """GDS: storage reads the tensor's own memory, so it may be freed only after the write."""

    tier = Tier.STORAGE

    def __init__(self, storage: Storage, record: Record, label: str) -> None:
        self.nbytes, self.record, self.label = record.nbytes, record, label
        self.storage = storage

    def wait_out(self) -> int:
        """See `Copy`."""
        return self.storage.wait(self.record.write, what=f"{self.label} to leave")

    @property
    def written(self) -> bool:
        """See `CudaCopy`."""
        return self.record.write.done

    @property
    def records(self) -> Sequence[Record]:
        """See `CudaCopy`."""
        return (self.record,)

    def drop(self) -> None:
        """See `Copy`."""
        self.storage.drop(self.record)


class DirectArrival(CudaArrival):
    """A tensor on its way back straight from storage."""

    def __init__(
        self,
        cuda: CudaRuntime,
        copy: DirectCopy,
        *,
        enter_worker: Callable[[Event], None],
        urgent: bool,
        into: tuple[torch.Tensor, int] | None,
    ) -> None:
        """With memory of its own, or `into` memory at an offset where the record can lie.

        Storage's threads call `enter_worker` with the event after which that memory is free.
        """
        record = copy.record
        self._cuda, self._home = cuda, cuda.current_stream()
        self._landing, self._offset = into or aligned_landing(cuda, record, 0)
        allocated = cuda.record(self._home)
        self._storage, self._label = copy.storage, copy.label
        self.transfer = copy.storage.get(
            record,
            self._landing.data_ptr() + self._offset,
            owner=self._landing,
            urgent=urgent,
            after=partial(enter_worker, allocated),
        )

    @property
    def done(self) -> bool:
        """See `CudaArrival`."""
        return self.transfer.done

    def wait(self) -> tuple[torch.UntypedStorage, int, int]:
        """See `Arrival`."""
        waited_ns = self._storage.wait(self.transfer, what=f"{self._label} to come back")
        if self._cuda.current_stream() != self._home:
            self._cuda.used_by(self._landing, self._cuda.current_stream())
        return self._landing.untyped_storage(), self._offset, waited_ns


def aligned_landing(cuda: CudaRuntime, record: Record, first: int) -> tuple[torch.Tensor, int]:
    """Memory for `first` bytes and then a record that can lie there, and where they begin in it."""
    landing = cuda.empty(first + record.nbytes + record.alignment)
    place = record.address_remainder - first - landing.data_ptr()
    return landing, place % record.alignment


class SplitCopy(CudaCopy):
    """The first bytes of a tensor in the host tier, the rest in storage."""

    tier = Tier.STORAGE

    def __init__(self, first: HostCopy, rest: StagedCopy | DirectCopy) -> None:
        self.nbytes, self.first, self.rest = first.nbytes + rest.nbytes, first, rest

    def wait_out(self) -> int:
        """See `Copy`."""
        return self.rest.wait_out() + self.first.wait_out()

    @property
    def written(self) -> bool:
        """See `CudaCopy`."""
        return self.rest.written and self.first.written

    @property
    def failed(self) -> bool:
        """See `CudaCopy`."""
        return self.rest.failed

    @property
    def host_bytes(self) -> int:
        """See `CudaCopy`."""
        return self.first.nbytes

    @property
    def records(self) -> Sequence[Record]:
        """See `CudaCopy`."""
        return self.rest.records

    def wait_written(self) -> None:
        """See `CudaCopy`."""
        self.rest.wait_written()
        self.first.wait_written()

    def drop(self) -> None:
        """See `Copy`."""
        self.rest.drop()
        self.first.drop()


class SplitArrival(CudaArrival):
    """Both parts of a tensor on their way to one memory."""

    def __init__(
        self, landing: torch.Tensor, offset: int, rest: CudaArrival, first: CudaArrival
    ) -> None:
        self._landing, self._offset = landing, offset
        self._rest, self._first = rest, first

    @property
    def done(self) -> bool:
        """See `CudaArrival`."""
        return self._rest.done and self._first.done

    def wait(self) -> tuple[torch.UntypedStorage, int, int]:
        """See `Arrival`."""
        waited_ns = [part.wait()[2] for part in (self._rest, self._first)]
        return self._landing.untyped_storage(), self._offset, sum(waited_ns)
