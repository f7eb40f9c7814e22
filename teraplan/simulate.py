"""Predicts when everything happens in a step that runs under a plan.

One stream of computation, and per link one channel out and one back, which may share the device's
port (`channels`). At a site, in
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

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import numpy as np

from teraplan.channels import Channels, slots_of
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """One transfer of a simulated step; times in ns from the start of the step."""

    migration: int
    direction: Direction
    tier: Tier
    nbytes: int
    start_ns: int
    end_ns: int
    steps_before: int
    """By how many steps its migration began before this one."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Timing:
    """When things happen in a simulated step; what planners look at between attempts."""

    step_ns: int
    site_ns: Ints
    """When each site is reached, before its waits, and the end of the step; shape (sites + 1,)."""
    waits: tuple[Wait, ...]
    transfers: tuple[Transfer, ...]
    """Those that start within the step, in order of start; empty unless asked for."""


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
        self.port = hardware.device_port
        self.site_ns = site_times(trace)
        self.times: list[int] = self.site_ns.tolist()
        """`site_ns` as a list."""
        self._nbytes = [tensor.nbytes for tensor in trace.tensors]

    def run(self, migrations: Sequence[Migration], *, with_transfers: bool = False) -> Timing:
        """The step under `migrations`.

        Raises:
            ConfigError: if a migration goes over a link that the machine does not have.
        """
        for m in migrations:
            if m.tier not in self.links:
                name = self.trace.tensors[m.tensor_id].name
                raise ConfigError(f"{name} moves to {m.tier}, but the hardware has no such link")
        run = _Run(self, migrations)
        run.to_the_end()
        return run.timing(with_transfers)

    def nbytes(self, tensor_id: int) -> int:
        """Size of a tensor."""
        return self._nbytes[tensor_id]


_LEAVE, _GONE, _BACK, _NEEDED = range(4)


