"""CUDA's calls as torch makes them: the one file that names them. Not run on a GPU."""

import ctypes
from contextlib import suppress
from types import ModuleType
from typing import Any, final

import torch

from teraplan.errors import UnsupportedError
from teraplan.runtime.cuda.runtime import CudaRuntime, Event, Reserved, Stream

_PORTABLE = 1  # cudaHostRegisterPortable: pinned for all devices of the process
_MAPPED = 2  # cudaHostRegisterMapped: kernels can use it
_DEVICE_POINTER = 3  # CU_POINTER_ATTRIBUTE_DEVICE_POINTER


@final
class TorchCuda(CudaRuntime):
    """One device through torch."""

    type = "cuda"

    def __init__(self, index: int | None = None) -> None:
        self.index = torch.cuda.current_device() if index is None else index
        self.device = torch.device("cuda", self.index)
        self.name = torch.cuda.get_device_name(self.index)
        self._written_to = self.empty(1)

    def current_stream(self) -> Stream:
        return torch.cuda.current_stream(self.device)

    def new_stream(self) -> Stream:
        # torch's streams are non-blocking: not ordered with the legacy default stream.
        return torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]

    def record(self, stream: Stream, *, timing: bool = False) -> Event:
        # `blocking`: a thread that waits sleeps instead of spinning on a core.
        event = torch.cuda.Event(enable_timing=timing, blocking=True)  # type: ignore[no-untyped-call]
        event.record(_torch(stream))
        return event

    def wait(self, stream: Stream, event: Event) -> None:
        assert isinstance(event, torch.cuda.Event)
        event.wait(_torch(stream))

    def copy(self, target: torch.Tensor, source: torch.Tensor, stream: Stream) -> None:
        with torch.cuda.stream(_torch(stream)):
            target.copy_(source, non_blocking=True)

    def empty(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device=self.device)

    def used_by(self, tensor: torch.Tensor, stream: Stream) -> None:
        tensor.record_stream(_torch(stream))  # returns at once for the stream that owns the memory

    def bytes_of(self, storage: torch.UntypedStorage) -> torch.Tensor:
        if storage.device != self.device:
            raise UnsupportedError(
                f"a tensor is on {storage.device}, but its graph computes on {self.device}; have "
                "all tensors of a compiled part of the model on one device"
            )
        whole = torch.empty(0, dtype=torch.uint8, device=storage.device)
        whole.set_(storage, 0, (storage.nbytes(),), (1,))
        return whole

    def elapsed_ns(self, start: Event, end: Event) -> int:
        assert isinstance(start, torch.cuda.Event)
        assert isinstance(end, torch.cuda.Event)
        elapsed_ms: float = start.elapsed_time(end)
        return round(elapsed_ms * 1e6)

    def enter_thread(self) -> None:
        torch.cuda.set_device(self.device)

    def work_on(self, stream: Stream) -> None:
        self.enter_thread()
        torch.cuda.set_stream(_torch(stream))

    def pin(self, address: int, nbytes: int) -> str:
        runtime = _cudart()
        code = int(runtime.cudaHostRegister(address, nbytes, _PORTABLE | _MAPPED))
        if code == 0:
            return ""
        self._forget_error()
        return f"cudaHostRegister of {nbytes} bytes failed with CUDA error {code}"

    def unpin(self, address: int) -> None:
        runtime = _cudart()
        if int(runtime.cudaHostUnregister(address)) != 0:
            self._forget_error()

    def why_not_shown(self, address: int) -> str:
        try:
            ask = ctypes.CDLL("libcuda.so.1").cuPointerGetAttribute
        except (OSError, AttributeError) as error:
            return f"the driver cannot be asked: {error}"
        found = ctypes.c_uint64()
        code = int(ask(ctypes.byref(found), _DEVICE_POINTER, ctypes.c_uint64(address)))
        if code:
            return f"cuPointerGetAttribute failed with CUDA error {code}"
        return "" if found.value == address else "kernels know it by another address"

    def allocated(self, which: str) -> int:
        stats = self._figures()
        return _of_all(stats, "allocated_bytes", which)

    def reserved(self) -> Reserved:
        stats = self._figures()
        nbytes, allocated, split = (
            _of_all(stats, kind, "current")
            for kind in ("reserved_bytes", "allocated_bytes", "inactive_split_bytes")
        )
        return Reserved(nbytes, nbytes - allocated - split)

    def reset_peaks(self) -> None:
        torch.cuda.reset_peak_memory_stats(self.device)

    def empty_cache(self) -> None:
        torch.cuda.empty_cache()

    def free_bytes(self) -> int:
        free, total = torch.cuda.mem_get_info(self.device)
        # torch.cuda.set_per_process_memory_fraction; older versions of torch do not tell it
        fraction_of = getattr(torch.cuda, "get_per_process_memory_fraction", lambda _: 1.0)
        allowed = int(total * fraction_of(self.device)) - self.reserved().nbytes
        return max(0, min(free, allowed))

    def _figures(self) -> dict[str, Any]:
        # The flat `memory_stats` sorts them as well.
        return torch.cuda.memory_stats_as_nested_dict(self.device)

    def _forget_error(self) -> None:
        # A failed call leaves its error behind for whoever launches the next kernel. Launch one,
        # and take no memory for it, which the error may be about. One of the device comes again.
        with suppress(RuntimeError):
            self._written_to.zero_()


def _of_all(stats: dict[str, Any], kind: str, which: str) -> int:
    """A figure for all of the allocator's pools together; 0 before CUDA was used."""
    return int(stats[kind]["all"][which]) if stats else 0


def _torch(stream: Stream) -> torch.cuda.Stream:
    assert isinstance(stream, torch.cuda.Stream)
    return stream


def _cudart() -> ModuleType:
    runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    assert isinstance(runtime, ModuleType), "torch has no CUDA"
    return runtime
