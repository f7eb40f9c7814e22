"""The calls to CUDA, with answers of torch's that are made up."""

from types import ModuleType

import pytest
import torch

from teraplan.runtime.cuda import torch_runtime
from teraplan.runtime.cuda.runtime import Reserved
from teraplan.runtime.cuda.torch_runtime import TorchCuda
from teraplan.runtime.process.pinned_pool import PinnedPool
from teraplan.units import MIB

OUT_OF_MEMORY = 2


class _Runtime(ModuleType):
    """Refuses to register memory, and leaves that error behind for the next kernel."""

    left_behind = ""

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        self.left_behind = (
            "CUDA error: out of memory\nSearch for `cudaErrorMemoryAllocation' in ..."
        )
        return OUT_OF_MEMORY

    def cudaHostUnregister(self, address: int) -> int:
        self.left_behind = "CUDA error: invalid argument"
        return 1


class _OnDevice(torch.Tensor):
    """What launches a kernel on it reports the error that has been left behind, once."""

    runtime: _Runtime

    def zero_(self) -> torch.Tensor:
        text, self.runtime.left_behind = self.runtime.left_behind, ""
        if text:
            raise RuntimeError(text)
        return self


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> _Runtime:
    """Of a device of which there is none."""
    runtime = _Runtime("cudart")

    def empty(_: TorchCuda, nbytes: int) -> torch.Tensor:
        tensor = torch.empty(nbytes, dtype=torch.uint8).as_subclass(_OnDevice)
        tensor.runtime = runtime
        return tensor

    monkeypatch.setattr(TorchCuda, "empty", empty)
    monkeypatch.setattr(torch_runtime, "_cudart", lambda: runtime)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "made up")
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    return runtime


def test_what_lies_beside_a_tensor_cannot_be_given_back(
    runtime: _Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    figures = {"reserved_bytes": 100, "allocated_bytes": 60, "inactive_split_bytes": 30}
    stats = {kind: {"all": {"current": nbytes, "peak": 90}} for kind, nbytes in figures.items()}
    monkeypatch.setattr(torch.cuda, "memory_stats_as_nested_dict", lambda _: stats)
    cuda = TorchCuda()
    assert cuda.reserved() == (100, 10)
    assert (cuda.allocated("current"), cuda.allocated("peak")) == (60, 90)
    stats.clear()  # nothing has been allocated
    assert cuda.reserved() == (0, 0)


@pytest.mark.parametrize(
    ("fraction", "free"), [(1.0, 70), (0.5, 40), (0.05, 0), (None, 70)], ids=str
)
def test_what_is_free_is_no_more_than_the_process_may_have(
    fraction: float | None, free: int, runtime: _Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (70, 100))
    monkeypatch.setattr(TorchCuda, "reserved", lambda _: Reserved(10, 0))
    name = "get_per_process_memory_fraction"
    if fraction is None:  # an older version
        monkeypatch.delattr(torch.cuda, name)
    else:
        monkeypatch.setattr(torch.cuda, name, lambda _: fraction)
    assert TorchCuda().free_bytes() == free


def test_memory_that_cannot_be_registered_is_pageable(runtime: _Runtime) -> None:
    cuda = TorchCuda()
    pool = PinnedPool(MIB, pin=cuda.pin, unpin=cuda.unpin)
    pool.prepare()
    assert "CUDA error 2" in pool.why_not_pinned
    assert runtime.left_behind == "", "the next kernel would report it"
    pool.close()
    cuda.unpin(0)
    assert runtime.left_behind == ""
