"""How fast bytes move between the device and the other tiers, measured on this machine.

Storage is measured through the Storage class itself, on a real spill file, checksums included, so
the figures are what a step will get and not what the disk's label says. Extents are written once
before the clock starts: first writes are slower than the overwrites that a step does.
"""

import logging
import mmap
import os
import platform
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from time import perf_counter_ns, sleep

from teraplan.errors import StorageFullError, StorageUnusableError
from teraplan.runtime.process.pinned_pool import PinnedPool
from teraplan.runtime.storage import Record, Storage, Transfer
from teraplan.runtime.storage.cache_directory import keep, load
from teraplan.runtime.storage.file_system import disk_facts
from teraplan.runtime.storage.memory import address_of
from teraplan.units import (
    MIB,
    format_bandwidth,
    format_nbytes,
    format_ns,
    format_speed_beside,
)
from teraplan.values.hardware import Link

_log = logging.getLogger(__name__)

_VERSION = 3
_MAX_AGE_S = 14 * 24 * 3600.0
_RECORD_BYTES, _LEAST_RECORD_BYTES = 16 * MIB, 256 << 10
_ASSUMED = Link(
    out_bytes_per_s=500_000_000,
    back_bytes_per_s=500_000_000,
    out_while_back_bytes_per_s=250_000_000,
    back_while_out_bytes_per_s=250_000_000,
    latency_ns=100_000,
)
"""Of storage that has no room to be measured in: it takes next to nothing anyway."""
_PHASE_NS = 250_000_000
_NUM_LATENCIES = 25
_SMALL_BYTES = 8192
_PATIENCE_NS = 60 * 10**9


def storage_link(
    directories: Sequence[Path],
    *,
    refresh: bool = False,
    checksum: bool = True,
    encrypt: bool = False,
) -> Link:
    """Speed of `directories` together; measured once per machine and disks, then remembered.

    Raises:
        StorageError: a directory cannot be used.
    """
    for directory in directories:
        if not Path(directory).is_dir():
            raise StorageUnusableError(f"{directory} is no directory; name one that exists")
    disks = [disk_facts(Path(directory)) for directory in directories]
    names = [f"{disk.device} {disk.disk} {disk.file_system}" for disk in disks]
    key = f"storage {platform.node()} checksum={checksum} " + ", ".join(sorted(names))
    if encrypt:
        key = f"encrypted {key}"
    link = None if refresh else _remembered(key)
    if link is None:
        try:
            link = measure_storage(directories, checksum=checksum, encrypt=encrypt)
        except StorageFullError as error:
            _log.warning("%s; it is taken for a disk of 500 MB/s", error)
            return _ASSUMED
        keep(key, asdict(link), version=_VERSION)
    return link


def host_link(device: str | None = None, *, refresh: bool = False) -> Link | None:
    """Speed between `device` and host memory, None if there is no device beside the host.

    For "cpu" it is the way to memory outside of the process, which is its host tier. Without
    `device` it is the GPU, if any.
    """
    device = device or _accelerator()
    if device is None:
        return None
    key = f"host {platform.node()} {_model(device)}"
    link = None if refresh else _remembered(key)
    if link is None:
        link = _measure_memory() if device == "cpu" else _measure_accelerator(device)
        keep(key, asdict(link), version=_VERSION)
    return link


