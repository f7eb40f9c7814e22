"""The CUDA back end over a device that computes on the CPU.

Everything between the engine and CUDA's calls is the real thing: staging, pinned pools, events,
threads. The computation runs on the host, so a stream that it must not overtake blocks it.
"""

import ctypes
import dataclasses
from collections.abc import Iterable

import torch

from teraplan.runtime.cpu.device import CpuDevice
from teraplan.runtime.cuda.device import CudaDevice
from teraplan.runtime.device import Beside
from teraplan.runtime.process.pinned_pool import PinnedPool
from teraplan.runtime.storage import Storage
from teraplan.units import MIB
from teraplan.values.hardware import Hardware
from tests.fakes.fake_cuda import FakeCuda, HostStream

STAGING = 8 * MIB


class CudaOnHost(FakeCuda):
    """Device memory is what PyTorch allocates on the CPU."""

    def __init__(self) -> None:
        super().__init__(slowest_s=0.001)
        self.compute.close()
        self.compute = HostStream("compute")
        self.streams[0] = self.compute

    def empty(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8)

    def pin(self, address: int, nbytes: int) -> str:
        ctypes.memset(address, 0, nbytes)  # as pinning does: the pages are there from now on
        return super().pin(address, nbytes)


_MEMORY = (
    "capacity_bytes",
    "state_bytes",
    "measure_exactly",
    "run_fast",
    "resident_bytes",
    "take_peak",
    "keep_under",
    "let_go",
    "hold_less",
    "peak_bytes",
)


class _Beside:
    """Memory of moving training state, which here is memory of tensors, too."""

    def __init__(self, beside: Beside) -> None:
        self._beside = beside

    @property
    def held_bytes(self) -> int:
        return self._beside.held_bytes

    def take_peak(self) -> int:
        return self._beside.take_peak()

    coming_bytes = 0
    waited_ns = 0

    @property
    def total_bytes(self) -> int:
        return self._beside.total_bytes + self._beside.held_bytes

    def holds(self, address: int) -> bool | None:
        return None


class _Pools(PinnedPool):
    """Host memory, which is no memory of the device although tensors lie over it."""

    def __init__(self, pools: Iterable[PinnedPool]) -> None:
        super().__init__(0, pin=None)
        self.mapped_bytes = sum(pool.mapped_bytes for pool in pools)


class CudaPath(CudaDevice):
    """Counts memory as the CPU device does, and moves bytes as the CUDA device does."""

    def __init__(self, storage: Storage, host_bytes: int) -> None:
        self.cpu = CpuDevice(storage=storage, host_bytes=0)
        super().__init__(CudaOnHost(), storage, host_bytes=host_bytes, staging_bytes=STAGING)
        self.pool.prepare()
        self.cpu.host_pool = _Pools(self._pools())
        for name in _MEMORY:
            setattr(self, name, getattr(self.cpu, name))

    def keeps_beside(self, beside: Beside) -> None:
        self.cpu.keeps_beside(_Beside(beside))

    def hardware(self) -> Hardware:
        found = super().hardware()
        return dataclasses.replace(found, device_capacity_bytes=self.cpu.capacity_bytes())

    def close(self) -> None:
        super().close()
        self.cpu.close()
        assert isinstance(self.cuda, FakeCuda)
        self.cuda.close()
