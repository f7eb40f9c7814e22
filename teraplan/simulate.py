"""Predicts when everything happens in a step that runs under a plan.

One stream of computation, and per link one channel out and one back (`channels`). At a site, in
this order, as the runtime does it:

    1. copies out of tensors with `leave` here are queued
    2. the computation waits for copies out with `gone` here; their bytes are free from now on
    3. copies in of tensors with `back` here are queued; their bytes are taken from now on
    4. the computation waits for copies in with `needed` here

Within a site, copies out are queued in order of `gone`, copies in in order of `needed`, then by
position in the plan. A transfer that the computation waits for goes to the front of its queue; the
running one is not interrupted. Where a migration reaches into the next step, the step is taken to
repeat: two steps are simulated, with the copies out of the step before the first one finished, and
the second is reported.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import final

import numpy as np

from teraplan.channels import Channels, Transfer
from teraplan.errors import ConfigError
from teraplan.hardware import Hardware, Link, Tier
from teraplan.lifetimes import Ints, site_times
from teraplan.memory_curve import device_curve, fixed_curve, managed_curve, peak, tier_curve
from teraplan.plan import Migration, Prediction
from teraplan.run_record import Direction, StallRecord, TransferRecord
from teraplan.step_trace import StepTrace


@dataclass(frozen=True, slots=True, kw_only=True)
class Wait:
    """One wait of the computation."""

    site: int
    migration: int
    """Index into the migrations that were simulated."""
    direction: Direction
    """OUT: waited at `gone`; BACK: waited at `needed`."""
    start_ns: int
    duration_ns: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Timing:
    """When things happen in a simulated step; what planners look at between attempts."""

    step_ns: int
    site_ns: Ints
    """When each site is reached, before its waits, and the end of the step; shape (sites + 1,)."""
    begin: float
    """Start of the step on the clock of `transfers`."""
    waits: tuple[Wait, ...]
    transfers: tuple[Transfer, ...]
    """Those that start within the step, in order of start."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulation:
    """A simulated step, in the terms of `RunRecord` so that the two can be compared."""

    step_ns: int
    ideal_ns: int
    site_start_ns: tuple[int, ...]
    """When each site is reached, before its waits."""
    managed_bytes: tuple[int, ...]
    """Bytes of listed tensors on the device in each interval."""
    transfers: tuple[TransferRecord, ...]
    stalls: tuple[StallRecord, ...]
    device_peak_bytes: int
    unlimited_peak_bytes: int
    managed_peak_bytes: int
    host_peak_bytes: int
    storage_peak_bytes: int
    out_bytes: dict[Tier, int]
    back_bytes: dict[Tier, int]
    stall_ns: dict[int, int]


@final
class Simulator:
    """Simulates plans of one trace on one machine; keeps what all of them need."""

    def __init__(self, trace: StepTrace, hardware: Hardware) -> None:
        self.trace = trace
        self.links: dict[Tier, Link] = {}
        if hardware.host_link is not None:
            self.links[Tier.HOST] = hardware.host_link
        if hardware.storage_link is not None:
            self.links[Tier.STORAGE] = hardware.storage_link
        self.site_ns = site_times(trace)
        self._site_ns: list[int] = self.site_ns.tolist()
        self._nbytes = [tensor.nbytes for tensor in trace.tensors]

    def run(self, migrations: Sequence[Migration]) -> Timing:
        """The step under `migrations`.

        Raises:
            ConfigError: if a migration goes over a link that the machine does not have.
        """
        for m in migrations:
            if m.tier not in self.links:
                name = self.trace.tensors[m.tensor_id].name
                raise ConfigError(f"{name} moves to {m.tier}, but the hardware has no such link")
        num_sites = len(self.trace.sites)
        wraps = any(max(m.leave, m.gone, m.back, m.needed) >= num_sites for m in migrations)
        num_steps = 2 if wraps else 1
        run = _Run(self, migrations, num_steps)
        return run.timing()

    def at(self, site: int) -> int:
        """When `site` of two steps is reached if nothing waits."""
        return self._site_ns[site]

    def nbytes(self, tensor_id: int) -> int:
        """Size of a tensor."""
        return self._nbytes[tensor_id]


