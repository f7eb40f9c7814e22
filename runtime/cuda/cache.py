"""Memory that the allocator of a CUDA device keeps for later, and when it is given back.

The device has to stand still for that, and what the next step needs of it is then taken anew, which
costs milliseconds. So it happens once per step at most, only if it brings much, and more and more
rarely as long as the memory keeps coming back.
"""

from teraplan.runtime.cuda.runtime import CudaRuntime
from teraplan.units import MIB

_WORTH_BYTES = 64 * MIB
"""Less than this is not worth stopping the device."""
_SITES_PER_LOOK = 8
"""To look takes 30 us or so, and a step may have hundreds of sites."""
_LONGEST_PAUSE = 64
"""Most steps from one time to the next that it may happen."""


class CachedMemory:
    """Of one device."""

    def __init__(self, cuda: CudaRuntime) -> None:
        self._cuda = cuda
        self._num_sites = self._step = self._next_step = 0
        self._pause = 1

    def keep_under(self, limit_bytes: int) -> None:
        """Give memory back if the allocator has more than the limit. Called at every site."""
        self._num_sites += 1
        if self._step < self._next_step or self._num_sites % _SITES_PER_LOOK:
            return
        has, releasable = self._cuda.reserved()
        # Where most of what is too much cannot be given back, the rest is in vain.
        if has > limit_bytes and releasable > max(_WORTH_BYTES, (has - limit_bytes) // 2):
            self._cuda.empty_cache()
            self._rest()

    def step_has_ended(self) -> None:
        """Another step begins."""
        self._step += 1

    def _rest(self) -> None:
        came_back_soon = self._step <= self._next_step + self._pause
        self._pause = min(2 * self._pause, _LONGEST_PAUSE) if came_back_soon else 1
        self._next_step = self._step + self._pause