def measure_storage(
    directories: Sequence[Path],
    *,
    nbytes: int = 256 * MIB,
    checksum: bool = True,
    encrypt: bool = False,
) -> Link:
    """Speed of `directories` together, with `nbytes` on disk and 16 MiB in memory; takes a second.

    A model may be in memory already, within a budget.

    Raises:
        StorageFullError: they have no room for that.
        StorageError: a directory cannot be used or fails.
    """
    with Storage.open(directories, checksum=checksum, encrypt=encrypt) as storage:
        free_bytes = storage.free_bytes
        nbytes = min(nbytes, free_bytes // 2)
        record_bytes = min(_RECORD_BYTES, nbytes // 2 // _LEAST_RECORD_BYTES * _LEAST_RECORD_BYTES)
        if not record_bytes:
            raise StorageFullError(
                f"{', '.join(map(str, directories))}: {format_nbytes(free_bytes)} are free, too "
                "little to measure how fast storage is"
            )
        with _Block(record_bytes) as block:
            link = _StorageProbe(storage, block, nbytes // record_bytes // 2).link()
    _log.info(
        "storage link: out %s, back %s, both at once %s and %s, latency %s",
        *map(format_bandwidth, (link.out_bytes_per_s, link.back_bytes_per_s)),
        format_speed_beside(link.out_while_back_bytes_per_s, "reads"),
        format_speed_beside(link.back_while_out_bytes_per_s, "writes"),
        format_ns(link.latency_ns),
    )
    return link


class _Block:
    """Page-aligned, touched memory; its content cannot be compressed by a clever disk."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self._map = mmap.mmap(-1, nbytes)
        for _ in range(0, nbytes, _LEAST_RECORD_BYTES):
            self._map.write(os.urandom(_LEAST_RECORD_BYTES))
        self.address = address_of(self._map)

    def __enter__(self) -> "_Block":
        return self

    def __exit__(self, *exception: object) -> None:
        self._map.close()


class _StorageProbe:
    """Writes, reads, and both at once, over and over until each took long enough."""

    def __init__(self, storage: Storage, block: _Block, num_records: int) -> None:
        self._storage = storage
        self._block = block
        self._num_records = num_records

    def link(self) -> Link:
        kept = self._write()
        self._drop(self._write())  # both halves of the file have now been written once
        out = self._rate_alone(out=True, kept=kept)
        back = self._rate_alone(out=False, kept=kept)
        out_both, back_both = self._rates_together(kept)
        return Link(
            out_bytes_per_s=out,
            back_bytes_per_s=back,
            # Noise must not make a link faster because it is shared.
            out_while_back_bytes_per_s=min(out, out_both),
            back_while_out_bytes_per_s=min(back, back_both),
            latency_ns=self._latency_ns(),
        )

    def _rate_alone(self, *, out: bool, kept: Sequence[Record]) -> int:
        nbytes = elapsed_ns = 0
        while elapsed_ns < _PHASE_NS:
            started_ns = perf_counter_ns()
            if out:
                records = self._write()
                transfers = [record.write for record in records]
                self._drop(records)
            else:
                transfers = self._start_reads(kept)
                self._finish(transfers)
            elapsed_ns += max(transfer.end_ns for transfer in transfers) - started_ns
            nbytes += self._num_records * self._block.nbytes
        return nbytes * 10**9 // elapsed_ns

    def _rates_together(self, kept: Sequence[Record]) -> tuple[int, int]:
        out_bytes = back_bytes = elapsed_ns = 0
        while elapsed_ns < _PHASE_NS:
            started_ns = perf_counter_ns()
            records = self._start_writes()
            writes, reads = [r.write for r in records], self._start_reads(kept)
            self._finish([*reads, *writes])
            # Only the time in which both were busy counts.
            end_ns = min(max(t.end_ns for t in writes), max(t.end_ns for t in reads))
            out_bytes += _moved_until(end_ns, writes)
            back_bytes += _moved_until(end_ns, reads)
            elapsed_ns += max(1, end_ns - started_ns)
            self._drop(records)
        return max(1, out_bytes * 10**9 // elapsed_ns), max(1, back_bytes * 10**9 // elapsed_ns)

    def _latency_ns(self) -> int:
        address = self._block.address
        record = self._storage.put(address, _SMALL_BYTES, owner=None, label="latency")
        self._finish([record.write])
        times_ns = []
        for _ in range(_NUM_LATENCIES):
            transfer = self._storage.get(record, address, owner=None)
            self._finish([transfer])
            times_ns.append(transfer.end_ns - transfer.queued_ns)
        return round(statistics.median(times_ns))

    def _start_writes(self) -> list[Record]:
        block = self._block
        return [
            self._storage.put(
                block.address, block.nbytes, owner=None, label=f"part {index} of a speed probe"
            )
            for index in range(self._num_records)
        ]

    def _start_reads(self, kept: Sequence[Record]) -> list[Transfer]:
        return [self._storage.get(record, self._block.address, owner=None) for record in kept]

    def _write(self) -> list[Record]:
        records = self._start_writes()
        self._finish([record.write for record in records])
        return records

    def _finish(self, transfers: Sequence[Transfer]) -> None:
        # Looks instead of waiting: `wait` makes its transfer urgent, which would change the order
        # that is being measured. It is called when all is over, for the errors.
        until_ns = perf_counter_ns() + _PATIENCE_NS
        while not all(t.done for t in transfers) and perf_counter_ns() < until_ns:
            sleep(0.0003)
        for transfer in transfers:
            self._storage.wait(transfer, what="measuring the speed of storage")

    def _drop(self, records: Iterable[Record]) -> None:
        for record in records:
            self._storage.drop(record)


def _moved_until(end_ns: int, transfers: Iterable[Transfer]) -> int:
    nbytes = 0
    for transfer in transfers:
        if transfer.end_ns <= end_ns:
            nbytes += transfer.nbytes
        elif transfer.start_ns < end_ns:
            spent_ns = end_ns - transfer.start_ns
            nbytes += transfer.nbytes * spent_ns // (transfer.end_ns - transfer.start_ns)
    return nbytes


def _remembered(key: str) -> Link | None:
    facts = load(key, version=_VERSION, max_age_s=_MAX_AGE_S)
    if facts is None:
        return None
    numbers = {name: value for name, value in facts.items() if isinstance(value, int) and value > 0}
    if set(numbers) != set(Link.__dataclass_fields__):
        return None
    return Link(**numbers)


def _measure_memory() -> Link:
    """Of the host tier of a CPU, with 48 MiB of memory."""
    room = PinnedPool(2 * _RECORD_BYTES, pin=None)
    with Storage.in_memory(room) as storage, _Block(_RECORD_BYTES) as block:
        link = _StorageProbe(storage, block, num_records=1).link()
    return replace(  # one memory serves both directions
        link,
        out_while_back_bytes_per_s=link.out_bytes_per_s // 2,
        back_while_out_bytes_per_s=link.back_bytes_per_s // 2,
    )


def _accelerator() -> str | None:
    import torch

    if not torch.accelerator.is_available():
        return None
    found = torch.accelerator.current_accelerator()
    if found is None or found.type != "cuda":
        return None
    return f"cuda:{torch.accelerator.current_device_index()}"


def _model(device: str) -> str:
    """What tells this device apart from others that the machine may have had before."""
    if device == "cpu":
        return device
    import torch

    return f"{device} {torch.get_device_module(device).get_device_name(device)}"


def _measure_accelerator(device: str) -> Link:
    import torch

    from teraplan.runtime.cuda.link import measure_link
    from teraplan.runtime.cuda.torch_runtime import TorchCuda

    return measure_link(TorchCuda(torch.device(device).index))