@final
class _Run:
    """One simulation in progress."""

    def __init__(self, owner: Simulator, migrations: Sequence[Migration]) -> None:
        self._owner = owner
        self._migrations = migrations
        self._num_sites = len(owner.trace.sites)
        self._columns = np.array(
            [(m.leave, m.gone, m.back, m.needed, m.clean) for m in migrations], dtype=np.int64
        ).reshape(-1, 5)
        wraps = bool((self._columns[:, :4] >= self._num_sites).any())
        self._num_steps = 2 if wraps else 1
        self._channels = Channels(owner.links, owner.port)
        self._numbers: dict[tuple[int, int], int] = {}
        """Numbers of transfers by (migration of an unrolled step, direction as 0 or 1)."""
        self._waits: list[tuple[int, int, int, float, float]] = []
        self._delays: list[tuple[int, float]] = []
        """How much later than without waits sites are left, where that changes; ascending."""

    def to_the_end(self) -> None:
        """Visits all sites at which something happens, and lets the transfers end."""
        channels, numbers, site_ns = self._channels, self._numbers, self._owner.times
        slots = slots_of(self._owner.links)
        of_migration = [
            (
                slots[m.tier, Direction.OUT],
                slots[m.tier, Direction.BACK],
                self._owner.nbytes(m.tensor_id),
            )
            for m in self._migrations
        ]
        count, delay = len(self._migrations), 0.0
        for site, phase, key in zip(*self._events(), strict=True):
            now = site_ns[site] + delay
            if phase in (_LEAVE, _BACK):
                slots_and_size = of_migration[key % count]
                side = phase // 2
                number = channels.submit(slots_and_size[side], slots_and_size[2], now)
                numbers[key, side] = number
                continue
            side = phase // 2
            done = channels.finish(numbers[key, side], now)
            if done > now:
                self._waits.append((site, key % count, side, now, done))
                delay = done - site_ns[site]
                self._delays.append((site, delay))
        channels.drain()

    def _events(self) -> tuple[list[int], list[int], list[int]]:
        """Site, phase and key of what happens in the unrolled steps, in the order it happens.

        The key of migration m in unrolled step c is (c + 1) * migrations + m. Of the step before
        the first one, only what ends in the first is there; its copies back start at site 0.
        """
        columns, num_sites = self._columns, self._num_sites
        end = self._num_steps * num_sites
        rows = np.arange(len(columns))
        parts: list[tuple[Ints, ...]] = []
        for copy in range(1 - self._num_steps, self._num_steps):
            at = columns[:, :4] + copy * num_sites
            written = (columns[:, 4] == 0) & (at[:, 0] >= 0) & (at[:, 0] < end)
            alive = at[:, 3] >= 0
            there = (
                alive & written,
                alive & written & (at[:, 1] < end),
                alive & (at[:, 2] < end),
                alive & (at[:, 3] < end),
            )
            for phase, (chosen, order) in enumerate(zip(there, (1, 1, 3, 3), strict=True)):
                here = rows[chosen]
                site = np.maximum(at[here, phase], 0)
                first = columns[here, order] if phase in (_LEAVE, _BACK) else np.zeros_like(here)
                key = here + (copy + 1) * len(columns)
                parts.append((site, np.full_like(here, phase), first, key))
        if not parts:
            return [], [], []
        sites, phases, firsts, keys = (np.concatenate(part) for part in zip(*parts, strict=True))
        sequence = np.lexsort((keys, firsts, phases, sites))
        return sites[sequence].tolist(), phases[sequence].tolist(), keys[sequence].tolist()

    def timing(self, with_transfers: bool) -> Timing:
        """What happened in the last of the unrolled steps."""
        first = (self._num_steps - 1) * self._num_sites
        sites = np.arange(first, first + self._num_sites + 1)
        visited = np.array([site for site, _ in self._delays], dtype=np.int64)
        delays = np.array([0.0, *(delay for _, delay in self._delays)])
        reached = self._owner.site_ns[sites] + delays[np.searchsorted(visited, sites)]
        begin, end = float(reached[0]), float(reached[-1])
        waits = tuple(
            Wait(
                site=site - first,
                migration=index,
                direction=Direction.BACK if side else Direction.OUT,
                start_ns=round(start - begin),
                duration_ns=round(done - begin) - round(start - begin),
            )
            for site, index, side, start, done in self._waits
            if site >= first
        )
        return Timing(
            step_ns=round(end - begin),
            site_ns=np.rint(reached - begin).astype(np.int64),
            waits=waits,
            transfers=self._transfers(begin, end) if with_transfers else (),
        )

    def _transfers(self, begin: float, end: float) -> tuple[Transfer, ...]:
        channels = self._channels
        count, last = len(self._migrations), self._num_steps - 1
        found: list[tuple[float, Tier, Direction, int, int]] = []
        for (key, side), number in self._numbers.items():
            if begin <= channels.start[number] < end:
                direction = Direction.BACK if side else Direction.OUT
                tier = self._migrations[key % count].tier
                found.append((channels.start[number], tier, direction, key, number))
        return tuple(
            Transfer(
                migration=key % count,
                direction=direction,
                tier=tier,
                nbytes=channels.nbytes[number],
                start_ns=round(start - begin),
                end_ns=round(channels.end[number] - begin),
                steps_before=last - (key // count - 1),
            )
            for start, tier, direction, key, number in sorted(found)
        )


def simulate(trace: StepTrace, hardware: Hardware, migrations: Sequence[Migration]) -> Simulation:
    """The step of `trace` under `migrations`, which must be valid (`check_plan`).

    Raises:
        ConfigError: if a migration goes over a link that the machine does not have.
    """
    timing = Simulator(trace, hardware).run(migrations, with_transfers=True)
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
        transfers=tuple(_record(trace, migrations, t) for t in timing.transfers),
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
    trace: StepTrace, migrations: Sequence[Migration], transfer: Transfer
) -> TransferRecord:
    return TransferRecord(
        tensor=trace.tensors[migrations[transfer.migration].tensor_id].name,
        nbytes=transfer.nbytes,
        direction=transfer.direction,
        tier=transfer.tier,
        store="",
        start_ns=transfer.start_ns,
        end_ns=transfer.end_ns,
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