@dataclass(slots=True)
class _SiteEvents:
    """Migrations (index) that have to do with one site of the unrolled steps."""

    leave: list[int] = field(default_factory=list[int])
    gone: list[int] = field(default_factory=list[int])
    back: list[int] = field(default_factory=list[int])
    needed: list[int] = field(default_factory=list[int])


@final
class _Run:
    """One simulation in progress. A migration of one of the unrolled steps is told by its key."""

    def __init__(self, owner: Simulator, migrations: Sequence[Migration], num_steps: int) -> None:
        self._owner = owner
        self._migrations = migrations
        self._num_sites = len(owner.trace.sites)
        self._num_steps = num_steps
        self._channels = {tier: Channels(link) for tier, link in owner.links.items()}
        self._submitted: dict[tuple[int, Direction], Transfer] = {}
        self._waits: list[tuple[int, int, Direction, float, float]] = []
        self._delays: dict[int, float] = {}
        """How much later than without waits each site with events is left; ascending sites."""

    def timing(self) -> Timing:
        """Runs to the end."""
        events = self._events()
        delay = 0.0
        for site in sorted(events):
            planned = self._owner.at(site)
            delay = self._visit(site, events[site], planned + delay) - planned
            self._delays[site] = delay
        for channels in self._channels.values():
            channels.drain()
        return self._timing()

    def _migration(self, key: int) -> Migration:
        return self._migrations[key % len(self._migrations)]

    def _events(self) -> dict[int, _SiteEvents]:
        """The events of the unrolled steps by site; those before the first are at its start."""
        events: dict[int, _SiteEvents] = defaultdict(_SiteEvents)
        end = self._num_steps * self._num_sites
        for copy in range(1 - self._num_steps, self._num_steps):
            shift = copy * self._num_sites
            base = (copy + 1) * len(self._migrations)
            for key, m in enumerate(self._migrations, base):
                if m.needed + shift < 0:
                    continue
                if 0 <= m.leave + shift < end and not m.clean:
                    events[m.leave + shift].leave.append(key)
                    if m.gone + shift < end:
                        events[m.gone + shift].gone.append(key)
                if m.back + shift < end:
                    events[max(m.back + shift, 0)].back.append(key)
                if m.needed + shift < end:
                    events[m.needed + shift].needed.append(key)
        for entry in events.values():
            entry.leave.sort(key=lambda key: (self._migration(key).gone, key))
            entry.back.sort(key=lambda key: (self._migration(key).needed, key))
        return events

    def _visit(self, site: int, events: _SiteEvents, now: float) -> float:
        for key in events.leave:
            self._submit(key, Direction.OUT, now)
        for key in events.gone:
            now = self._wait(site, key, Direction.OUT, now)
        for key in events.back:
            self._submit(key, Direction.BACK, now)
        for key in events.needed:
            now = self._wait(site, key, Direction.BACK, now)
        return now

    def _submit(self, key: int, direction: Direction, now: float) -> None:
        m = self._migration(key)
        transfer = Transfer(
            key % len(self._migrations), direction, m.tier, self._owner.nbytes(m.tensor_id)
        )
        self._submitted[key, direction] = transfer
        self._channels[m.tier].submit(transfer, now)

    def _wait(self, site: int, key: int, direction: Direction, now: float) -> float:
        transfer = self._submitted[key, direction]
        done = self._channels[transfer.tier].finish(transfer, now)
        if done > now:
            self._waits.append((site, transfer.migration, direction, now, done))
        return max(done, now)

    def _timing(self) -> Timing:
        first = (self._num_steps - 1) * self._num_sites
        sites = np.arange(first, first + self._num_sites + 1)
        visited = np.fromiter(self._delays.keys(), np.int64, len(self._delays))
        delays = np.array([0.0, *self._delays.values()])
        reached = self._owner.site_ns[sites] + delays[np.searchsorted(visited, sites)]
        begin, end = float(reached[0]), float(reached[-1])
        waits = tuple(
            Wait(
                site=site - first,
                migration=index,
                direction=direction,
                start_ns=round(start - begin),
                duration_ns=round(done - begin) - round(start - begin),
            )
            for site, index, direction, start, done in self._waits
            if site >= first
        )
        transfers = sorted(
            (t for t in self._submitted.values() if begin <= t.start < end),
            key=lambda t: (t.start, t.tier, t.direction, t.migration),
        )
        return Timing(
            step_ns=round(end - begin),
            site_ns=np.rint(reached - begin).astype(np.int64),
            begin=begin,
            waits=waits,
            transfers=tuple(transfers),
        )


