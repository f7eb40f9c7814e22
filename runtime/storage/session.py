"""The storage of one session: put, get, drop and wait over one or several directories."""

import atexit
import logging
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from time import perf_counter_ns
from types import TracebackType

from teraplan.errors import ConfigError, StorageError
from teraplan.runtime.process.locks import if_free
from teraplan.runtime.storage.describe import store_lines
from teraplan.runtime.storage.directories import (
    OpenedDirectory,
    open_directory,
    open_memory,
    why_not,
)
from teraplan.runtime.storage.lane import Lane
from teraplan.runtime.storage.memory_arena import Room
from teraplan.runtime.storage.store import Store
from teraplan.runtime.storage.traffic import Traffic
from teraplan.runtime.storage.transfers import Record, Transfer
from teraplan.runtime.storage.workers import WORKERS, Workers
from teraplan.values.hardware import Link

_log = logging.getLogger(__name__)
_DUMP_PATIENCE_S = 0.2
PATHS = ("auto", "posix", "kvikio-host", "kvikio-gds")


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreInfo:
    """One storage directory as it is used, for banner, status and reports."""

    directory: Path
    path: str
    """How bytes reach the disk: "posix O_DIRECT", "posix buffered", "kvikio host", "kvikio GDS"."""
    file_system: str
    disk: str
    device: str
    free_bytes: int
    """What can still be put there: free on disk, and free in the spill file."""
    used_bytes: int
    written_bytes: int
    read_bytes: int
    in_use: bool
    """False after it has failed: what lies there is read, nothing more is written."""
    answers: bool
    """False while its spill file should grow, and the disk says nothing."""
    fallbacks: tuple[str, ...]
    open_ns: int
    """For how long it has been open."""
    physical: frozenset[str]
    """Names of the disks that it lies on."""


