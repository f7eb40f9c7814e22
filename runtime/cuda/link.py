"""How fast bytes move between a GPU and pinned host memory. Not run on a GPU yet."""

from contextlib import closing
from time import perf_counter_ns

from teraplan.runtime.cuda.runtime import CudaRuntime
from teraplan.runtime.process import process_memory
from teraplan.runtime.process.pinned_pool import PAGE_BYTES, Lease, PinnedPool
from teraplan.units import MIB
from teraplan.values.hardware import Link

_BLOCK_BYTES = 64 * MIB
_PART_OF_FREE = 32
"""A block takes no more than this part of what is free: no budget knows of it."""
_COPIED_BYTES = 512 * MIB
"""In each direction, each time."""
_LATENCY_NS = 20_000


def measure_link(cuda: CudaRuntime) -> Link:
    """Measured with two blocks on each side, on streams of their own; keeps none of the memory.

    What is pinned is not of torch's own allocator, which would keep it.
    """
    free_bytes = min(cuda.free_bytes(), process_memory.available_bytes())
    wanted = min(_BLOCK_BYTES, free_bytes // _PART_OF_FREE)
    nbytes = max(MIB, wanted // PAGE_BYTES * PAGE_BYTES)
    with closing(PinnedPool(2 * nbytes, pin=cuda.pin, unpin=cuda.unpin)) as pool:
        link = _Copies(cuda, pool, nbytes).link()
    cuda.empty_cache()
    return link


class _Copies:
    """Between the first blocks of both sides, and between the second ones."""

    def __init__(self, cuda: CudaRuntime, pool: PinnedPool, nbytes: int) -> None:
        self._cuda, self._nbytes = cuda, nbytes
        self._leases = [_lease(pool, nbytes) for _ in range(2)]
        self._there = [cuda.empty(nbytes) for _ in range(2)]
        self._streams = cuda.new_stream(), cuda.new_stream()

    def link(self) -> Link:
        try:
            self._rate(out=True, back=True)  # the first copies set things up
            out, back = self._rate(out=True, back=False), self._rate(out=False, back=True)
            both = self._rate(out=True, back=True)
        finally:
            self._wait()
        return Link(
            out_bytes_per_s=out,
            back_bytes_per_s=back,
            out_while_back_bytes_per_s=min(out, both),
            back_while_out_bytes_per_s=min(back, both),
            latency_ns=_LATENCY_NS,
        )

    def _rate(self, *, out: bool, back: bool) -> int:
        """Bytes per second in each direction."""
        cuda, num_copies = self._cuda, _COPIED_BYTES // self._nbytes
        here = [lease.parts[0].tensor for lease in self._leases]
        # What was computed in the device's blocks before they came to be ours must not be hit.
        cuda.record(cuda.current_stream()).synchronize()
        started_ns = perf_counter_ns()
        for _ in range(num_copies):
            if out:
                cuda.copy(here[0], self._there[0], self._streams[0])
            if back:
                cuda.copy(self._there[1], here[1], self._streams[1])
        self._wait()
        elapsed_ns = max(1, perf_counter_ns() - started_ns)
        return num_copies * self._nbytes * 10**9 // elapsed_ns

    def _wait(self) -> None:
        for stream in self._streams:
            self._cuda.record(stream).synchronize()


def _lease(pool: PinnedPool, nbytes: int) -> Lease:
    lease = pool.try_take(nbytes)
    assert lease is not None, "the pool has room for two"
    return lease
