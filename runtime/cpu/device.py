"""The CPU as a device: its memory is this process's, and leaving it means NVMe (or a host pool).

A tensor is written straight from where it lies and read straight to where it will be used: the
storage engine needs no staging memory, so there is none to count.
"""

import gc
import platform
import time
import weakref
from collections.abc import Iterable, Sequence

import torch

from teraplan.runtime.cpu import pool as cpu_pool
from teraplan.runtime.cpu.malloc import Malloc
from teraplan.runtime.cpu.page_memory import PageMemory
from teraplan.runtime.cpu.resident_memory import ResidentMemory
from teraplan.runtime.device import MEASURED_WITHIN_BYTES, Arrival, Beside, Copy, Device
from teraplan.runtime.process import census, fallbacks, proc_file, process_memory
from teraplan.runtime.process.pages import use_huge_pages, use_small_pages
from teraplan.runtime.process.pinned_pool import PinnedPool
from teraplan.runtime.state.memory.block_memory import BlockMemory
from teraplan.runtime.storage import Storage, StoreInfo
from teraplan.runtime.storage.tiers import Moved, Source, Tiers, record_of
from teraplan.values.hardware import Hardware, Tier
from teraplan.values.run_record import TransferRecord

_RESERVED_FRACTION = 0.9
"""Share of the available memory that a budget left open takes."""
_HOST_CAPACITY_FRACTION = 0.99
"""Share of the host memory that plans may use: between tensors in it some stays free."""


_HEAP = "tensors have their memory from the C library's heap, which keeps much of what is freed: {}"
_WORTH_HUGE_PAGES_BYTES = 128 << 20
"""With so many tensors the heap lies on huge pages. Where it has holes they take 15 MiB more."""
_YOUNG = 1
"""The generations of garbage that are new: looking through all takes 0.1 to 0.3 s once there are
compiled graphs, and finds nothing since memory was measured."""
_WORTH_TRIMMING_BYTES = 4 << 20
_PART_THAT_MAY_BE_FREE = 64
"""Of the tensors' bytes, one in so many may lie free in the process while memory is measured."""
_SITES_BETWEEN_TRIMS = 256
_MOST_TIME_FOR_URGENT_TRIMS = 0.02
_FAULT_NS_PER_BYTE = 0.25
"""The heap is trimmed rarely: what is given back is touched, and faults, again."""


class _Copy(Copy):
    """A tensor elsewhere: its first bytes in host memory, the rest in storage, or all in one."""

    def __init__(
        self, device: "CpuDevice", source: torch.UntypedStorage, label: str, *, host_bytes: int
    ) -> None:
        self.nbytes, self.label = source.nbytes(), label
        self.tier = Tier.HOST if host_bytes == self.nbytes else Tier.STORAGE
        address = source.data_ptr()
        self.pooled = device.pool.owns(address)
        self._left = False
        self._device = device
        leaving = Source(address, self.nbytes, owner=source, label=label)
        self.away = device.tiers.put(leaving, host_bytes)

    @property
    def remainder(self) -> tuple[int, int]:
        """What an address that it lands at has to be, modulo what."""
        part = self.away.parts[-1]  # one before it, in host memory, may lie anywhere
        record = part.record
        return (record.address_remainder - part.offset) % record.alignment, record.alignment

    def wait_out(self) -> int:
        if self._left:
            return 0
        waited = self._device.tiers.wait(self.away.writes, what=f"{self.label} to leave")
        self._left = True
        self._device.log_transfers(self.away.writes)
        return waited

    def drop(self) -> None:
        self._device.tiers.drop(self.away)


