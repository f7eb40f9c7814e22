"""The CPU as a device: its memory is this process's, and leaving it means NVMe (or a host pool).

A tensor is written straight from where it lies and read straight to where it will be used: the
storage engine needs no staging memory, so there is none to count.
"""

import gc
import platform
import time
from collections.abc import Sequence

import torch

from teraplan.errors import StorageFullError
from teraplan.hardware import Hardware, Tier
from teraplan.run_record import Direction, TransferRecord
from teraplan.runtime import census, process_memory
from teraplan.runtime.cpu_pool import CpuPool
from teraplan.runtime.device import Arrival, Beside, Copy, Device
from teraplan.runtime.inductor_memory import take_memory_from
from teraplan.runtime.malloc import Malloc
from teraplan.runtime.pages import use_huge_pages, use_small_pages
from teraplan.runtime.storage import Record, Storage, StoreInfo, Transfer
from teraplan.units import format_nbytes

_RESERVED_FRACTION = 0.9
"""Share of the available memory that a budget left open takes."""


_WORTH_HUGE_PAGES_BYTES = 128 << 20
"""With so many tensors the heap lies on huge pages. Where it has holes they take 15 MiB more."""
_WORTH_MEASURING_BYTES = 2 << 20
"""So much free memory may be counted as used where memory is measured."""
_WORTH_TRIMMING_BYTES = 4 << 20
_SITES_BETWEEN_TRIMS, _SITES_BETWEEN_URGENT_TRIMS = 256, 32
"""The heap is trimmed rarely: what is given back is touched, and faults, again."""


class _StorageCopy(Copy):
    tier = Tier.STORAGE

    def __init__(self, device: "CpuDevice", record: Record, label: str, *, pooled: bool) -> None:
        self.pooled = pooled
        self._left = False
        self.nbytes = record.nbytes
        self.record = record
        self.label = label
        self._device = device

    def wait_out(self) -> int:
        if self._left:
            return 0
        waited = self._device.storage.wait(self.record.write, what=f"{self.label} to leave")
        self._left = True
        self._device.log_transfer(self.record.write, Tier.STORAGE)
        return waited

    def drop(self) -> None:
        self._device.storage.drop(self.record)


class _StorageArrival(Arrival):
    def __init__(self, copy: _StorageCopy, device: "CpuDevice", *, urgent: bool) -> None:
        record = copy.record
        if copy.pooled:  # the pool's memory begins at a page, as that of the tensor did
            landing = device.pool.empty_bytes(record.nbytes + record.address_remainder)
        else:
            landing = torch.empty(record.nbytes + record.alignment, dtype=torch.uint8)
        address = landing.data_ptr()
        self._offset = (record.address_remainder - address) % record.alignment
        self._landing, self._device, self._label = landing, device, copy.label
        self._transfer = device.storage.get(
            record, address + self._offset, owner=landing, urgent=urgent
        )

    def wait(self) -> tuple[torch.UntypedStorage, int, int]:
        waited = self._device.storage.wait(self._transfer, what=f"{self._label} to come back")
        self._device.log_transfer(self._transfer, Tier.STORAGE)
        return self._landing.untyped_storage(), self._offset, waited


class _HostCopy(Copy):
    tier = Tier.HOST

    def __init__(self, device: "CpuDevice", source: torch.Tensor, label: str) -> None:
        start_ns = time.perf_counter_ns()
        self.nbytes = source.nbytes
        self.data: torch.Tensor | None = source.clone()
        self.label = label
        self._device = device
        device.log_copy(label, self.nbytes, Direction.OUT, start_ns)

    def wait_out(self) -> int:
        return 0

    def drop(self) -> None:
        if self.data is not None:
            self.data = None
            self._device.host_bytes -= self.nbytes


class _HostArrival(Arrival):
    def __init__(self, copy: _HostCopy, device: "CpuDevice") -> None:
        assert copy.data is not None, f"{copy.label}: its host copy has been dropped"
        start_ns = time.perf_counter_ns()
        self._landing = copy.data.clone()
        device.log_copy(copy.label, copy.nbytes, Direction.BACK, start_ns)

    def wait(self) -> tuple[torch.UntypedStorage, int, int]:
        return self._landing.untyped_storage(), 0, 0


