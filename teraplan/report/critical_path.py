"""Why a simulated step is as long as it is: the longest chain of things that wait for each other.

    start -> arrive 0 -> out done 0 -> compute 0 -> arrive 1 -> ... -> arrive n, the end
                |            |  ^          ^
                v            v  |          |
              copies out begin and end   copies in begin and end, one after the other on a link

Each node is a moment, each edge says that one moment is not before another, and by how long. What
lies on the longest path is what would have to be shorter for the step to be shorter: waiting times
alone do not say so, as a copy may be late because of what was before it in its queue. The host's
updates are a queue between copies out and copies in.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import networkx as nx
import numpy as np

from teraplan.report.table import shorten
from teraplan.simulation.lifetimes import Ints
from teraplan.simulation.placed_step import PlacedStep
from teraplan.simulation.simulate import moved_tensor
from teraplan.simulation.simulator import Simulator, Timing, Transfer
from teraplan.units import format_ns
from teraplan.values.hardware import Hardware, Tier
from teraplan.values.plan import HostUpdate, Migration
from teraplan.values.run_record import Direction
from teraplan.values.step_trace import StepTrace

Moment = tuple[str, int]
_ROUNDING_NS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class CriticalPath:
    """What the length of a step consists of."""

    step_ns: int
    computation_ns: int
    before_ns: int
    """What was still on its way from the step before when this one began."""
    host_ns: int
    """Updates on the host's cores."""
    copies_ns: dict[tuple[Tier, Direction], int]
    tensors_ns: dict[int, int]
    """Copies by tensor id; those on the path alone."""

    def as_json(self) -> dict[str, object]:
        """The same in plain values."""
        copies = [
            {"tier": tier.value, "direction": direction.value, "ns": ns}
            for (tier, direction), ns in self.copies_ns.items()
        ]
        return {
            "computation_ns": self.computation_ns,
            "before_ns": self.before_ns,
            "host_ns": self.host_ns,
            "copies": copies,
        }

    def describe(self, trace: StepTrace, limit: int = 3) -> list[str]:
        """The path in words, largest part first."""
        parts = [(self.computation_ns, "computation")]
        if self.before_ns:
            parts.append((self.before_ns, "copies from the step before"))
        if self.host_ns:
            parts.append((self.host_ns, "updates on the host"))
        for (tier, direction), ns in self.copies_ns.items():
            way = f"out to {tier}" if direction is Direction.OUT else f"back from {tier}"
            parts.append((ns, f"copies {way}"))
        lines = [
            f"{ns / max(self.step_ns, 1):6.1%}  {format_ns(ns)} {name}"
            for ns, name in sorted(parts, reverse=True)
        ]
        dearest = Counter(self.tensors_ns).most_common(limit)
        lines += [
            f"        {format_ns(ns)} {shorten(trace.tensors[i].name, 40)}" for i, ns in dearest
        ]
        return lines


def critical_path(
    trace: StepTrace,
    hardware: Hardware,
    migrations: Sequence[Migration],
    host_updates: Sequence[HostUpdate] = (),
) -> CriticalPath:
    """The longest chain of the simulated step.

    Raises:
        ConfigError: if a migration goes over a link that the machine does not have.
    """
    placed = PlacedStep.of(trace, host_updates)
    timing = Simulator(placed.trace, hardware, placed.work).run(migrations, with_transfers=True)
    graph = _graph(placed, migrations, timing)
    end = ("arrive", len(trace.sites))
    needed = graph.subgraph(nx.ancestors(graph, end) | {end})
    path = nx.dag_longest_path(needed, weight="ns")
    computation_ns = before_ns = host_ns = 0
    copies: Counter[tuple[Tier, Direction]] = Counter()
    tensors: Counter[int] = Counter()
    for (kind, number), after in pairwise(path):
        ns = graph.edges[(kind, number), after]["ns"]
        if kind == "begin":
            transfer = timing.transfers[number]
            copies[transfer.tier, transfer.direction] += ns
            moved = moved_tensor(migrations, placed.work, transfer.migration, transfer.direction)
            tensors[moved] += ns
        elif kind == "start":
            before_ns += ns
        elif kind == "work":
            host_ns += ns
        else:
            computation_ns += ns
    return CriticalPath(
        step_ns=timing.step_ns,
        computation_ns=computation_ns,
        before_ns=before_ns,
        host_ns=host_ns,
        copies_ns=dict(copies),
        tensors_ns=dict(tensors),
    )


