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
from numpy.typing import NDArray

from teraplan.errors import ConfigError
from teraplan.simulation.channels import NOTHING, Channels, slots_of, speeds
from teraplan.simulation.lifetimes import Ints, site_times
from teraplan.simulation.placed_step import HostWork
from teraplan.simulation.step_events import (
    QUEUE,
    QUEUE_BOTH,
    WAIT,
    WAIT_BOTH,
    Moves,
    StepEvents,
)
from teraplan.values.hardware import Hardware, Link, Tier
from teraplan.values.plan import Migration
from teraplan.values.run_record import Direction
from teraplan.values.step_trace import StepTrace

LONGEST_NS = 1 << 53
"""Steps that end after this, 104 days, count as this long: up to there floats tell nanoseconds."""


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
        self.links: dict[Tier, Link] = {}
        if hardware.host_link is not None:
            self.links[Tier.HOST] = hardware.host_link
        if hardware.storage_link is not None:
            self.links[Tier.STORAGE] = hardware.storage_link
        cores = hardware.host_cores if work else None
        self.speeds = speeds(self.links, hardware.device_port, cores)
        self.site_ns = site_times(trace)
        sizes = (tensor.nbytes for tensor in trace.tensors)
        self.nbytes = np.fromiter(sizes, np.int64, len(trace.tensors))
        """Sizes of tensors."""

    def run(self, migrations: Sequence[Migration], *, with_transfers: bool = False) -> Timing:
        """The step under `migrations`.

        Raises:
            ConfigError: if a migration goes over a link that the machine does not have.
        """
        run = self._begun(migrations)
        run.to_the_end()
        return run.timing(with_transfers)

    def step_ns(self, migrations: Sequence[Migration], below_ns: int = LONGEST_NS) -> int:
        """How long the step is under `migrations`, in ns, by a simulation that is no longer.

        It ends where the step is sure to take `below_ns` or more, and returns what that shows it
        to take at least.

        Raises:
            ConfigError: as `run`.
        """
        run = self._begun(migrations)
        run.to_the_end(below_ns)
        return run.step_ns

    def _begun(self, migrations: Sequence[Migration]) -> "_Run":
        for m in migrations:
            if m.tier not in self.links or (m.host_bytes and Tier.HOST not in self.links):
                tier = Tier.HOST if m.tier in self.links else m.tier
                name = self.trace.tensors[m.tensor_id].name
                raise ConfigError(
                    f"{name} moves to {tier}, but the hardware has no link to it: name one that "
                    "has, or plan for this one"
                )
        return _Run(self, migrations)


