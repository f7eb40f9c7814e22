"""The way from a CUDA device to the host's cores and back. Not run on a GPU yet."""

from typing import final

import torch

from teraplan.runtime.cuda.runtime import CudaRuntime, Event, Stream
from teraplan.runtime.host_lane import HostLane, Wait


@final
class StreamLane(HostLane):
    """Copies on a stream for each direction."""

    def __init__(self, cuda: CudaRuntime) -> None:
        self._cuda = cuda
        self._out, self._back = cuda.new_stream(), cuda.new_stream()
        self._computing: Stream | None = None

    def follow(self) -> None:
        """Let copies out wait for the stream that the backward runs on."""
        self._cuda.wait(self._out, self._cuda.record(self._cuda.current_stream()))

    def begin(self) -> None:
        """Let both streams wait for the computation."""
        cuda = self._cuda
        self._computing = cuda.current_stream()
        ready = cuda.record(self._computing)
        for stream in (self._out, self._back):
            cuda.wait(stream, ready)

    def enter(self) -> None:
        """Make the device current in this thread."""
        self._cuda.work_on(self._out)

    def out(self, source: torch.Tensor, target: torch.Tensor) -> Wait:
        """Queue the copy behind the copies back so far: they may read the same host memory."""
        cuda = self._cuda
        cuda.wait(self._out, cuda.record(self._back))
        cuda.copy(target, source, self._out)
        arrived: Event = cuda.record(self._out)
        return arrived.synchronize

    def back(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Queue the copy."""
        self._cuda.copy(target, source, self._back)

    def end(self) -> None:
        """Let the computation wait for both streams."""
        cuda = self._cuda
        assert self._computing is not None, "begin comes first"
        streams = {id(stream): stream for stream in (self._computing, cuda.current_stream())}
        for side in (self._out, self._back):
            event = cuda.record(side)
            for stream in streams.values():
                cuda.wait(stream, event)

    def finish(self) -> None:
        """Block until both streams are done."""
        for stream in (self._out, self._back):
            self._cuda.record(stream).synchronize()
