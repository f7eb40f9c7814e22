"""Predicts when everything happens in a step that runs under a plan.

One stream of computation, and per link one channel out and one back, which may share the device's
port (`channels`). At a site, in
this order, as the runtime does it:

    1. copies out of tensors with `leave` here are queued
    2. the computation waits for copies out with `gone` here; their bytes are free from now on
    3. copies in of tensors with `back` here are queued; their bytes are taken from now on
    4. the computation waits for copies in with `needed` here

A tensor that is split between two tiers is a copy over each link, both queued at the same site; the
computation waits for both.

An update on the host (`HostUpdate`) is a copy out of its gradients, then work of the host's cores,
which are one more queue, then a copy in of its parameters; each follows the one before. The work is
queued no sooner than the step is at the site where it may begin, between 1 and 2.

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

from teraplan.channels import NOTHING, Channels, slots_of
from teraplan.errors import ConfigError
from teraplan.hardware import Hardware, Link, Tier
from teraplan.lifetimes import Ints, site_times
from teraplan.placed_step import HostWork
from teraplan.plan import Migration
from teraplan.run_record import Direction
from teraplan.step_trace import StepTrace


@dataclass(frozen=True, slots=True, kw_only=True)
class Wait:
    """One wait of the computation."""

    site: int
    migration: int
    """Index into the migrations that were simulated; after them come the updates on the host."""
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


@dataclass(frozen=True, slots=True, kw_only=True)
class HostRun:
    """The host's cores at work on one update; times in ns from the start of the step."""

    work: int
    """Index into the work that was simulated."""
    start_ns: int
    end_ns: int
    steps_before: int
    """By how many steps its update began before this one."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Timing:
    """When things happen in a simulated step; what planners look at between attempts."""

    step_ns: int
    site_ns: Ints
    """When each site is reached, before its waits, and the end of the step; shape (sites + 1,)."""
    waits: tuple[Wait, ...]
    transfers: tuple[Transfer, ...]
    """Those that start within the step, in order of start; empty unless asked for."""
    host_runs: tuple[HostRun, ...] = ()
    """The same of the host's cores."""


@final
class Simulator:
    """Simulates plans of one trace on one machine; keeps what all of them need."""

    def __init__(self, trace: StepTrace, hardware: Hardware, work: Sequence[HostWork] = ()) -> None:
        """For a step without its updates on the host (`PlacedStep`), which are `work`.

        Raises:
            ConfigError: if there is work for the host, but the machine says not how fast it is.
        """
        if work and (hardware.host_cores is None or hardware.host_link is None):
            raise ConfigError(
                "updates run on the host, but the hardware has no host_cores or no host_link"
            )
        self.trace = trace
        self.work = tuple(work)
        self.cores = hardware.host_cores if work else None
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
            tier = Tier.HOST if m.host_bytes and m.tier in self.links else m.tier
            if tier not in self.links:
                name = self.trace.tensors[m.tensor_id].name
                raise ConfigError(f"{name} moves to {tier}, but the hardware has no such link")
        run = _Run(self, migrations)
        run.to_the_end()
        return run.timing(with_transfers)

    def nbytes(self, tensor_id: int) -> int:
        """Size of a tensor."""
        return self._nbytes[tensor_id]


_LEAVE, _GONE, _READY, _BACK, _NEEDED = range(5)
_SITE_OF = {_LEAVE: 0, _GONE: 1, _BACK: 2, _NEEDED: 3, _READY: 5}
"""Columns of `_Run` by what happens at the site there."""


