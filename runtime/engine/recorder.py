"""Writes down one step as it runs, and makes a StepTrace of it.

At every site the engine calls `arrive` first and `leave` last. What lies between is the engine's
own doing (waits, copies) and counts for neither the time nor the memory of the computation. Nor do
waits for training state that is used without a site. The step ends with its last site or its last
optimizer: what comes then, until the next one begins, is the user's.
"""

import hashlib
import time
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from teraplan.runtime.device import Device
from teraplan.runtime.engine.saved import Saved
from teraplan.runtime.engine.state_log import StateLog
from teraplan.values.step_trace import (
    UPDATE_GRAPH,
    Fingerprint,
    Recompute,
    Site,
    SiteKind,
    StepTrace,
    Tensor,
    TensorKind,
)

SiteKey = tuple[SiteKind, str, int, bool, int | None]
"""A site without its times: kind, graph, number of the call, backward?, tensor.

Saved activations count from 0; tensors of the training state that moves from -1 downwards. In a
trace those follow these.
"""
Signature = tuple[object, ...]
"""What a step consists of, times and sizes left out."""


class TensorInfo(NamedTuple):
    """What is known of a saved activation beside its sites."""

    name: str
    nbytes: int
    shape: torch.Size
    dtype: torch.dtype
    layer: str