def simulate(trace: StepTrace, hardware: Hardware, migrations: Sequence[Migration]) -> Simulation:
    """The step of `trace` under `migrations`, which must be valid (`check_plan`).

    Raises:
        ConfigError: if a migration goes over a link that the machine does not have.
    """
    timing = Simulator(trace, hardware).run(migrations)
    return describe(trace, migrations, timing)


def describe(trace: StepTrace, migrations: Sequence[Migration], timing: Timing) -> Simulation:
    """A simulated step with names, memory and sums."""
    tensors = trace.tensors
    stall_ns: dict[int, int] = {}
    for wait in timing.waits:
        tensor_id = migrations[wait.migration].tensor_id
        stall_ns[tensor_id] = stall_ns.get(tensor_id, 0) + wait.duration_ns
    managed = managed_curve(trace, migrations)
    out_bytes: dict[Tier, int] = {}
    back_bytes: dict[Tier, int] = {}
    for m in migrations:
        nbytes = tensors[m.tensor_id].nbytes
        out_bytes[m.tier] = out_bytes.get(m.tier, 0) + (0 if m.clean else nbytes)
        back_bytes[m.tier] = back_bytes.get(m.tier, 0) + nbytes
    return Simulation(
        step_ns=timing.step_ns,
        ideal_ns=trace.duration_ns,
        site_start_ns=tuple(timing.site_ns[:-1].tolist()),
        managed_bytes=tuple(managed.tolist()),
        transfers=tuple(_record(trace, migrations, t, timing.begin) for t in timing.transfers),
        stalls=tuple(
            StallRecord(
                site=wait.site,
                tensor=tensors[migrations[wait.migration].tensor_id].name,
                start_ns=wait.start_ns,
                duration_ns=wait.duration_ns,
            )
            for wait in timing.waits
        ),
        device_peak_bytes=peak(fixed_curve(trace) + managed),
        unlimited_peak_bytes=peak(device_curve(trace)),
        managed_peak_bytes=peak(managed),
        host_peak_bytes=peak(tier_curve(trace, migrations, Tier.HOST)),
        storage_peak_bytes=peak(tier_curve(trace, migrations, Tier.STORAGE)),
        out_bytes=out_bytes,
        back_bytes=back_bytes,
        stall_ns=stall_ns,
    )


def _record(
    trace: StepTrace, migrations: Sequence[Migration], transfer: Transfer, begin: float
) -> TransferRecord:
    return TransferRecord(
        tensor=trace.tensors[migrations[transfer.migration].tensor_id].name,
        nbytes=transfer.nbytes,
        direction=transfer.direction,
        tier=transfer.tier,
        store="",
        start_ns=round(transfer.start - begin),
        end_ns=round(transfer.end - begin),
    )


def predict(trace: StepTrace, hardware: Hardware, migrations: Sequence[Migration]) -> Prediction:
    """The prediction that belongs into a plan with these migrations."""
    return prediction_of(simulate(trace, hardware, migrations))


def prediction_of(simulation: Simulation) -> Prediction:
    """The part of a simulation that a plan keeps."""
    return Prediction(
        step_ns=simulation.step_ns,
        ideal_ns=simulation.ideal_ns,
        device_peak_bytes=simulation.device_peak_bytes,
        unlimited_peak_bytes=simulation.unlimited_peak_bytes,
        managed_peak_bytes=simulation.managed_peak_bytes,
        host_peak_bytes=simulation.host_peak_bytes,
        storage_peak_bytes=simulation.storage_peak_bytes,
        out_bytes=simulation.out_bytes,
        back_bytes=simulation.back_bytes,
        stall_ns=simulation.stall_ns,
    )