def _graph(
    placed: PlacedStep, migrations: Sequence[Migration], timing: Timing
) -> "nx.DiGraph[Moment]":
    graph: nx.DiGraph[Moment] = nx.DiGraph()
    trace = placed.trace
    places = [(m.leave, m.gone, m.back, m.needed) for m in migrations]
    places += [(w.flush, w.gone, w.back, w.needed) for w in placed.work]

    def after(first: Moment, then: Moment, ns: int = 0) -> None:
        graph.add_edge(first, then, ns=ns)

    num_sites = len(trace.sites)
    after(("start", 0), ("arrive", 0))
    for number, site in enumerate(trace.sites):
        after(("arrive", number), ("outs", number))
        after(("outs", number), ("compute", number))
        after(("compute", number), ("arrive", number + 1), site.duration_ns)
    asked_ns = _asked_ns(timing, num_sites)
    known: set[tuple[int, Direction, int]] = set()
    """Waits for copies that start in this step."""
    last_of: dict[tuple[Tier, Direction], int] = {}
    for number, transfer in enumerate(timing.transfers):
        after(("begin", number), ("end", number), transfer.end_ns - transfer.start_ns)
        link, out = (transfer.tier, transfer.direction), transfer.direction is Direction.OUT
        asked, waited = _sites(places[transfer.migration], transfer, num_sites)
        if link in last_of:
            after(("end", last_of[link]), ("begin", number))
        elif asked < 0 or transfer.start_ns > asked_ns[int(not out), asked] + _ROUNDING_NS:
            # what ran before it began in the step before
            after(("start", 0), ("begin", number), transfer.start_ns)
        last_of[link] = number
        if asked >= 0:
            after(("arrive" if out else "outs", asked), ("begin", number))
        if waited < num_sites:
            after(("end", number), ("outs" if out else "compute", waited))
            known.add((transfer.migration, transfer.direction, waited))
    for before, then, ns in _host_edges(placed, len(migrations), timing):
        after(before, then, ns)
    for wait in timing.waits:
        if (wait.migration, wait.direction, wait.site) not in known:
            # its copy was on its way when the step began
            kind = "outs" if wait.direction is Direction.OUT else "compute"
            after(("start", 0), (kind, wait.site), wait.start_ns + wait.duration_ns)
    return graph


def _host_edges(
    placed: PlacedStep, num_migrations: int, timing: Timing
) -> Iterator[tuple[Moment, Moment, int]]:
    """What the host's cores wait for, how long they work, and what waits for them."""
    numbers = {
        (transfer.migration - num_migrations, transfer.direction, transfer.steps_before): number
        for number, transfer in enumerate(timing.transfers)
    }
    seen: set[tuple[int, int]] = set()
    for number, run in enumerate(timing.host_runs):
        seen.add((run.work, run.steps_before))
        yield ("work", number), ("worked", number), run.end_ns - run.start_ns
        sent = numbers.get((run.work, Direction.OUT, run.steps_before))
        work = placed.work[run.work]
        ready = max(work.ready, work.flush) - run.steps_before * len(placed.trace.sites)
        if number:
            yield ("worked", number - 1), ("work", number), 0
        if sent is not None:
            yield ("end", sent), ("work", number), 0
        if ready >= 0:
            yield ("arrive", ready), ("work", number), 0
        if not number or sent is None:
            yield ("start", 0), ("work", number), run.start_ns if run.steps_before else 0
        brought = numbers.get((run.work, Direction.BACK, run.steps_before))
        if brought is not None:
            yield ("worked", number), ("begin", brought), 0
    for (index, direction, steps), number in numbers.items():
        if index >= 0 and direction is Direction.BACK and (index, steps) not in seen:
            # the cores began it in the step before
            yield ("start", 0), ("begin", number), timing.transfers[number].start_ns


def _asked_ns(timing: Timing, num_sites: int) -> Ints:
    """When copies out (0) and in (1) are asked for at each site; shape (2, sites)."""
    asked_ns = np.tile(timing.site_ns[:num_sites], (2, 1))
    for wait in timing.waits:
        if wait.direction is Direction.OUT:
            asked_ns[1, wait.site] += wait.duration_ns
    return asked_ns


def _sites(
    places: tuple[int, int, int, int], transfer: Transfer, num_sites: int
) -> tuple[int, int]:
    """Sites of this step where the copy is asked for and waited for; may be outside of it."""
    shift = transfer.steps_before * num_sites
    first = 0 if transfer.direction is Direction.OUT else 2
    return places[first] - shift, places[first + 1] - shift