class CpuDevice(Device):
    """This process's memory as the device tier."""

    type = "cpu"
    moves_state = True
    recomputes = True

    def __init__(self, *, storage: Storage, host_bytes: int) -> None:
        self.name = f"cpu {platform.machine()}"
        self.host_budget_bytes = host_bytes
        self.host_bytes = 0
        self.storage = storage
        self._malloc = Malloc()
        self._malloc.keep_for_reuse()
        self._exact = False
        self._sites_since_trim = 0
        self.pool = CpuPool()
        self._transfers: list[TransferRecord] = []
        self._beside: Beside | None = None
        self._limit_bytes: int | None = None
        self._most_beside_pool_bytes = 0
        """What the heap gave back when it was trimmed it takes again."""

    def keeps_beside(self, beside: Beside) -> None:
        self._beside = beside
        self._malloc.map_large()

    def hardware(self) -> Hardware:
        from teraplan.runtime.links import host_link, storage_link

        storage = self.storage
        directories = [store.directory for store in storage.stores if store.in_use]
        return Hardware(
            device=self.name,
            device_capacity_bytes=self.capacity_bytes(),
            host_capacity_bytes=self.host_budget_bytes,
            storage_capacity_bytes=storage.free_bytes + storage.bytes_in_use,
            host_link=host_link("cpu") if self.host_budget_bytes else None,
            storage_link=storage_link(directories, encrypt=storage.encrypts)
            if directories
            else None,
        )

    def capacity_bytes(self) -> int:
        held = census.tensor_nbytes("cpu")
        return held + int(process_memory.available_bytes() * _RESERVED_FRACTION)

    def state_bytes(self) -> int:
        beside = self._beside.total_bytes if self._beside is not None else 0
        return max(0, census.tensor_nbytes("cpu") - beside)

    def measure_exactly(self) -> None:
        gc.collect()
        use_small_pages(*process_memory.heap_range())
        use_huge_pages((s.data_ptr(), s.nbytes()) for s in census.storages("cpu"))
        self._exact = True

    def run_fast(self) -> None:
        self._trim()
        self._most_beside_pool_bytes = 0
        self._exact = False
        _put_heap_on_huge_pages()

    def hold_less(self, nbytes: int) -> None:
        self.pool.lower(nbytes)
        _put_heap_on_huge_pages()

    def resident_bytes(self) -> int:
        beside = self._beside.held_bytes if self._beside is not None else 0
        return process_memory.resident_bytes() - beside

    def take_peak(self) -> int:
        peak = process_memory.peak_bytes()
        if self._beside is not None:
            peak -= self._beside.peak_bytes
            self._beside.peak_bytes = self._beside.held_bytes
        if self._exact and self._free_bytes() > _WORTH_MEASURING_BYTES:
            self._trim()
        process_memory.reset_peak()
        return peak

    def waited_beside_ns(self) -> int:
        return self._beside.waited_ns if self._beside is not None else 0

    def make_room(self, nbytes: int) -> None:
        if self._limit_bytes is None:
            self._trim()
            return
        self.pool.shrink(self._resident_soon() + nbytes - self._limit_bytes)

    def _resident_soon(self) -> int:
        """What is resident now and will be without another allocation."""
        coming = self._beside.coming_bytes if self._beside is not None else 0
        return process_memory.resident_bytes_fast() + coming

    def keep_under(self, limit_bytes: int, headroom_bytes: int, spare_bytes: int = 0) -> None:
        self._sites_since_trim += 1
        self._limit_bytes = limit_bytes
        resident = self._resident_soon()
        beside_bytes = self._beside.held_bytes if self._beside is not None else 0
        pool_bytes = self.pool.in_use_bytes + self.pool.waiting_bytes + beside_bytes
        self._most_beside_pool_bytes = max(self._most_beside_pool_bytes, resident - pool_bytes)
        free_bytes = limit_bytes - headroom_bytes - self._most_beside_pool_bytes - pool_bytes
        self.pool.slack_bytes = max(0, free_bytes)
        beyond = resident - limit_bytes
        urgent = beyond > headroom_bytes
        if self._beside is not None:  # what one leaves the other takes
            still = -beyond - spare_bytes + self.pool.waiting_bytes
            needed = min(headroom_bytes, max(0, still))
            self._limit_bytes -= headroom_bytes
            beyond -= self.pool.shrink(beyond + needed)
            self.pool.room_bytes = max(0, -beyond - needed)
        elif urgent:
            beyond -= self.pool.shrink(beyond - headroom_bytes)
        interval = _SITES_BETWEEN_URGENT_TRIMS if urgent else _SITES_BETWEEN_TRIMS
        if beyond > _WORTH_TRIMMING_BYTES and self._sites_since_trim > interval:
            self._malloc.trim()
            self._sites_since_trim = 0

    def attach(self) -> None:
        take_memory_from(self.pool.empty_strided)

    def peak_bytes(self) -> int:
        return process_memory.peak_bytes()

    def mark(self) -> int:
        return time.perf_counter_ns()

    def elapsed_ns(self, start: object, end: object) -> int:
        assert isinstance(start, int)
        assert isinstance(end, int)
        return end - start

    def start_out(self, tensor: torch.Tensor, tier: Tier, label: str) -> Copy:
        storage = tensor.untyped_storage()
        if tier is Tier.HOST:
            return self._copy_to_host(storage, label)
        address = storage.data_ptr()
        record = self.storage.put(address, storage.nbytes(), owner=storage, label=label)
        return _StorageCopy(self, record, label, pooled=self.pool.owns(address))

    def start_back(self, copy: Copy, *, urgent: bool = False) -> Arrival:
        if isinstance(copy, _HostCopy):
            return _HostArrival(copy, self)
        assert isinstance(copy, _StorageCopy)
        return _StorageArrival(copy, self, urgent=urgent)

    def empty(self, size: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return self.pool.empty_strided(size, stride, dtype)

    def take_transfers(self) -> tuple[TransferRecord, ...]:
        transfers, self._transfers = tuple(self._transfers), []
        return transfers

    def stores(self) -> tuple[StoreInfo, ...]:
        return self.storage.stores

    def close(self) -> None:
        self.storage.close()

    def _free_bytes(self) -> int:
        return self.pool.waiting_bytes + self._malloc.free_bytes()

    def _trim(self) -> None:
        self.pool.trim()
        self._malloc.trim()

    def log_transfer(self, transfer: Transfer, tier: Tier) -> None:
        """Remember a finished transfer of the storage engine."""
        self._transfers.append(
            TransferRecord(
                tensor=transfer.label,
                nbytes=transfer.nbytes,
                direction=transfer.direction,
                tier=tier,
                store=transfer.store,
                start_ns=transfer.start_ns,
                end_ns=transfer.end_ns,
            )
        )

    def log_copy(self, label: str, nbytes: int, direction: Direction, start_ns: int) -> None:
        """Remember a copy within memory that has just finished."""
        self._transfers.append(
            TransferRecord(
                tensor=label,
                nbytes=nbytes,
                direction=direction,
                tier=Tier.HOST,
                store="",
                start_ns=start_ns,
                end_ns=time.perf_counter_ns(),
            )
        )

    def _copy_to_host(self, storage: torch.UntypedStorage, label: str) -> Copy:
        nbytes = storage.nbytes()
        if self.host_bytes + nbytes > self.host_budget_bytes:
            raise StorageFullError(
                f"{label}: the host tier has {format_nbytes(self.host_budget_bytes)}, of which "
                f"{format_nbytes(self.host_bytes)} are taken; {format_nbytes(nbytes)} do not fit; "
                "raise host_budget"
            )
        self.host_bytes += nbytes
        source = torch.empty(0, dtype=torch.uint8).set_(storage, 0, (nbytes,), (1,))
        return _HostCopy(self, source, label)


def _put_heap_on_huge_pages() -> None:
    if census.tensor_nbytes("cpu") >= _WORTH_HUGE_PAGES_BYTES:
        use_huge_pages([process_memory.heap_range()])