class _Arrival(Arrival):
    """Takes memory in which a copy can lie as it did where it came from."""

    def __init__(self, copy: _Copy, device: "CpuDevice", *, urgent: bool) -> None:
        self._device, self._label = device, copy.label
        remainder, alignment = copy.remainder
        # The pool's memory begins at a page, as that of the tensor did.
        spare_bytes = remainder if copy.pooled else alignment - 1
        landing = _empty(copy.nbytes + spare_bytes)
        if copy.pooled and not device.pool.owns(landing.data_ptr()):
            landing = _empty(copy.nbytes + alignment)
        address = landing.data_ptr()
        self._landing, self._offset = landing, (remainder - address) % alignment
        self._reads = device.tiers.get(
            copy.away, address + self._offset, owner=landing, urgent=urgent
        ).reads

    def wait(self) -> tuple[torch.UntypedStorage, int, int]:
        waited = self._device.tiers.wait(self._reads, what=f"{self._label} to come back")
        self._device.log_transfers(self._reads)
        return self._landing.untyped_storage(), self._offset, waited


class CpuDevice(Device):
    """This process's memory as the device tier."""

    type = "cpu"

    def __init__(self, *, storage: Storage, host_bytes: int, strict: bool = False) -> None:
        self.name = f"cpu {platform.machine()}"
        proc_file.open_all()
        _alive.add(self)
        self.host_pool = PinnedPool(host_bytes, pin=None)
        host = None
        if host_bytes:
            host = Storage.in_memory(
                self.host_pool, checksum=storage.checks, deadline_s=storage.deadline_s
            )
        self._tiers = Tiers(storage, host)
        self._malloc = Malloc()
        self._malloc.keep_for_reuse()
        self._exact = False
        self._bearable_free_bytes = 0
        """While memory is measured: trimming takes 1 ms, where the heap has many holes."""
        self._unused_after_trim_bytes = 0
        """What no trimming gives back: code, the interpreter's own."""
        self._sites_since_trim = 0
        self._next_urgent_trim_ns = 0
        self.pool, refusal = cpu_pool.join(self)
        self._without_pool = (_HEAP.format(refusal),) if refusal else ()
        self.spare_pages = None if refusal else self.pool
        if refusal:
            fallbacks.allow(*self._without_pool, strict=strict)
        self._transfers: list[TransferRecord] = []
        self._limit_bytes: int | None = None
        self._resident = ResidentMemory()
        self._most_beside_pool_bytes = 0
        """What the heap gave back when it was trimmed it takes again."""

    @property
    def tiers(self) -> Tiers:
        return self._tiers

    @property
    def storage(self) -> Storage:
        return self._tiers.storage

    @property
    def fallbacks(self) -> tuple[str, ...]:
        return (*super().fallbacks, *self._without_pool)

    @property
    def why_state_stays(self) -> str:
        return ""

    def state_memory(self) -> BlockMemory:
        return PageMemory(self._tiers)

    def keeps_beside(self, beside: Beside) -> None:
        self.waits_for = beside

    def hardware(self) -> Hardware:
        from teraplan.runtime.links import host_link, storage_link

        storage = self.storage
        directories = [store.directory for store in storage.stores if store.in_use]
        return Hardware(
            device=self.name,
            device_capacity_bytes=self.capacity_bytes(),
            host_capacity_bytes=int(self.tiers.host_capacity_bytes * _HOST_CAPACITY_FRACTION),
            storage_capacity_bytes=storage.free_bytes + storage.bytes_in_use,
            host_link=host_link("cpu") if self.tiers.host is not None else None,
            storage_link=storage_link(directories, encrypt=storage.encrypts)
            if directories
            else None,
        )

    def capacity_bytes(self) -> int:
        return self._tensor_bytes() + int(process_memory.available_bytes() * _RESERVED_FRACTION)

    def state_bytes(self) -> int:
        beside = self.waits_for.total_bytes if self.waits_for is not None else 0
        return max(0, self._tensor_bytes() - beside)

    def measure_exactly(self) -> None:
        gc.collect()
        self._trim_exactly()  # what is free now may go while the step is measured
        ranges = [(s.data_ptr(), s.nbytes()) for s in census.storages("cpu")]
        nbytes = sum(nbytes for _, nbytes in ranges) - self.host_pool.mapped_bytes
        self._bearable_free_bytes = min(MEASURED_WITHIN_BYTES, nbytes // _PART_THAT_MAY_BE_FREE)
        use_small_pages(*process_memory.heap_range())
        use_huge_pages(ranges)
        self._exact = True

    def run_fast(self) -> None:
        self.pool.trim()
        self._put_heap_on_huge_pages()
        self._most_beside_pool_bytes = 0
        self._exact = False

    def limit_host(self, nbytes: int) -> None:
        self._tiers.host_limit_bytes = max(self._tiers.host_limit_bytes or 0, nbytes)

    def has_compiled(self) -> None:
        gc.collect()
        self._malloc.trim()

    def give_back_heap(self, *, cycles: bool) -> None:
        if cycles:
            gc.collect(_YOUNG)
        self._malloc.trim()
        process_memory.reset_peak()

    def let_go(self, nbytes: int) -> None:
        self.pool.lower(nbytes)
        if self._limit_bytes is None or nbytes <= _WORTH_TRIMMING_BYTES:
            return
        if process_memory.resident_bytes_fast() - self._limit_bytes > _WORTH_TRIMMING_BYTES:
            self._malloc.trim()

    def hold_less(self, nbytes: int) -> None:
        self.pool.lower(nbytes)
        self._put_heap_on_huge_pages()

    def resident_bytes(self) -> int:
        beside = self.waits_for.held_bytes if self.waits_for is not None else 0
        return process_memory.resident_bytes() - beside

    def tensors_and_overhead(self) -> tuple[int, int]:
        tensors_bytes = self.state_bytes()
        gc.collect(_YOUNG)
        self._trim()  # also what counting has taken
        return tensors_bytes, self.resident_bytes() - tensors_bytes

    def take_peak(self) -> int:
        peak = process_memory.peak_bytes()
        if self.waits_for is not None:
            peak -= self.waits_for.take_peak()
        if self._exact:
            free_bytes = self._unused_bytes() - self._unused_after_trim_bytes
            if free_bytes > self._bearable_free_bytes:
                self._trim_exactly()
        process_memory.reset_peak()
        return peak

    def make_room(self, nbytes: int) -> None:
        if self._limit_bytes is None:
            self._trim()
            return
        beyond = self._resident_soon() + nbytes - self._limit_bytes
        beyond -= self.pool.shrink(beyond)
        if self.pool.room_bytes is not None:
            self.pool.room_bytes = max(0, min(self.pool.room_bytes, -beyond))

    def make_room_for_tensors(self, nbytes: int) -> None:
        if self._limit_bytes is None or self.spare_pages is None:
            self.make_room(nbytes)  # else the pool keeps to its room

    def _resident_soon(self) -> int:
        """What is resident now and will be without another allocation."""
        coming = self.waits_for.coming_bytes if self.waits_for is not None else 0
        return self._resident.read(self.pool.num_blocks_made) + coming

    def keep_under(self, limit_bytes: int, headroom_bytes: int, free_bytes: int = 0) -> None:
        self._sites_since_trim += 1
        self._limit_bytes = limit_bytes
        num_blocks = self.pool.num_blocks_made
        if self.waits_for is None and self._resident.is_surely_under(limit_bytes, num_blocks):
            return
        self.pool.settle()
        resident = self._resident_soon()
        beside_bytes = self.waits_for.held_bytes if self.waits_for is not None else 0
        pool_bytes = self.pool.held_bytes + beside_bytes
        self._most_beside_pool_bytes = max(self._most_beside_pool_bytes, resident - pool_bytes)
        slack = limit_bytes - headroom_bytes - self._most_beside_pool_bytes - pool_bytes
        self.pool.slack_bytes = max(0, slack)
        beyond = resident - limit_bytes
        urgent = beyond > headroom_bytes
        free_bytes = min(free_bytes, max(0, self.pool.waiting_bytes - beyond))
        self._limit_bytes -= free_bytes
        beyond -= self.pool.shrink(beyond + free_bytes)
        self.pool.room_bytes = max(0, -beyond - free_bytes) if self.waits_for is not None else None
        is_due = self._sites_since_trim > _SITES_BETWEEN_TRIMS or (
            urgent and time.perf_counter_ns() >= self._next_urgent_trim_ns
        )
        if beyond > _WORTH_TRIMMING_BYTES and is_due:
            self._trim_heap()

    def peak_bytes(self) -> int:
        return process_memory.peak_bytes()

    def mark(self) -> int:
        return time.perf_counter_ns()

    def elapsed_ns(self, start: object, end: object) -> int:
        assert isinstance(start, int)
        assert isinstance(end, int)
        return end - start

    def start_out(
        self, tensor: torch.Tensor, tier: Tier, label: str, *, host_bytes: int = 0
    ) -> Copy:
        storage = tensor.untyped_storage()
        first = storage.nbytes() if tier is Tier.HOST else host_bytes
        return _Copy(self, storage, label, host_bytes=first)

    def start_back(self, copy: Copy, *, urgent: bool = False) -> Arrival:
        assert isinstance(copy, _Copy), f"{copy} was not made by this device"
        return _Arrival(copy, self, urgent=urgent)

    def empty(self, size: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty_strided(size, stride, dtype=dtype, device="cpu")

    def take_transfers(self) -> tuple[TransferRecord, ...]:
        transfers, self._transfers = tuple(self._transfers), []
        return transfers

    def stores(self) -> tuple[StoreInfo, ...]:
        return self.storage.stores

    def describe(self) -> str:
        return self._tiers.describe()

    def close(self) -> None:
        self.tiers.close()
        self.host_pool.close()
        cpu_pool.leave(self)
        _alive.discard(self)

    def _tensor_bytes(self) -> int:
        """Of all tensors but what other sessions of this process have moved away.

        What lies over the mappings of host pools is counted by its parts, which are tensors.
        """
        devices = [device for device in list(_alive) if device is not self]
        others = [device.waits_for for device in devices if device.waits_for is not None]
        here = (
            storage.nbytes()
            for storage in census.storages("cpu")
            if all(other.holds(storage.data_ptr()) is not False for other in others)
        )
        return sum(here) - sum(device.host_pool.mapped_bytes for device in (self, *devices))

    def _unused_bytes(self) -> int:
        """Of the resident memory, what neither the heap nor the pool has given to anyone."""
        return self.resident_bytes() - self._malloc.in_use_bytes() - self.pool.in_use_bytes

    def _put_heap_on_huge_pages(self) -> None:
        if census.tensor_nbytes("cpu") >= _WORTH_HUGE_PAGES_BYTES:
            use_huge_pages([process_memory.heap_range()])
        self._malloc.trim()  # to count all tensors takes 8 bytes for each object of the process

    def _trim_exactly(self) -> None:
        self._trim()
        self._unused_after_trim_bytes = self._unused_bytes()

    def _trim(self) -> None:
        self.pool.trim()
        self._malloc.trim()

    def _trim_heap(self) -> None:
        start_ns, before = time.perf_counter_ns(), process_memory.resident_bytes_fast()
        self._malloc.trim()
        end_ns, freed = time.perf_counter_ns(), before - process_memory.resident_bytes_fast()
        cost_ns = end_ns - start_ns + max(0, freed) * _FAULT_NS_PER_BYTE
        self._next_urgent_trim_ns = end_ns + int(cost_ns / _MOST_TIME_FOR_URGENT_TRIMS)
        self._sites_since_trim = 0

    def log_transfers(self, moves: Iterable[Moved]) -> None:
        """Remember what has been moved."""
        self._transfers += [record_of(move, move.transfer.label) for move in moves]


def _empty(nbytes: int) -> torch.Tensor:
    """On the CPU, whatever the program's default device is."""
    return torch.empty(nbytes, dtype=torch.uint8, device="cpu")


_alive: "weakref.WeakSet[CpuDevice]" = weakref.WeakSet()
"""Those that are not closed."""
