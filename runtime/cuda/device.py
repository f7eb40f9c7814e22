"""A CUDA device: tensors leave for pinned host memory or NVMe beside the computation.

    computation   ...save----------------gone--- ... ---back--------------need...
    side streams     \\-> copy out ->left-/             \\-> copy in ->arrived-/

The computation's stream never waits for the host's disk: it waits for events of copies, and the
host waits (with a deadline) only until the copy that it has to wait for is queued. A freed tensor's
memory goes back to the allocator when the stream is told to wait for its copy, not when the copy
ends, so what the allocator counts is what the plan counts. Bytes for storage go through bounded
pinned memory (`staging`), or straight from the device where GDS has been proved to work.

Tested on a CPU with streams that run as threads (`tests/fakes`); not run on a GPU.
"""

import logging
import math
import os
from collections.abc import Sequence
from functools import partial

import torch

from teraplan.errors import FallbackRefusedError
from teraplan.runtime.cuda.cache import CachedMemory
from teraplan.runtime.cuda.event_waiter import EventWaiter
from teraplan.runtime.cuda.host_tier import HostTier
from teraplan.runtime.cuda.lane import StreamLane
from teraplan.runtime.cuda.log import DeviceLog
from teraplan.runtime.cuda.runtime import CudaRuntime, Event
from teraplan.runtime.cuda.staging import LEAST_BYTES, Staging
from teraplan.runtime.cuda.storage_pointers import why_not, why_not_raising
from teraplan.runtime.cuda.swapped_memory import SwappedMemory
from teraplan.runtime.cuda.tiers import CudaTiers
from teraplan.runtime.device import Arrival, Beside, Copy, Device, DeviceStall
from teraplan.runtime.host_lane import HostLane
from teraplan.runtime.links import host_link, storage_link
from teraplan.runtime.process import fallbacks
from teraplan.runtime.process.pinned_pool import PinnedPool, wait_until
from teraplan.runtime.state.memory.block_memory import BlockMemory
from teraplan.runtime.storage import Storage, StoreInfo
from teraplan.units import MIB
from teraplan.values.hardware import Hardware, Tier
from teraplan.values.run_record import TransferRecord
from teraplan.values.step_trace import TensorKind

log = logging.getLogger(__name__)

_CAPACITY_FRACTION = 0.95
"""Share of the device's free memory that a budget left open takes: fragmentation needs the rest."""
_HOST_CAPACITY_FRACTION = 0.99
"""Share of the host pool that plans may use: every tensor is rounded up to the pool's granule."""
_HOST_GRANULE_BYTES = 512
_STAGING_PER_STORE_BYTES = 256 * MIB
_STAGING_FRACTION = 0.25
"""Most of the host budget that staging takes, if there is that much."""