@final
class _Run:
    """One simulation in progress."""

    def __init__(self, owner: Simulator, migrations: Sequence[Migration]) -> None:
        self._owner = owner
        self._migrations = migrations
        self._num_sites = len(owner.trace.sites)
        rows = [(m.leave, m.gone, m.back, m.needed, m.clean, 0) for m in migrations]
        rows += [(w.flush, w.gone, w.back, w.needed, False, w.ready) for w in owner.work]
        self._columns = np.array(rows, dtype=np.int64).reshape(-1, 6)
        self._parts = [m.parts(owner.nbytes(m.tensor_id)) for m in migrations]
        wraps = bool((self._columns[:, :4] >= self._num_sites).any())
        self._num_steps = 2 if wraps else 1
        self._channels = Channels(owner.links, owner.port, owner.cores)
        self._numbers: dict[tuple[int, int], int] = {}
        """Numbers of transfers by (migration of an unrolled step, direction as 0 or 1); where a
        tensor is split, that of its second part is the next."""
        self._runs: dict[int, int] = {}
        """Numbers of what the host's cores do, by update of an unrolled step."""
        self._waits: list[tuple[int, int, int, float, float]] = []
        self._delays: list[tuple[int, float]] = []
        """How much later than without waits sites are left, where that changes; ascending."""

    def to_the_end(self) -> None:
        """Visits all sites at which something happens, and lets the transfers end."""
        channels, numbers, site_ns = self._channels, self._numbers, self._owner.times
        slots = slots_of(self._owner.links)
        moved = [
            ((slots[tier, Direction.OUT], nbytes), (slots[tier, Direction.BACK], nbytes))
            for parts in self._parts
            for tier, nbytes in parts[:1]
        ]
        second = {
            index: ((slots[tier, Direction.OUT], nbytes), (slots[tier, Direction.BACK], nbytes))
            for index, parts in enumerate(self._parts)
            for tier, nbytes in parts[1:]
        }
        moved += [
            (
                (slots[Tier.HOST, Direction.OUT], w.gradient_bytes),
                (slots[Tier.HOST, Direction.BACK], w.parameter_bytes),
            )
            for w in self._owner.work
        ]
        count, delay = len(moved), 0.0
        for site, phase, key in zip(*self._events(), strict=True):
            now = site_ns[site] + delay
            if phase == _READY:
                work = self._owner.work[key % count - len(self._migrations)]
                flushed = numbers[key, 0]
                cores = 2 * len(self._owner.links)
                self._runs[key] = channels.submit(cores, work.work_bytes, now, flushed)
                continue
            side = int(phase > _READY)
            if phase in (_LEAVE, _BACK):
                slot, nbytes = moved[key % count][side]
                after = self._runs.get(key, NOTHING) if side else NOTHING
                numbers[key, side] = channels.submit(slot, nbytes, now, after)
                if key % count in second:
                    channels.submit(*second[key % count][side], now)
                continue
            number = numbers[key, side]
            if key % count in second:
                done = channels.finish_both(number, number + 1, now)
            else:
                done = channels.finish(number, now)
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
            at = columns + copy * num_sites
            written = (columns[:, 4] == 0) & (at[:, 0] >= 0) & (at[:, 0] < end)
            alive = at[:, 3] >= 0
            there = {
                _LEAVE: alive & written,
                _GONE: alive & written & (at[:, 1] < end),
                _READY: alive & written & (rows >= len(self._migrations)),
                _BACK: alive & (at[:, 2] < end),
                _NEEDED: alive & (at[:, 3] < end),
            }
            for phase, chosen in there.items():
                here = rows[chosen]
                site = np.maximum(at[here, _SITE_OF[phase]], 0)
                if phase == _READY:
                    # not before the copy out is queued
                    site = np.maximum(columns[here, 5], columns[here, 0]) + copy * num_sites
                order = 3 if phase == _BACK else 1
                first = columns[here, order] if phase != _GONE else np.zeros_like(here)
                first = first if phase != _NEEDED else np.zeros_like(here)
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
            host_runs=self._host_runs(begin, end) if with_transfers else (),
        )

    def _host_runs(self, begin: float, end: float) -> tuple[HostRun, ...]:
        channels, count = self._channels, len(self._columns)
        found = [
            (channels.start[number], key, number)
            for key, number in self._runs.items()
            if begin <= channels.start[number] < end
        ]
        return tuple(
            HostRun(
                work=key % count - len(self._migrations),
                start_ns=round(start - begin),
                end_ns=round(channels.end[number] - begin),
                steps_before=self._num_steps - key // count,
            )
            for start, key, number in sorted(found)
        )

    def _transfers(self, begin: float, end: float) -> tuple[Transfer, ...]:
        channels = self._channels
        count, last = len(self._columns), self._num_steps - 1
        found: list[tuple[float, Tier, Direction, int, int]] = []
        for (key, side), first in self._numbers.items():
            index = key % count
            hosted = index >= len(self._migrations)
            tiers = [Tier.HOST] if hosted else [tier for tier, _ in self._parts[index]]
            direction = Direction.BACK if side else Direction.OUT
            for number, tier in enumerate(tiers, first):
                if begin <= channels.start[number] < end:
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
