"""A CUDA runtime without a GPU: streams are threads that run late, device memory is host memory.

What a GPU would get wrong goes wrong here too. A copy knows addresses, not tensors, so it keeps
nothing alive. Memory that is freed is overwritten in the order of the stream that it belongs to, as
the next tensor there would do it, and is given out again at once. Copies take a random time.
"""

import ctypes
import random
import threading
import time
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

import torch

from teraplan.runtime.cuda.runtime import CudaRuntime, Event, Reserved, Stream

POISON = 0xEE
LONGEST_S = 20.0


class FakeEvent:
    def __init__(self, must_be_entered: Callable[[], None]) -> None:
        self._must_be_entered = must_be_entered
        self.passed = threading.Event()
        self.time_ns = 0
        self.error: str = ""

    def mark(self) -> None:
        self.time_ns = time.perf_counter_ns()
        self.passed.set()

    def query(self) -> bool:
        self._must_be_entered()
        return self.passed.is_set()

    def synchronize(self) -> None:
        self._must_be_entered()
        assert self.passed.wait(LONGEST_S), "the device has stopped"
        if self.error:
            raise RuntimeError(self.error)


class FakeStream:
    """Runs what it is given in order, in a thread of its own."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.gate = threading.Event()
        """Cleared by a test to hold the stream back."""
        self.gate.set()
        self._work: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def push(self, work: Callable[[], None]) -> None:
        self._work.put(work)

    def close(self) -> None:
        self.gate.set()
        self._work.put(None)
        self._thread.join(LONGEST_S)

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            self.gate.wait(LONGEST_S)
            work()


class HostStream(FakeStream):
    """The computation of a real program on the CPU: has done everything, and can only block."""

    def push(self, work: Callable[[], None]) -> None:
        work()


class _Memory:
    """Blocks that come back when their tensor ends."""

    def __init__(self) -> None:
        self.waiting: dict[tuple[int, str], list[bytearray]] = {}
        self.in_use: dict[int, int] = {}
        self.peak = 0
        self._types: dict[int, type] = {}
        self._lock = threading.RLock()

    @property
    def in_use_bytes(self) -> int:
        return sum(self.in_use.values())

    def tensor(self, nbytes: int, home: FakeStream) -> torch.Tensor:
        with self._lock:
            blocks = self.waiting.get((nbytes, home.name))
            block = blocks.pop() if blocks else bytearray(nbytes)
            if nbytes not in self._types:  # an array type has its length
                self._types[nbytes] = type(
                    "Lease", (ctypes.c_char * nbytes,), {"__del__": _end_of, "memory": self}
                )
            kind = self._types[nbytes]
            lease = kind.from_buffer(block)  # type: ignore[attr-defined]
            lease.block, lease.home = block, home
            self.in_use[id(block)] = nbytes
            self.peak = max(self.peak, self.in_use_bytes)
            return torch.frombuffer(lease, dtype=torch.uint8)

    def _ended(self, lease: "ctypes.Array[ctypes.c_char]") -> None:
        block: bytearray = lease.block  # type: ignore[attr-defined]
        home: FakeStream = lease.home  # type: ignore[attr-defined]
        address, nbytes = ctypes.addressof(lease), len(block)
        home.push(lambda: _fill(address, nbytes, block))
        with self._lock:
            del self.in_use[id(block)]
            self.waiting.setdefault((nbytes, home.name), []).append(block)


def _end_of(lease: Any) -> None:  # noqa: ANN401  a ctypes array with attributes
    lease.memory._ended(lease)


def _fill(address: int, nbytes: int, _alive: bytearray) -> None:
    ctypes.memset(address, POISON, nbytes)


class FakeCuda(CudaRuntime):
    name = "fake GPU"
    type = "cpu"
    device = torch.device("cpu")

    def __init__(
        self, *, seed: int = 0, why_not_pinned: str = "", slowest_s: float = 0.003
    ) -> None:
        self.compute: FakeStream = FakeStream("compute")
        self.streams: list[FakeStream] = [self.compute]
        self.calls: list[tuple[str, str]] = []
        """What was asked for, and on which stream."""
        self.pinned: dict[int, int] = {}
        self.free_device_bytes = 1 << 30
        self.cached_bytes = self.split_bytes = 0
        """What the allocator has beside tensors, and of it what lies in segments with a tensor."""
        self.strangers: set[str] = set()
        """Threads of ours that have called it without `enter_thread`."""
        self.used: list[str] = []
        self.why_not_pinned = why_not_pinned
        self.error_after_copy = ""
        """Reported by every event that is recorded while this is set."""
        self.slowest_s = slowest_s
        self._random = random.Random(seed)
        self._memory = _Memory()
        self._local = threading.local()

    def use(self, stream: FakeStream) -> None:
        """Make `stream` the current one of this thread."""
        self._local.stream = stream

    def run(self, work: Callable[[], object]) -> None:
        """Compute on the current stream."""
        _fake(self.current_stream()).push(lambda: (work(), None)[1])

    def finish(self) -> None:
        """Wait for all streams."""
        for stream in self.streams:
            self.record(stream).synchronize()

    def close(self) -> None:
        for stream in self.streams:
            stream.close()
        assert not self.strangers, f"{self.strangers} used another device"

    def current_stream(self) -> Stream:
        return getattr(self._local, "stream", self.compute)

    def new_stream(self) -> Stream:
        stream = FakeStream(f"side {len(self.streams)}")
        self.streams.append(stream)
        return stream

    def record(self, stream: Stream, *, timing: bool = False) -> Event:
        self._must_be_entered()
        event = FakeEvent(self._must_be_entered)
        event.error = self.error_after_copy
        self.calls.append(("record", _fake(stream).name))
        _fake(stream).push(event.mark)
        return event

    def wait(self, stream: Stream, event: Event) -> None:
        assert isinstance(event, FakeEvent)
        self._must_be_entered()
        self.calls.append(("wait", _fake(stream).name))
        _fake(stream).push(lambda: _must_pass(event))

    def copy(self, target: torch.Tensor, source: torch.Tensor, stream: Stream) -> None:
        assert target.nbytes == source.nbytes
        self._must_be_entered()
        self.calls.append(("copy", _fake(stream).name))
        addresses, nbytes = (target.data_ptr(), source.data_ptr()), target.nbytes
        assert self.why_not_pinned or any(self._is_pinned(a, nbytes) for a in addresses)
        pause_s = self._random.random() * self.slowest_s

        def move() -> None:
            time.sleep(pause_s)
            ctypes.memmove(*addresses, nbytes)

        _fake(stream).push(move)

    def empty(self, nbytes: int) -> torch.Tensor:
        self._must_be_entered()
        return self._memory.tensor(nbytes, _fake(self.current_stream()))

    def used_by(self, tensor: torch.Tensor, stream: Stream) -> None:
        self.used.append(_fake(stream).name)

    def bytes_of(self, storage: torch.UntypedStorage) -> torch.Tensor:
        whole = torch.empty(0, dtype=torch.uint8, device=self.device)
        whole.set_(storage, 0, (storage.nbytes(),), (1,))
        return whole

    def elapsed_ns(self, start: Event, end: Event) -> int:
        assert isinstance(start, FakeEvent)
        assert isinstance(end, FakeEvent)
        assert start.query() and end.query(), "times of events that have not passed"
        return end.time_ns - start.time_ns

    def enter_thread(self) -> None:
        self._local.is_entered = True

    def work_on(self, stream: Stream) -> None:
        self.enter_thread()
        self.use(_fake(stream))

    def pin(self, address: int, nbytes: int) -> str:
        self._must_be_entered()
        if not self.why_not_pinned:
            assert address % 4096 == 0
            self.pinned[address] = nbytes
        return self.why_not_pinned

    def unpin(self, address: int) -> None:
        self._must_be_entered()
        del self.pinned[address]

    def why_not_shown(self, address: int) -> str:
        return "" if self._is_pinned(address, 1) else f"{address:#x} is not pinned"

    def allocated(self, which: str) -> int:
        return self._memory.peak if which == "peak" else self._memory.in_use_bytes

    def reserved(self) -> Reserved:
        in_use = self._memory.in_use_bytes
        cached, releasable = self.cached_bytes, self.cached_bytes - self.split_bytes
        self.calls.append(("reserved", ""))
        return Reserved(in_use + cached, releasable)

    def reset_peaks(self) -> None:
        self._memory.peak = self._memory.in_use_bytes

    def empty_cache(self) -> None:
        self.calls.append(("empty_cache", ""))
        self.cached_bytes = self.split_bytes

    def free_bytes(self) -> int:
        return self.free_device_bytes

    def _must_be_entered(self) -> None:
        """A program's own threads have used the device; those of ours have to enter it."""
        name = threading.current_thread().name
        is_entered = getattr(self._local, "is_entered", False)
        if name.startswith("teraplan") and not is_entered:
            self.strangers.add(name)
            raise AssertionError(f"the thread {name} is on another device")

    def _is_pinned(self, address: int, nbytes: int) -> bool:
        return any(
            start <= address and address + nbytes <= start + length
            for start, length in self.pinned.items()
        )


def _fake(stream: Stream) -> FakeStream:
    assert isinstance(stream, FakeStream)
    return stream


def _must_pass(event: FakeEvent) -> None:
    assert event.passed.wait(LONGEST_S), "a stream waits for an event that never comes"
