"""A plan turned into what to do at each site.

In the trace of a step the tensors of its training state follow the saved activations; here each
class is counted from 0.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from teraplan.runtime.state.memory.block import Block
from teraplan.simulation.memory_curve import fixed_curve, managed_curve, peak
from teraplan.units import MIB
from teraplan.values.hardware import Tier
from teraplan.values.plan import Migration, Plan
from teraplan.values.step_trace import Site, TensorKind


class Departure(NamedTuple):
    """A tensor of the training state that leaves."""

    number: int
    host_bytes: int
    """So many of its first bytes go to host memory."""


@dataclass(frozen=True, slots=True)
class Actions:
    """What a plan asks for when a site is reached, in this order."""

    leave: tuple[Migration, ...] = ()
    """Migrations to start."""
    gone: tuple[int, ...] = ()
    """Tensors whose bytes must have left."""
    back: tuple[int, ...] = ()
    """Tensors to start bringing back."""
    state_leave: tuple[Departure, ...] = ()
    """The same for training state."""
    state_gone: tuple[Departure, ...] = ()
    state_back: tuple[int, ...] = ()


NOTHING = Actions()
_BEARABLE_PART = 32
"""Of the device budget."""


class Schedule:
    """The actions of a plan by site, and the limits that they keep to."""

    def __init__(self, plan: Plan, state_blocks: Sequence[Block] = ()) -> None:
        """`state_blocks`: the tensors of the training state, as a step before has used them."""
        self.plan = plan
        self.step = plan.step
        """What is run under the plan."""
        self.sites: tuple[Site, ...] = self.step.sites
        self.state_blocks = dict(enumerate(state_blocks))
        """By number; brought up to date as steps use others."""
        tensors = self.step.tensors
        kinds = [tensor.kind for tensor in tensors]
        self._num_activations = kinds.count(TensorKind.ACTIVATION)
        self.moves_state = self._num_activations < len(tensors)
        self.sizes_bytes = tuple(t.nbytes for t in tensors[: self._num_activations])
        """Of the saved activations."""
        self.keys = tuple(
            (s.kind, s.graph, s.call, s.backward, self._number(s.tensor_id)) for s in self.sites
        )
        """Of the sites."""
        migrations = plan.migrations
        saved = managed_curve(
            replace(self.step, tensors=tensors[: self._num_activations]),
            (m for m in migrations if m.tensor_id < self._num_activations),
        )
        state = managed_curve(self.step, migrations) - saved
        self.state_peak_bytes = peak(state)
        """The most that training state takes."""
        others = peak(fixed_curve(self.step) + saved)
        self.peak_bytes = min(plan.budgets.device_bytes, others + self.state_peak_bytes)
        """Of the device: memory that one of both does not need waits, where the budget allows it,
        until it does."""
        planned_bytes = plan.prediction.device_peak_bytes
        self.expected_bytes = self.peak_bytes if self.moves_state else planned_bytes
        """Of the device, the peak of a step under the plan."""
        available = plan.budgets.device_bytes - plan.trace.state_bytes
        rests = [available - site.workspace_bytes for site in self.sites]
        self.rest_bytes = min(rests, default=available)
        """What activations and training state may take at any site."""
        self.most_workspace_bytes = available - self.rest_bytes
        self.bearable_bytes = max(MIB, plan.budgets.device_bytes // _BEARABLE_PART)
        """By which saved activations may be larger than planned, where sizes follow from values."""
        self.limits_bytes = tuple(r - n for r, n in zip(rests, state.tolist(), strict=True))
        """What activations may take at each site."""
        self.state_limits_bytes = tuple(r - n for r, n in zip(rests, saved.tolist(), strict=True))
        """What training state may take at each."""
        self.actions = self._by_site(migrations)
        """What to do at those sites where there is something to do."""
        self.recomputed = frozenset(choice.tensor_id for choice in plan.recomputed)
        """Tensors that are dropped when they are saved."""

    def blocks(self, numbers: Iterable[int]) -> Iterator[Block]:
        """Those tensors of the training state of which it is known which they are."""
        for number in numbers:
            if number in self.state_blocks:
                yield self.state_blocks[number]

    def departures(self, wanted: Iterable[Departure]) -> Iterator[tuple[Block, int]]:
        """The same, with the bytes that go to host memory."""
        for number, host_bytes in wanted:
            if number in self.state_blocks:
                yield self.state_blocks[number], host_bytes

    def ends_call(self, site: int) -> bool:
        """True if what comes behind `site` is not told of: it is the last one of a graph's call."""
        behind = site + 1
        return behind >= len(self.keys) or self.keys[behind][1:4] != self.keys[site][1:4]

    def _number(self, tensor_id: int | None) -> int | None:
        """As keys of sites have it: training state from -1 downwards."""
        if tensor_id is None or tensor_id < self._num_activations:
            return tensor_id
        return self._num_activations - 1 - tensor_id

    def _by_site(self, migrations: tuple[Migration, ...]) -> Mapping[int, Actions]:
        num_sites = len(self.sites)
        # Where several come back at one site, the one that is needed first is asked for first.
        ordered = sorted(migrations, key=lambda m: (m.needed, m.leave))
        leave = _grouped((m.leave % num_sites, m) for m in ordered)
        gone = _grouped((m.gone % num_sites, m) for m in ordered)
        back = _grouped((m.back % num_sites, m) for m in ordered)
        return {
            site: Actions(
                leave=tuple(self._saved(leave.get(site, ()))),
                gone=tuple(m.tensor_id for m in self._saved(gone.get(site, ()))),
                back=tuple(m.tensor_id for m in self._saved(back.get(site, ()))),
                state_leave=self._departures(leave.get(site, ())),
                state_gone=self._departures(gone.get(site, ())),
                state_back=tuple(m.number for m in self._departures(back.get(site, ()))),
            )
            for site in gone.keys() | back.keys() | leave.keys()
        }

    def _saved(self, migrations: Iterable[Migration]) -> list[Migration]:
        return [m for m in migrations if m.tensor_id < self._num_activations]

    def _departures(self, migrations: Iterable[Migration]) -> tuple[Departure, ...]:
        """Of the training state."""
        return tuple(
            Departure(m.tensor_id - self._num_activations, self._host_bytes(m))
            for m in migrations
            if m.tensor_id >= self._num_activations
        )

    def _host_bytes(self, migration: Migration) -> int:
        parts = migration.parts(self.step.tensors[migration.tensor_id].nbytes)
        return sum(nbytes for tier, nbytes in parts if tier is Tier.HOST)


def _grouped(migrations: Iterable[tuple[int, Migration]]) -> dict[int, list[Migration]]:
    groups: dict[int, list[Migration]] = {}
    for site, migration in migrations:
        groups.setdefault(site, []).append(migration)
    return groups
