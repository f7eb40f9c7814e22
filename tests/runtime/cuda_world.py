"""A CUDA device over fake streams and a real disk, for tests."""

import ctypes
import gc
import threading
import time
from collections.abc import Callable
from types import TracebackType

import torch

from teraplan.runtime.cuda.device import CudaDevice
from teraplan.runtime.device import Arrival, Copy
from teraplan.runtime.storage import Storage, default_directory
from teraplan.runtime.storage.workers import Workers
from teraplan.units import MIB
from teraplan.values.hardware import Tier
from teraplan.values.run_record import Direction
from tests.fakes.fake_cuda import FakeCuda, FakeStream

STAGING = 4 * MIB
"""Two slots of 1 MiB in each direction."""
LARGE = 5 * MIB + 1234
"""More than all the slots of one direction."""
PHASES = ("computing", "copying", "writing", "there", "coming back")
"""Of a tensor that leaves and comes back, see `World.drop_when`."""
THREE_WORKERS = Workers((Direction.BACK, Direction.OUT, Direction.BACK))
"""The same on every machine, so that writes can be held while reads go on."""


class World:
    """Opens and closes everything; `storage_gate` holds writes to the disk back."""

    def __init__(
        self,
        *,
        seed: int = 0,
        host_bytes: int = STAGING + 8 * MIB,
        deadline_s: float = 20.0,
        direct: bool = False,
        why_not_pinned: str = "",
        slowest_s: float = 0.003,
    ) -> None:
        self.cuda = FakeCuda(seed=seed, why_not_pinned=why_not_pinned, slowest_s=slowest_s)
        self.storage = Storage.open(
            [default_directory()], deadline_s=deadline_s, workers=THREE_WORKERS
        )
        self.arena = self.storage._opened[0].arena
        self.arena.takes_device_memory = direct
        self.storage_gate = threading.Event()
        self.storage_gate.set()
        self.num_writes = 0
        self._write = self.arena.write
        self.arena.write = self._gated_write  # type: ignore[method-assign]
        self.device = CudaDevice(
            self.cuda,
            self.storage,
            host_bytes=host_bytes,
            deadline_s=deadline_s,
            staging_bytes=0 if direct else STAGING,
        )

    def __enter__(self) -> "World":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.storage_gate.set()
        for stream in self.cuda.streams:
            stream.gate.set()
        self.device.close()
        self.cuda.close()
        assert not self.cuda.pinned, "host memory is still registered"

    def tensor(self, seed: int, nbytes: int) -> torch.Tensor:
        """Device memory that the computation fills with numbers made from `seed`."""
        result = self.cuda.empty(nbytes)
        address = result.data_ptr()
        content = content_of(seed, nbytes)

        def fill() -> None:
            ctypes.memmove(address, content.data_ptr(), nbytes)

        self.cuda.run(fill)
        return result

    def out(self, tensor: torch.Tensor, tier: Tier = Tier.STORAGE, host_bytes: int = 0) -> Copy:
        """Start moving `tensor` out, with so many of its first bytes to the host tier."""
        return self.device.start_out(tensor, tier, f"t{tensor.nbytes}", host_bytes=host_bytes)

    def moved(self, seed: int, nbytes: int, tier: Tier = Tier.STORAGE) -> Copy:
        """A tensor that has left and whose memory is free."""
        copy = self.out(self.tensor(seed, nbytes), tier)
        copy.wait_out()
        return copy

    def back(self, arrival: Arrival, nbytes: int) -> torch.Tensor:
        """What the computation finds when it uses what has come back."""
        storage, offset, _ = arrival.wait()
        found = torch.empty(nbytes, dtype=torch.uint8)
        whole = self.cuda.bytes_of(storage)
        self.cuda.run(lambda: found.copy_(whole[offset : offset + nbytes]))
        self.cuda.record(self.cuda.current_stream()).synchronize()
        return found

    def check(self, copy: Copy, seed: int, nbytes: int) -> None:
        """Bring a copy back and compare every byte."""
        found = self.back(self.device.start_back(copy, urgent=True), nbytes)
        assert torch.equal(found, content_of(seed, nbytes))

    def settle(self) -> None:
        """Wait until nothing moves."""
        self.cuda.finish()
        until(lambda: self.slots_in_use == 0)

    @property
    def slots_in_use(self) -> int:
        """Bytes of staging memory that something holds on to."""
        staging = self.device.staging
        if staging is None:
            return 0
        return sum(pool.limit_bytes - pool.free_bytes for pool in (staging.writes, staging.reads))

    def copy_stream(self, direction: Direction) -> FakeStream:
        """The stream that copies between the device and staging memory."""
        staging = self.device.staging
        assert staging is not None
        stream = staging.streams[0 if direction is Direction.OUT else 1]
        assert isinstance(stream, FakeStream)
        return stream

    def drop_when(self, phase: str, start: Callable[[], Copy]) -> None:
        """Drop the copy that `start` starts to make when it has come to one of `PHASES`."""
        side = self.copy_stream(Direction.OUT)
        if phase == "computing":
            self.cuda.compute.gate.clear()
        if phase == "copying":
            side.gate.clear()
        if phase in ("writing", "copying"):
            self.storage_gate.clear()
        copy = start()
        if phase in ("there", "coming back"):
            copy.wait_out()
        arrival = self.device.start_back(copy) if phase == "coming back" else None
        del arrival
        copy.drop()
        copy.drop()
        for gate in (self.cuda.compute.gate, side.gate, self.storage_gate):
            gate.set()
        del copy
        self.settle()
        gc.collect()

    def _gated_write(self, address: int, nbytes: int, offset: int) -> None:
        self.num_writes += 1
        assert self.storage_gate.wait(20), "the test holds the disk back for too long"
        self._write(address, nbytes, offset)


def content_of(seed: int, nbytes: int) -> torch.Tensor:
    """The numbers that `World.tensor` puts there; never the fake's poison throughout."""
    random = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, device="cpu", generator=random)


def until(condition: Callable[[], bool]) -> None:
    """Wait until `condition` holds, for 20 s at most."""
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end, "it never came to that"
        time.sleep(0.002)
