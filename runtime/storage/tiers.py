"""Host memory and storage as one place for bytes that leave a device which is this process.

    put -> Away: [ first bytes: host memory | rest: storage ]     one of both parts may be missing
    get -> Return: the same parts, on their way back

On a CPU both are a `Storage`, and what holds for one holds for the other: bytes move beside the
computation, are checked when they come back, and show at an address while they are away (`pieces`).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from teraplan.errors import StorageError, StorageFullError
from teraplan.runtime.storage import Record, Storage, Transfer
from teraplan.units import format_nbytes
from teraplan.values.hardware import Tier
from teraplan.values.run_record import TransferRecord


class Source(NamedTuple):
    """Memory whose bytes are to leave, as `Storage.put` has it."""

    address: int
    nbytes: int
    owner: object
    label: str
    is_compared: bool = False


class Part(NamedTuple):
    """Bytes of one tensor in one tier."""

    tier: Tier
    record: Record
    offset: int
    """Of its first byte in the tensor."""


class Moved(NamedTuple):
    """One part on its way."""

    tier: Tier
    transfer: Transfer


@dataclass(frozen=True, slots=True, eq=False)
class Away:
    """Bytes that lie below the device, or are on their way there."""

    parts: tuple[Part, ...]

    @property
    def writes(self) -> tuple[Moved, ...]:
        """Of all parts."""
        return tuple(Moved(part.tier, part.record.write) for part in self.parts)

    @property
    def done(self) -> bool:
        """True if no write is under way, whether or not they went well."""
        return all(part.record.write.done for part in self.parts)

    @property
    def failed(self) -> bool:
        """True if a write has ended with an error."""
        return any(part.record.write.error is not None for part in self.parts)

    @property
    def takes_host(self) -> bool:
        """True if some of it lies in host memory."""
        return any(part.tier is Tier.HOST for part in self.parts)


@dataclass(frozen=True, slots=True, eq=False)
class Return:
    """Bytes on their way back."""

    reads: tuple[Moved, ...]

    @property
    def done(self) -> bool:
        """True if no read is under way, whether or not they went well."""
        return all(read.transfer.done for read in self.reads)


def record_of(move: Moved, tensor: str) -> TransferRecord:
    """A transfer that has ended, of a tensor that is called so, with its own times."""
    transfer = move.transfer
    return TransferRecord(
        tensor=tensor,
        nbytes=transfer.nbytes,
        direction=transfer.direction,
        tier=move.tier,
        store=transfer.store if move.tier is Tier.STORAGE else "",
        start_ns=transfer.start_ns,
        end_ns=transfer.end_ns,
    )


class Tiers:
    """Storage, and host memory where there is some. All methods are safe from any thread."""

    def __init__(self, storage: Storage, host: Storage | None = None) -> None:
        self.storage, self.host = storage, host
        self.host_limit_bytes: int | None = None
        """What may lie in host memory, where that is less than its room."""

    def put(self, source: Source, host_bytes: int) -> Away:
        """Queue the write of memory, its first `host_bytes` to host memory, the rest to storage.

        Raises:
            StorageFullError: a tier has no room for its part; nothing has happened.
        """
        assert host_bytes <= source.nbytes, f"{host_bytes} bytes of {source.label} to host memory"
        parts: list[Part] = []
        try:
            for tier, offset, end in _ranges(source.nbytes, host_bytes):
                if tier is Tier.HOST and self.host_limit_bytes is not None:
                    self._require_host(end - offset, source.label)
                record = self._in(tier, source.label).put(
                    *(source.address + offset, end - offset),
                    owner=source.owner,
                    label=source.label,
                    is_compared=source.is_compared,
                )
                parts.append(Part(tier, record, offset))
        except BaseException:
            self.drop(Away(tuple(parts)))
            raise
        return Away(tuple(parts))

    def put_where_there_is_room(self, source: Source, host_bytes: int) -> Away:
        """As `put`; where a tier does not take its part, all goes to the other.

        Raises:
            StorageError: nor does that; nothing has happened. StorageFullError: the first is full.
        """
        if self.host is None:
            return self.put(source, 0)
        try:
            return self.put(source, host_bytes)
        except StorageError as refused:
            try:
                return self.put(source, 0 if host_bytes else source.nbytes)
            except StorageError:
                raise refused from None

    def get(self, away: Away, address: int, *, owner: object, urgent: bool = False) -> Return:
        """Queue the read of all parts into memory from `address` on, as `Storage.get` does."""
        reads = [
            Moved(
                part.tier,
                self._in(part.tier, part.record.write.label).get(
                    part.record, address + part.offset, owner=owner, urgent=urgent
                ),
            )
            for part in away.parts
        ]
        return Return(tuple(reads))

    def wait(self, moves: Sequence[Moved], *, what: str) -> int:
        """Nanoseconds waited until all of them have ended.

        Raises:
            StorageError, DeadlineError: as `Storage.wait`.
        """
        return sum(self._in(move.tier, what).wait(move.transfer, what=what) for move in moves)

    def drop(self, away: Away) -> None:
        """Give the room back. Any time, any number of times."""
        for part in away.parts:
            self._in(part.tier, "").drop(part.record)

    def pieces(self, away: Away) -> list[tuple[int, int, int]]:
        """Where what has been written lies: (descriptor, offset in the file, bytes) each."""
        return [
            piece for part in away.parts for piece in self._in(part.tier, "").pieces(part.record)
        ]

    def where(self, away: Away) -> str:
        """The same in words, of which many places are only counted."""
        first, *others = (
            place for part in away.parts for place in self._in(part.tier, "").where(part.record)
        )
        return f"{first}, and in {len(others)} more places" if others else first

    @property
    def host_capacity_bytes(self) -> int:
        """Of host memory, what there is for tensors that leave, free or not."""
        return self.host.free_bytes + self.host.bytes_in_use if self.host is not None else 0

    @property
    def host_free_bytes(self) -> int:
        """Of host memory, what can still be put there."""
        if self.host is None:
            return 0
        free_bytes = self.host.free_bytes
        if self.host_limit_bytes is not None:
            free_bytes = min(free_bytes, self.host_limit_bytes - self.host.bytes_in_use)
        return max(0, free_bytes)

    def has_host_room(self, nbytes: int, *, beside_bytes: int) -> bool:
        """True if so much can go to host memory where so much in all is there, or will be."""
        if self.host is None:
            return False
        taken_bytes = self.host.bytes_in_use
        return max(taken_bytes, beside_bytes) + nbytes <= taken_bytes + self.host_free_bytes

    def describe(self) -> str:
        """What they are doing now, for people. From anywhere, a signal handler too."""
        return "\n".join(storage.describe() for storage in self._all())

    def close(self) -> None:
        """As `Storage.close`."""
        for storage in self._all():
            storage.close()

    def _all(self) -> Iterator[Storage]:
        yield self.storage
        if self.host is not None:
            yield self.host

    def _require_host(self, nbytes: int, label: str) -> None:
        if nbytes > self.host_free_bytes:
            raise StorageFullError(
                f"{label}: needs {format_nbytes(nbytes)} of host memory, where "
                f"{format_nbytes(self.host_free_bytes)} are left of host_budget; raise host_budget"
            )

    def _in(self, tier: Tier, label: str) -> Storage:
        if tier is Tier.STORAGE:
            return self.storage
        if self.host is None:
            raise StorageFullError(f"{label}: there is no host memory to go to; raise host_budget")
        return self.host


def _ranges(nbytes: int, host_bytes: int) -> Iterator[tuple[Tier, int, int]]:
    """Tier, start and end of each part."""
    if host_bytes:
        yield Tier.HOST, 0, host_bytes
    if host_bytes < nbytes or not nbytes:
        yield Tier.STORAGE, host_bytes, nbytes