@dataclass(slots=True)
class _Visit:
    """One site, as far as the engine is through with it."""

    key: SiteKey
    arrived: object
    left: object
    waited_before_ns: int
    """Waited for training state until it was reached."""
    waited_ns: int
    """And until it was left."""
    managed_bytes: int
    """Of saved activations that are resident after it."""
    state_bytes: int
    """The same of training state that moves."""
    peak_bytes: int
    """Before it, if memory is measured."""


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
        self._visits: list[_Visit] = []
        self.tensors: list[TensorInfo] = []
        self._given_up: dict[int, int] = {}
        """By tensor: the number of sites when the last one that could ask for it had gone."""
        self.state = StateLog()
        self.start_mark = device.mark()
        self.start_ns = time.perf_counter_ns()
        self._end_mark: object = None
        self._waited_at_end = 0
        self._sites_at_end = -1
        self._peak_at_end = 0
        """The most until a possible end since the last site; all of the step, if not measured."""
        self.grown_bytes = 0
        """By which the process holds more beside tensors than when the step began, if measured."""

    @property
    def num_sites(self) -> int:
        """Sites so far."""
        return len(self._visits)

    @property
    def saved_bytes(self) -> int:
        """Of all that the step has saved so far."""
        return sum(tensor.nbytes for tensor in self.tensors)

    @property
    def calls_gone_back(self) -> set[int]:
        """Numbers of the calls whose backward has begun."""
        return {visit.key[2] for visit in self._visits if visit.key[3]}

    @property
    def has_forwards_alone(self) -> bool:
        """True if a forward has saved what no backward of the step has asked for."""
        saving = {visit.key[2] for visit in self._visits if visit.key[0] is SiteKind.SAVE}
        return not saving <= self.calls_gone_back

    @property
    def process_overhead_bytes(self) -> int:
        """What the process held beside tensors when the step began."""
        return self._base_bytes - self.state_bytes

    def arrive(self, key: SiteKey) -> int:
        """A site is reached; returns its number."""
        mark = self._device.mark()
        beside = self._device.waits_for
        waited_ns = beside.waited_ns if beside is not None else 0
        peak_bytes = self._take_peak() if self.measure_memory else 0
        visits = self._visits
        site = len(visits)
        before_bytes = (visits[-1].managed_bytes, visits[-1].state_bytes) if site else (0, 0)
        # The second mark is what stays if what follows fails. An interrupt comes before or after.
        visits.append(_Visit(key, mark, mark, waited_ns, waited_ns, *before_bytes, peak_bytes))
        return site

    def leave(self, managed_bytes: int, state_bytes: int = 0) -> None:
        """The engine is through with the site.

        Args:
            managed_bytes: of saved activations that are resident from here on.
            state_bytes: of training state that moves.
        """
        visit = self._visits[-1]
        visit.managed_bytes, visit.state_bytes = managed_bytes, state_bytes
        if self.measure_memory:
            self._device.take_peak()
        beside = self._device.waits_for
        if beside is not None:
            visit.waited_ns = beside.waited_ns
        visit.left = self._device.mark()

    def add_tensor(self, saved: Saved, shape: torch.Size, dtype: torch.dtype, layer: str) -> None:
        """A storage is saved for the first time in this step; numbered in order."""
        assert saved.order <= len(self.tensors), f"{saved.name} is numbered {saved.order}"
        del self.tensors[saved.order :]  # an interrupt came before the engine had it, too
        self.tensors.append(TensorInfo(saved.name, saved.nbytes, shape, dtype, layer))

    def give_up(self, tensor: int) -> None:
        """Nobody can ask for a tensor any more."""
        self._given_up[tensor] = self.num_sites

    def may_end_here(self) -> None:
        """An optimizer has stepped: without another site, what follows is not the step's.

        That is loading data, evaluation, a checkpoint.
        """
        if self.measure_memory:
            self._peak_at_end = self._take_peak()
            self.grown_bytes = self._device.overhead_bytes() - self.process_overhead_bytes
            self._device.take_peak()  # what counting takes is no step's
        else:
            self._peak_at_end = self._device.peak_bytes()
        self._end_mark = self._device.mark()
        beside = self._device.waits_for
        self._waited_at_end = beside.waited_ns if beside is not None else 0
        self._sites_at_end = self.num_sites  # last: an interrupt leaves the end to be noted again

    def finish(self) -> None:
        """The step is over."""
        if self._sites_at_end != self.num_sites:
            self.may_end_here()

    @property
    def peak_bytes(self) -> int:
        """The most memory of the step so far as it can end here; only if memory is not measured."""
        return self._peak_at_end

    def _take_peak(self) -> int:
        """The most memory since the last site."""
        peak = max(self._peak_at_end, self._device.take_peak())
        self._peak_at_end = 0
        return peak

    def signature(self) -> Signature:
        """What must be equal in two steps for their measurements to be of the same thing."""
        return (*(visit.key for visit in self._visits), *self.state.signature())

    def durations_ns(self) -> tuple[int, ...]:
        """Computation in each interval."""
        visits = self._visits
        ends = [(v.arrived, v.waited_before_ns) for v in visits[1:]]
        ends.append((self._end_mark, self._waited_at_end))
        return tuple(
            max(0, self._device.elapsed_ns(v.left, end) - (waited_ns - v.waited_ns))
            for v, (end, waited_ns) in zip(visits, ends, strict=True)
        )

    def workspaces_bytes(self) -> tuple[int, ...]:
        """Peak of each interval beside state and managed tensors; only if memory was measured."""
        return tuple(
            max(0, peak - self._base_bytes - visit.managed_bytes)
            for visit, peak in zip(self._visits, self._peaks_bytes, strict=True)
        )

    def most_bytes(self) -> int:
        """The most that tensors took in the step; only if memory was measured."""
        return self.state_bytes + max(0, max(self._peaks_bytes) - self._base_bytes)

    @property
    def _peaks_bytes(self) -> list[int]:
        """The most that the process held in each interval, if memory was measured."""
        return [*(visit.peak_bytes for visit in self._visits[1:]), self._peak_at_end]

    def site_starts_ns(self) -> tuple[int, ...]:
        """When each site was reached, from the start of the step."""
        start = self.start_mark
        return tuple(self._device.elapsed_ns(start, visit.arrived) for visit in self._visits)

    def total_ns(self) -> int:
        """Length of the step, waits included."""
        return self._device.elapsed_ns(self.start_mark, self._end_mark)

    def managed_bytes(self) -> tuple[int, ...]:
        """Bytes of tensors that can move resident after each site."""
        return tuple(visit.managed_bytes + visit.state_bytes for visit in self._visits)

    def trace(
        self,
        *,
        state_bytes: int,
        durations_ns: tuple[int, ...],
        workspaces_bytes: tuple[int, ...],
        torch_version: str,
        kernels: str,
        chunk_bytes: int,
        recomputes: Mapping[int, Recompute],
    ) -> StepTrace:
        """This step's sites and tensors with the given measurements."""
        tensors = (
            *(
                self._tensor(info, windows, recomputes.get(number))
                for number, (info, windows) in enumerate(
                    zip(self.tensors, self._windows(), strict=True)
                )
            ),
            *self.state.tensors(self.num_sites),
        )
        keys = [visit.key for visit in self._visits]
        graphs = dict.fromkeys(graph for _, graph, *_ in keys if graph != UPDATE_GRAPH)
        sizes = ",".join(f"{t.name}:{t.nbytes}" for t in tensors)
        return StepTrace(
            fingerprint=Fingerprint(
                graphs=tuple(graphs),
                shapes=hashlib.sha256(sizes.encode()).hexdigest()[:16],
                torch_version=torch_version,
                kernels=kernels,
                device=self._device.name,
                chunk_bytes=chunk_bytes,
            ),
            state_bytes=state_bytes,
            sites=tuple(
                Site(
                    kind=kind,
                    graph=graph,
                    call=call,
                    backward=backward,
                    tensor_id=tensor
                    if tensor is None or tensor >= 0
                    else len(self.tensors) - 1 - tensor,
                    duration_ns=duration,
                    workspace_bytes=workspace,
                )
                for (kind, graph, call, backward, tensor), duration, workspace in zip(
                    keys, durations_ns, workspaces_bytes, strict=True
                )
            ),
            tensors=tensors,
        )

    def _windows(self) -> Iterator[tuple[tuple[int, int], ...]]:
        """When each tensor has to be on the device, in sites."""
        sites: list[dict[SiteKind, list[int]]] = [{} for _ in self.tensors]
        for site, visit in enumerate(self._visits):
            kind, *_, tensor = visit.key
            if tensor is not None and tensor >= 0:
                sites[tensor].setdefault(kind, []).append(site)
        again = self._backwards_again()
        for number, of_tensor in enumerate(sites):
            first, last = of_tensor[SiteKind.SAVE][0], of_tensor[SiteKind.SAVE][-1]
            # A backward that ran before another forward saved it again: it was there in between.
            needs = [site for site in of_tensor.get(SiteKind.NEED, ()) if site > last]
            dones = [site for site in of_tensor.get(SiteKind.DONE, ()) if site > last]
            if needs and len(needs) == len(dones):
                yield (first, last), *_uses(needs, dones, again)
            else:  # a checkpoint computes it again, or no backward asks for it any more
                yield ((first, max(last, self._given_up.get(number, self.num_sites))),)

    def _backwards_again(self) -> list[int]:
        """Sites at which a backward begins that has run before in this step."""
        begun, again = set[int](), []
        for site, (kind, _, call, backward, _) in enumerate(visit.key for visit in self._visits):
            if kind is SiteKind.ENTER and backward:
                if call in begun:
                    again.append(site)
                begun.add(call)
        return again

    @staticmethod
    def _tensor(
        info: TensorInfo, windows: tuple[tuple[int, int], ...], recompute: Recompute | None
    ) -> Tensor:
        return Tensor(
            name=info.name,
            kind=TensorKind.ACTIVATION,
            nbytes=info.nbytes,
            shape=tuple(info.shape),
            dtype=str(info.dtype).removeprefix("torch."),
            layer=info.layer,
            windows=windows,
            recompute=recompute,
        )


def _uses(
    needs: Sequence[int], dones: Sequence[int], again: Sequence[int]
) -> Iterator[tuple[int, int]]:
    """From the first need to the last end of use; apart, if a backward runs again in between."""
    start = needs[0]
    for done, need in zip(dones, needs[1:], strict=False):
        if bisect_left(again, done) < bisect_left(again, need):  # so all of it has been used
            yield start, done
            start = need
    yield start, dones[-1]