class Storage:
    """Spilled tensors on disk. Open it with `Storage.open`, close it with `close` or `with`.

    All methods may be called from any thread. In a forked child (a DataLoader worker) `drop` and
    `close` do nothing and the rest raises: the files belong to the process that opened them.
    """

    def __init__(
        self,
        opened: Sequence[OpenedDirectory],
        *,
        checksum: bool,
        deadline_s: float,
        workers: Workers = WORKERS,
        encrypt: bool = False,
        lane: Lane | None = None,
    ) -> None:
        self.encrypts = encrypt
        self._opened = tuple(opened)
        for one in opened:  # as long as a write may take, before another directory is asked
            one.arena.patience_s = deadline_s / 2 if len(opened) > 1 else deadline_s
        self.deadline_s, self.checks = deadline_s, checksum
        self._owner_pid = os.getpid()
        self._closed = False
        self._closing = threading.Lock()
        self._opened_ns = perf_counter_ns()
        self.traffic = Traffic(opened, checksum=checksum, workers=workers, lane=lane)
        _open_sessions.append(self)

    @classmethod
    def open(
        cls,
        directories: Sequence[Path],
        *,
        checksum: bool = True,
        deadline_s: float = 60.0,
        strict: bool = False,
        path: str = "auto",
        device_memory: bool = False,
        workers: Workers = WORKERS,
        encrypt: bool = False,
        without_python: bool = False,
    ) -> "Storage":
        """A storage over `directories`, each with its own file, queue and `workers`.

        `path` is one of "auto", "posix", "kvikio-host" and "kvikio-gds". "auto" is posix, except
        that a caller who could hand over addresses of an accelerator (`device_memory`) gets GDS
        where the probe proves it for every directory; `takes_device_memory` then says so.
        `encrypt` keeps the files unreadable, at the cost of time and a chunk of memory per worker.
        `without_python`: the workers of one directory move bytes without Python's lock, where it
        has direct I/O and there is a compiler, which takes some seconds the first time.

        Raises:
            ConfigError: no directory, or an unknown path.
            StorageUnusableError: a directory is missing, not a directory, or not writable.
            FallbackRefusedError: `strict`, and a directory is no disk or cannot do direct I/O.
        """
        if not directories:
            raise ConfigError("no storage directory was named")
        if path not in PATHS:
            raise ConfigError(f"{path!r} is no storage path; use one of {', '.join(PATHS)}")
        chosen = path
        if path == "auto":
            has_gds = (
                device_memory
                and not encrypt
                and not any(why_not("kvikio-gds", Path(directory)) for directory in directories)
            )
            chosen = "kvikio-gds" if has_gds else "posix"
        encrypt_for = len(workers.always + workers.when_urgent) if encrypt else 0
        open_one = partial(open_directory, path=chosen, strict=strict, encrypt_for=encrypt_for)
        opened: list[OpenedDirectory] = []
        try:
            for directory in directories:
                opened.append(open_one(Path(directory)))
        except BaseException:
            for one in opened:
                one.arena.close()
            raise
        for one in opened:
            for fallback in one.fallbacks:
                _log.warning("storage: %s", fallback)
        _say_shared_disks(opened)
        return cls(
            opened,
            checksum=checksum,
            deadline_s=deadline_s,
            workers=workers,
            encrypt=encrypt,
            lane=opened[0].arena.lane() if without_python and len(opened) == 1 else None,
        )

    @classmethod
    def in_memory(cls, room: Room, *, checksum: bool = True, deadline_s: float = 60.0) -> "Storage":
        """Host memory outside of the process's resident set, as one store that is no directory.

        `room`: what it takes as it grows.
        """
        return cls([open_memory(room)], checksum=checksum, deadline_s=deadline_s)

    def __enter__(self) -> "Storage":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def takes_device_memory(self) -> bool:
        """Whether addresses given to `put` and `get` are those of the accelerator (GDS)."""
        return self._opened[0].arena.takes_device_memory

    @property
    def is_closed(self) -> bool:
        """Whether nothing can be put or got any more."""
        return self._closed

    @property
    def stores(self) -> tuple[StoreInfo, ...]:
        """The directories as they are used now."""
        self._check_process("status")
        return tuple(
            _info(opened, store, self.traffic.room(store), self._opened_ns)
            for opened, store in zip(self._opened, self.traffic.stores, strict=True)
        )

    @property
    def bytes_in_use(self) -> int:
        """Bytes of the files that records take."""
        self._check_process("status")
        return sum(self.traffic.room(store)[0] for store in self.traffic.stores)

    @property
    def free_bytes(self) -> int:
        """Bytes that can still be put: free on each disk once, and free in each file."""
        self._check_process("status")
        on_disks: dict[str, int] = {}
        in_files = 0
        for one, store in zip(self._opened, self.traffic.stores, strict=True):
            if store.why_retired is None:
                on_disks[one.disk.device] = one.arena.available_bytes(one.directory)
                in_files += self.traffic.room(store)[1]
        return sum(on_disks.values()) + in_files

    def put(
        self,
        address: int,
        nbytes: int,
        *,
        owner: object,
        label: str,
        is_compared: bool = False,
        after: Callable[[], object] | None = None,
    ) -> Record:
        """Queues the write of memory [address, address + nbytes) and returns at once.

        `owner` keeps the memory alive; it is let go when the write has ended, before
        `record.write.done`. Nobody may change the memory until then. The caller compares what
        comes back himself if `is_compared`; else checksums do. A worker calls `after` (an event's
        `synchronize`) before it touches the memory, once for each chunk.

        Raises:
            StorageFullError: no directory has room; nothing has been queued.
        """
        self._check_process(label)
        return self.traffic.put(
            *(address, nbytes), owner=owner, label=label, is_compared=is_compared, after=after
        )

    def get(
        self,
        record: Record,
        address: int,
        *,
        owner: object,
        urgent: bool = False,
        after: Callable[[], object] | None = None,
    ) -> Transfer:
        """Queues the read of `record` into memory at `address` and returns at once.

        `address % record.alignment` must equal `record.address_remainder`. `owner` keeps the
        memory alive and is let go when the read has ended. If the record is still being written,
        the read follows the write; if that failed, so does this.
        """
        self._check_process(record.write.label)
        return self.traffic.get(record, address, owner=owner, urgent=urgent, after=after)

    def drop(self, record: Record) -> None:
        """Gives the record's room back, when its I/O has ended. Any time, any number of times."""
        if os.getpid() == self._owner_pid and not self._closed:
            self.traffic.drop(record)

    def pieces(self, record: Record) -> list[tuple[int, int, int]]:
        """Where the body of a written record lies: (descriptor, offset in the file, bytes) each.

        In the order of the bytes; what follows on in one file is one piece.
        """
        pieces: list[tuple[int, int, int]] = []
        for index, place in enumerate(record.places):
            fd, nbytes = self._opened[place.store].arena.fd, record.chunk_bytes(index)
            last_fd, start, length = pieces[-1] if pieces else (-1, 0, 0)
            if fd == last_fd and start + length == place.offset:
                pieces[-1] = (fd, start, length + nbytes)
            else:
                pieces.append((fd, place.offset, nbytes))
        return pieces

    def where(self, record: Record) -> Iterator[str]:
        """The same in words, a place each."""
        for place in record.places:
            directory = self._opened[place.store].directory
            yield f"at offset {place.offset} of the spill file in {directory}"

    def keep_to(self, pace: Link | None) -> None:
        """Drive all directories together no faster than `pace` from now on; None is no limit."""
        self.traffic.pace.keep_to(pace)

    def wait(self, transfer: Transfer, *, what: str) -> int:
        """Nanoseconds waited until `transfer` ended; what is waited for goes first in its queue.

        Raises:
            DeadlineError: nothing of it moved for the deadline; names tensor, store, queue.
            StorageError: it failed; IntegrityError if the bytes came back changed.
        """
        if transfer.done:
            transfer.raise_if_failed()
            return 0
        self._check_process(transfer.label)
        return self.traffic.wait(transfer, what=what, deadline_s=self.deadline_s)

    def describe(self) -> str:
        """What the stores are doing now, for people. From anywhere, a signal handler too."""
        lines: list[str] = []

        def look() -> None:
            lines[:] = [line for store in self.traffic.stores for line in store_lines(store)]

        try:
            # The handler may have interrupted the very thread that holds the lock.
            if not if_free(self.traffic.lock, look, timeout_s=_DUMP_PATIENCE_S):
                look()
        except RuntimeError as error:  # something changed while it was being looked at
            lines = [f"storage is busy: {error}"]
        return "\n".join(lines)

    def close(self) -> None:
        """Ends running I/O, fails queued I/O, joins the threads, deletes the files.

        Also when garbage collection calls it, in any thread and at any point: where waiting would
        be a dead-lock (in a worker, or under a store's lock), a thread of its own does the rest.
        """
        with self._closing:
            if self._closed or os.getpid() != self._owner_pid:
                return
            self._closed = True
        if self.traffic.can_wait_here():
            self._close_stores()
        else:
            threading.Thread(target=self._close_stores, name="teraplan-close", daemon=True).start()

    def _close_stores(self) -> None:
        self.traffic.close(self.deadline_s)
        _open_sessions.remove(self)

    def _check_process(self, label: str) -> None:
        if os.getpid() != self._owner_pid:
            raise StorageError(
                f"{label}: the storage belongs to process {self._owner_pid} and cannot be used "
                f"in its forked child {os.getpid()}: compile there anew what is trained there, "
                "after torch._dynamo.reset(), or spawn processes instead"
            )

    def _forget_in_child(self) -> None:
        for one in self._opened:
            one.arena.forget()