@final
class _Run:
    """One simulation in progress."""

    def __init__(self, owner: Simulator, migrations: Sequence[Migration]) -> None:
        self._owner = owner
        self._num_sites = len(owner.trace.sites)
        self._cores_slot = 2 * len(owner.links)
        slots = slots_of(owner.links)
        moves = Moves.of(
            migrations,
            owner.work,
            owner.nbytes,
            slots.get((Tier.HOST, Direction.OUT), NOTHING),
            slots.get((Tier.STORAGE, Direction.OUT), NOTHING),
        )
        self._moves = moves
        self._num_steps = moves.num_steps(self._num_sites)
        self._events = StepEvents.of(moves, self._num_sites, self._cores_slot)
        self._nbytes: list[int] = self._events.nbytes.tolist()
        self._channels = Channels(
            owner.links, owner.speeds, self._events.slots.tolist(), self._nbytes
        )
        self._waits: list[tuple[int, float, float]] = []
        """Events at which the computation waits, from when and until when."""
        self._first_site = (self._num_steps - 1) * self._num_sites
        self._first_delay = self._delay = 0.0
        """By how much the last of the unrolled steps begins late, and where the simulation is."""

    @property
    def step_ns(self) -> int:
        """Length of the last of the unrolled steps; of one that was cut short, the least."""
        begin = float(self._owner.site_ns[self._first_site]) + self._first_delay
        end = float(self._owner.site_ns[self._first_site + self._num_sites]) + self._delay
        return _rounded(end - begin) if end < LONGEST_NS else LONGEST_NS

    def to_the_end(self, below_ns: int = LONGEST_NS) -> None:
        """Goes through all events, or until the step is sure to take `below_ns` or more."""
        channels, events = self._channels, self._events
        submit, end, after = channels.submit, channels.end, events.after
        all_ns, first = self._owner.site_ns, int(events.sites.searchsorted(self._first_site))
        ideal_ns = int(all_ns[self._first_site + self._num_sites] - all_ns[self._first_site])
        columns = (
            all_ns[events.sites].astype(np.float64).tolist(),
            events.actions.tolist(),
            events.numbers.tolist(),
        )
        most_delay, delay, event = below_ns - ideal_ns + 1.0, 0.0, -1
        for site_ns, action, number in zip(*columns, strict=True):
            event += 1
            now = site_ns + delay
            if action == QUEUE:
                submit(number, now)
                continue
            if action == WAIT:
                done = end[number]
                if done < 0.0:
                    done = channels.finish(number, now)
            elif action == WAIT_BOTH:
                done = channels.finish_both(number, number + 1, now)
            elif action == QUEUE_BOTH:
                submit(number, now)
                submit(number + 1, now)
                continue
            else:
                channels.submit_after(number, after[number], now)
                continue
            if done <= now:
                continue
            self._waits.append((event, now, done))
            self._delay = delay = done - site_ns
            if event < first:
                self._first_delay = delay
            elif delay - self._first_delay > most_delay:
                return

    def timing(self, with_transfers: bool) -> Timing:
        """What happened in the last of the unrolled steps."""
        events, all_ns = self._events, self._owner.site_ns
        first = self._first_site
        sites = np.arange(first, first + self._num_sites + 1)
        waited = np.array([event for event, _, _ in self._waits], dtype=np.int64)
        at = events.sites[waited]
        since_ns = np.array([since for _, since, _ in self._waits])
        done_ns = np.array([done for _, _, done in self._waits])
        delays = np.concatenate([np.zeros(1), done_ns - all_ns[at]])
        reached = all_ns[sites] + delays[np.searchsorted(at, sites)]
        begin, end = float(reached[0]), float(reached[-1])
        here = np.flatnonzero(at >= first)
        start, stop = (_all_rounded(ns[here] - begin) for ns in (since_ns, done_ns))
        columns = (
            at[here] - first,
            events.keys[waited[here]] % max(self._moves.ready.size, 1),
            events.back[waited[here]],
            start,
            stop - start,
        )
        directions = Direction.OUT, Direction.BACK
        waits = tuple(
            Wait(
                site=site,
                migration=index,
                direction=directions[back],
                start_ns=start_ns,
                duration_ns=duration_ns,
            )
            for site, index, back, start_ns, duration_ns in zip(
                *(column.tolist() for column in columns), strict=True
            )
        )
        transfers, runs = self._recorded(begin, end) if with_transfers else ((), ())
        return Timing(
            step_ns=self.step_ns,
            site_ns=_all_rounded(reached - begin),
            waits=waits,
            transfers=transfers,
            host_runs=runs,
        )

    def _recorded(
        self, begin: float, end: float
    ) -> tuple[tuple[Transfer, ...], tuple[HostRun, ...]]:
        """What starts in the last of the unrolled steps, of the links and of the host's cores."""
        events, channels = self._events, self._channels
        channels.drain()
        start = np.array(channels.start)
        here = np.flatnonzero((begin <= start) & (start < end))
        event, slot = events.queued_by[here], events.slots[here]
        keys, back = events.keys[event], events.back[event]
        order = np.lexsort((here, keys, ~back, slot // 2, start[here]))
        count = max(self._moves.ready.size, 1)
        tiers, cores_slot = list(self._owner.links), self._cores_slot
        transfers: list[Transfer] = []
        runs: list[HostRun] = []
        rows = zip(
            here[order].tolist(),
            slot[order].tolist(),
            (keys[order] % count).tolist(),
            (self._num_steps - keys[order] // count).tolist(),
            strict=True,
        )
        for number, slot_now, index, steps_before in rows:
            start_ns = _rounded(channels.start[number] - begin)
            end_ns = _rounded(channels.end[number] - begin)
            if slot_now == cores_slot:
                run = HostRun(
                    work=index - self._moves.num_migrations,
                    start_ns=start_ns,
                    end_ns=end_ns,
                    steps_before=steps_before,
                )
                runs.append(run)
                continue
            transfer = Transfer(
                migration=index,
                direction=Direction.BACK if slot_now % 2 else Direction.OUT,
                tier=tiers[slot_now // 2],
                nbytes=self._nbytes[number],
                start_ns=start_ns,
                end_ns=end_ns,
                steps_before=steps_before,
            )
            transfers.append(transfer)
        return tuple(transfers), tuple(runs)


def _rounded(ns: float) -> int:
    return round(min(ns, LONGEST_NS))


def _all_rounded(ns: NDArray[np.floating]) -> Ints:
    rounded: Ints = np.rint(np.minimum(ns, LONGEST_NS)).astype(np.int64)
    return rounded
