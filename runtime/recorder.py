"""Writes down one step as it runs, and makes a StepTrace of it.

At every site the engine calls `arrive` first and `leave` last. What lies between is the engine's
own doing (waits, copies) and counts for neither the time nor the memory of the computation.
"""

import hashlib
import time
from dataclasses import dataclass, field

from teraplan.runtime.device import Device
from teraplan.runtime.saved import Saved
from teraplan.step_trace import Fingerprint, Site, SiteKind, StepTrace, Tensor, TensorKind

Signature = tuple[tuple[SiteKind, str, int, bool, int | None], ...]
"""What a step consists of, times and sizes left out."""


@dataclass(slots=True)
class TensorInfo:
    """What is known of a saved activation beside its sites."""

    name: str
    nbytes: int
    shape: tuple[int, ...]
    dtype: str
    layer: str
    saves: list[int] = field(default_factory=list[int])
    needs: list[int] = field(default_factory=list[int])
    dones: list[int] = field(default_factory=list[int])


@dataclass(slots=True)
class _Event:
    kind: SiteKind
    graph: str
    call: int
    backward: bool
    tensor: int | None
    arrived: object
    peak_before: int
    left: object = None
    managed_after: int = 0


class StepRecorder:
    """The sites of one step in the order in which they ran."""

    def __init__(self, device: Device, *, measure_memory: bool) -> None:
        self._device = device
        self.measure_memory = measure_memory
        self.state_bytes = device.state_bytes() if measure_memory else 0
        if measure_memory:
            device.measure_exactly()
            device.take_peak()
        self._base_bytes = device.resident_bytes()
        self._events: list[_Event] = []
        self.tensors: list[TensorInfo] = []
        self.start_mark = device.mark()
        self.start_ns = time.perf_counter_ns()
        self._end_mark: object = None
        self._last_peak = 0

    @property
    def num_sites(self) -> int:
        """Sites so far."""
        return len(self._events)

    @property
    def process_overhead_bytes(self) -> int:
        """What the process held beside tensors when the step began."""
        return self._base_bytes - self.state_bytes

    def arrive(
        self, kind: SiteKind, graph: str, call: int, backward: bool, tensor: int | None
    ) -> None:
        """A site is reached."""
        self._events.append(
            _Event(
                kind=kind,
                graph=graph,
                call=call,
                backward=backward,
                tensor=tensor,
                arrived=self._device.mark(),
                peak_before=self._device.take_peak() if self.measure_memory else 0,
            )
        )
        if tensor is not None:
            info, site = self.tensors[tensor], len(self._events) - 1
            {SiteKind.SAVE: info.saves, SiteKind.NEED: info.needs, SiteKind.DONE: info.dones}[
                kind
            ].append(site)

    def leave(self, managed_bytes: int) -> None:
        """The engine is through with the site; `managed_bytes` are resident from here on."""
        event = self._events[-1]
        event.managed_after = managed_bytes
        if self.measure_memory:
            self._device.take_peak()
        event.left = self._device.mark()

    def add_tensor(self, saved: Saved, shape: tuple[int, ...], dtype: str, layer: str) -> None:
        """A storage is saved for the first time in this step; numbered in order."""
        assert saved.order == len(self.tensors), f"{saved.name} is numbered {saved.order}"
        self.tensors.append(
            TensorInfo(name=saved.name, nbytes=saved.nbytes, shape=shape, dtype=dtype, layer=layer)
        )

    def finish(self) -> None:
        """The step is over."""
        self._end_mark = self._device.mark()
        self._last_peak = self._device.take_peak() if self.measure_memory else 0

    def signature(self) -> Signature:
        """What must be equal in two steps for their measurements to be of the same thing."""
        return tuple((e.kind, e.graph, e.call, e.backward, e.tensor) for e in self._events)

    def durations_ns(self) -> tuple[int, ...]:
        """Computation in each interval."""
        ends = [*(e.arrived for e in self._events[1:]), self._end_mark]
        return tuple(
            max(0, self._device.elapsed_ns(event.left, end))
            for event, end in zip(self._events, ends, strict=True)
        )

    def workspaces_bytes(self) -> tuple[int, ...]:
        """Peak of each interval beside state and managed tensors; only if memory was measured."""
        peaks = [*(e.peak_before for e in self._events[1:]), self._last_peak]
        return tuple(
            max(0, peak - self._base_bytes - event.managed_after)
            for event, peak in zip(self._events, peaks, strict=True)
        )

    def site_starts_ns(self) -> tuple[int, ...]:
        """When each site was reached, from the start of the step."""
        return tuple(self._device.elapsed_ns(self.start_mark, e.arrived) for e in self._events)

    def total_ns(self) -> int:
        """Length of the step, waits included."""
        return self._device.elapsed_ns(self.start_mark, self._end_mark)

    def managed_bytes(self) -> tuple[int, ...]:
        """Bytes of managed tensors resident after each site."""
        return tuple(e.managed_after for e in self._events)

    def trace(
        self,
        *,
        state_bytes: int,
        durations_ns: tuple[int, ...],
        workspaces_bytes: tuple[int, ...],
        torch_version: str,
        kernels: str,
    ) -> StepTrace:
        """This step's sites and tensors with the given measurements."""
        graphs = tuple(dict.fromkeys(e.graph for e in self._events))
        sizes = ",".join(f"{t.name}:{t.nbytes}" for t in self.tensors)
        return StepTrace(
            fingerprint=Fingerprint(
                graphs=graphs,
                shapes=hashlib.sha256(sizes.encode()).hexdigest()[:16],
                torch_version=torch_version,
                kernels=kernels,
                device=self._device.name,
            ),
            state_bytes=state_bytes,
            sites=tuple(
                Site(
                    kind=e.kind,
                    graph=e.graph,
                    call=e.call,
                    backward=e.backward,
                    tensor_id=e.tensor,
                    duration_ns=duration,
                    workspace_bytes=workspace,
                )
                for e, duration, workspace in zip(
                    self._events, durations_ns, workspaces_bytes, strict=True
                )
            ),
            tensors=tuple(self._tensor(info) for info in self.tensors),
        )

    def _tensor(self, info: TensorInfo) -> Tensor:
        windows: tuple[tuple[int, int], ...] = ()
        if info.needs and info.dones:
            windows = ((info.saves[0], info.saves[-1]), (info.needs[0], info.dones[-1]))
        else:  # no backward asked for it: it is there until the step ends
            windows = (*windows, (info.saves[0], len(self._events)))
        return Tensor(
            name=info.name,
            kind=TensorKind.ACTIVATION,
            nbytes=info.nbytes,
            shape=info.shape,
            dtype=info.dtype,
            layer=info.layer,
            windows=windows,
        )