def _info(
    opened: OpenedDirectory, store: Store, room: tuple[int, int], opened_ns: int
) -> StoreInfo:
    taken, free = room
    fallbacks = opened.fallbacks
    if store.why_retired is not None:
        fallbacks += (f"nothing more is written to {store.name}: {store.why_retired}",)
    elif opened.arena.hangs:
        fallbacks += (f"{store.name} does not answer, and its spill file does not grow",)
    return StoreInfo(
        directory=opened.directory,
        path=opened.arena.path,
        file_system=opened.disk.file_system,
        disk=opened.disk.disk,
        device=opened.disk.device,
        free_bytes=opened.arena.available_bytes(opened.directory) + free
        if not store.why_retired
        else 0,
        used_bytes=taken,
        written_bytes=store.written_bytes,
        read_bytes=store.read_bytes,
        in_use=store.why_retired is None,
        answers=not opened.arena.hangs,
        fallbacks=fallbacks,
        open_ns=perf_counter_ns() - opened_ns,
        physical=opened.disk.physical,
    )


def _say_shared_disks(opened: Sequence[OpenedDirectory]) -> None:
    first_on: dict[str, Path] = {}
    for one in opened:
        for disk in one.disk.physical or {one.disk.device}:
            first = first_on.setdefault(disk, one.directory)
            if first != one.directory:
                _log.warning(
                    "storage: %s and %s are on the same disk (%s): together they are no faster",
                    *(first, one.directory, one.disk.disk or one.disk.device),
                )


# The two hooks below can only be set for the whole process, so this list has to be, too.
_open_sessions: list[Storage] = []


def _close_all() -> None:
    for session in list(_open_sessions):
        session.close()


def _forget_all_in_child() -> None:
    for session in _open_sessions:
        session._forget_in_child()
    _open_sessions.clear()


atexit.register(_close_all)
os.register_at_fork(after_in_child=_forget_all_in_child)