class CudaDevice(Device):
    """One GPU."""

    has_host_beside = True
    shows_state_in_files = False
    waits_to_tell = True
    moves_state_unasked = False

    def __init__(
        self,
        cuda: CudaRuntime,
        storage: Storage,
        *,
        host_bytes: int,
        deadline_s: float = 60.0,
        strict: bool = False,
        staging_bytes: int | None = None,
    ) -> None:
        self.cuda, self._storage = cuda, storage
        self.name, self.type = cuda.name, cuda.type
        self._deadline_s = deadline_s
        self._owner_pid, self._closed = os.getpid(), False
        self._log, self._cached = DeviceLog(cuda), CachedMemory(cuda)
        direct = storage.takes_device_memory
        if staging_bytes is None:
            staging_bytes = 0 if direct else _staging_bytes(host_bytes, len(storage.stores))
        self.staging = None
        if not direct:
            self.staging = Staging(
                cuda, self._log, storage, nbytes=staging_bytes, deadline_s=deadline_s
            )
        self.pool = PinnedPool(
            max(0, host_bytes - staging_bytes),
            pin=cuda.pin,
            unpin=cuda.unpin,
            granule_bytes=_HOST_GRANULE_BYTES,
        )
        self.host_pool = self.pool
        self._waiters = (
            EventWaiter("teraplan-to-host", cuda.enter_thread),
            EventWaiter("teraplan-from-host", cuda.enter_thread),
        )
        # One engine of the device serves each direction: copies of both tiers share its stream.
        self._streams = (
            self.staging.streams
            if self.staging is not None
            else (cuda.new_stream(), cuda.new_stream())
        )
        self._host = HostTier(
            cuda, self._log, self.pool, streams=self._streams, waiters=self._waiters
        )
        self._require_pinned = partial(_require_pinned, self._pools(), strict=strict)
        self._tiers = CudaTiers(
            *(cuda, self._log, storage),
            host=self._host,
            staging=self.staging,
            require_pinned=self._require_pinned,
        )
        self._state: SwappedMemory | None = None
        self._beside: Beside | None = None
        try:
            self._require_pinned()
        except FallbackRefusedError:
            self.close()
            raise

    # -- facts ---------------------------------------------------------------------------------

    @property
    def storage(self) -> Storage:
        return self._storage

    @property
    def fallbacks(self) -> tuple[str, ...]:
        pageable = (pool.why_not_pinned for pool in self._pools())
        held = self._state is not None and not self.storage.encrypts and why_not_raising()
        alone = f"optimizer state goes to host memory alone: {held}" if held else ""
        return (*super().fallbacks, *filter(None, (*pageable, alone)))

    @property
    def why_state_stays(self) -> str:
        reason = why_not()
        if reason:
            return reason
        lease = self.pool.try_take(_HOST_GRANULE_BYTES)
        if self.pool.why_not_pinned:
            return self.pool.why_not_pinned
        if lease is None:
            return "there is no host memory that it could go to; raise host_budget"
        return self.cuda.why_not_shown(lease.parts[0].address)

    def state_memory(self) -> BlockMemory:
        stores = not self.storage.encrypts and not why_not_raising()
        self._state = SwappedMemory(self.cuda, self._tiers, stores_state=stores)
        return self._state

    def tier_of_state(self, kind: TensorKind) -> Tier | None:
        if kind is TensorKind.OPTIMIZER_STATE and self._state is not None:
            return None if self._state.needs_storage else Tier.HOST
        return Tier.HOST

    def keeps_beside(self, beside: Beside) -> None:
        self._beside = beside

    def hardware(self) -> Hardware:
        directories = [store.directory for store in self.storage.stores if store.in_use]
        free_bytes = self.pool.limit_bytes - self.pool.in_use_bytes
        if self._state is not None:  # a plan counts it itself
            free_bytes += self._state.host_bytes - self._state.kept_free_bytes
        host_bytes = int(max(0, free_bytes) * _HOST_CAPACITY_FRACTION)
        return Hardware(
            device=self.name,
            device_capacity_bytes=self.capacity_bytes(),
            host_capacity_bytes=host_bytes,
            storage_capacity_bytes=self.storage.free_bytes + self.storage.bytes_in_use,
            host_link=host_link(str(self.cuda.device)) if host_bytes else None,
            storage_link=storage_link(directories, encrypt=self.storage.encrypts)
            if directories
            else None,
        )

    def capacity_bytes(self) -> int:
        return self.cuda.reserved().nbytes + int(self.cuda.free_bytes() * _CAPACITY_FRACTION)

    def state_bytes(self) -> int:
        return self.resident_bytes()

    def measure_exactly(self) -> None:
        """The allocator counts whenever it gives or takes.

        Blocks, each a little larger than its tensor (512 bytes at most, or 1 MiB where that is left
        of a segment): what a budget is about is the memory that they take, not what was asked for.
        """

    def run_fast(self) -> None:
        self.cuda.empty_cache()  # what measuring left behind, in the sizes of another plan

    def resident_bytes(self) -> int:
        beside = self._beside.held_bytes if self._beside is not None else 0
        return self.cuda.allocated("current") - beside

    def take_peak(self) -> int:
        peak = self.peak_bytes()
        if self._beside is not None:
            peak -= self._beside.take_peak()
        self.cuda.reset_peaks()
        return peak

    def peak_bytes(self) -> int:
        return self.cuda.allocated("peak")

    def make_room(self, nbytes: int) -> None:
        """The allocator has one heap for all, and takes from it what is cached by itself."""

    def keep_under(self, limit_bytes: int, headroom_bytes: int, free_bytes: int = 0) -> None:
        self._cached.keep_under(limit_bytes + headroom_bytes)

    def open_lane(self) -> HostLane:
        return StreamLane(self.cuda)

    # -- time ----------------------------------------------------------------------------------

    def mark(self) -> Event:
        return self.cuda.record(self.cuda.current_stream(), timing=True)

    def elapsed_ns(self, start: object, end: object) -> int:
        assert isinstance(start, Event), "marks are made by `mark`"
        assert isinstance(end, Event), "marks are made by `mark`"
        start.synchronize()
        end.synchronize()
        return self.cuda.elapsed_ns(start, end)

    def take_transfers(self) -> tuple[TransferRecord, ...]:
        self._cached.step_has_ended()
        return self._log.take_transfers()

    def take_stalls(self) -> tuple[DeviceStall, ...]:
        return self._log.take_stalls()

    # -- transfers -----------------------------------------------------------------------------

    def start_out(
        self, tensor: torch.Tensor, tier: Tier, label: str, *, host_bytes: int = 0
    ) -> Copy:
        source = self.cuda.bytes_of(tensor.untyped_storage())
        return self._tiers.put(source, tier, label, host_bytes=host_bytes)

    def start_back(self, copy: Copy, *, urgent: bool = False) -> Arrival:
        return self._tiers.get(copy, urgent=urgent)

    def empty(self, size: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        memory = self.cuda.empty(math.prod(size) * dtype.itemsize)
        made = torch.empty(0, dtype=dtype, device=memory.device)
        return made.set_(memory.untyped_storage(), 0, tuple(size), tuple(stride))

    def _pools(self) -> tuple[PinnedPool, ...]:
        if self.staging is None:
            return (self.pool,)
        return self.pool, self.staging.writes, self.staging.reads

    def stores(self) -> tuple[StoreInfo, ...]:
        return self.storage.stores

    def close(self) -> None:
        if self._closed or os.getpid() != self._owner_pid:
            return
        self._closed = True
        self.storage.close()
        if self.staging is not None:
            self.staging.close()
        ended = [waiter.close(self._deadline_s) for waiter in self._waiters]
        last = [self.cuda.record(stream) for stream in self._streams]
        if all(ended) and wait_until(lambda: all(e.query() for e in last), self._deadline_s):
            self.pool.close()
        else:
            log.warning("copies hang on %s; their host memory stays registered", self.name)


def _require_pinned(pools: Sequence[PinnedPool], *, strict: bool) -> None:
    """Raise a FallbackRefusedError if `strict`, and some memory of the pools is pageable."""
    pageable = [pool.why_not_pinned for pool in pools if pool.why_not_pinned]
    if pageable:
        fallbacks.allow(pageable[0], strict=strict)


def _staging_bytes(host_bytes: int, num_stores: int) -> int:
    """Staging memory within a host budget; the least that works if the budget has less."""
    wanted = min(_STAGING_PER_STORE_BYTES * num_stores, int(host_bytes * _STAGING_FRACTION))
    return max(LEAST_BYTES, wanted // (2 * MIB) * (2 * MIB))
