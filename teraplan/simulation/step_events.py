"""What happens in a step under a plan, in its order, and the transfers that this queues.

    site      0        1        2        3
    move 0    leave    gone     back     needed       events: (0, queue 0) (1, wait 0) (2, queue 1)
    numbers   0 = out           1 = back              (3, wait 1), for all moves in one row

Which transfers there are, and in which order they are queued, follows from the plan alone. So it is
worked out here for all of them at once, and they are told by their number in that order. Where a
migration reaches into the next step, the step is unrolled: two steps, and of the one before them
what ends in the first.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import numpy as np
import numpy.typing as npt

from teraplan.simulation.channels import NOTHING, Slot
from teraplan.simulation.lifetimes import Ints
from teraplan.simulation.placed_step import HostWork
from teraplan.values.hardware import Tier
from teraplan.values.plan import Migration

QUEUE, WAIT, QUEUE_BOTH, WAIT_BOTH, QUEUE_AFTER = range(5)
"""Actions. BOTH: of a tensor in two tiers, whose second part has the next number. AFTER: of the
host's work and of what follows it, which are queued when another transfer has ended."""
_LEAVE, _GONE, _READY, _BACK, _NEEDED = range(5)
"""What happens at a site, in this order."""


@final
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Moves:
    """Migrations, and after them updates on the host, as columns of shape (moves,)."""

    sites: Ints
    """Of leave, gone, back and needed; shape (4, moves)."""
    ready: Ints
    """Of updates, where the host may begin."""
    work_nbytes: Ints
    """Of updates, what the host reads and writes."""
    written: npt.NDArray[np.bool_]
    """Whether there is a copy out."""
    split: npt.NDArray[np.bool_]
    """Whether there are two parts."""
    slots: Ints
    """Of the copy out of each part; the slot of the copy back is the next. Shape (2, moves)."""
    nbytes: Ints
    """By direction and part; shape (2, 2, moves)."""
    num_migrations: int

    @classmethod
    def of(
        cls,
        migrations: Sequence[Migration],
        work: Sequence[HostWork],
        sizes: Ints,
        host_slot: Slot,
        storage_slot: Slot,
    ) -> "Moves":
        """The columns of a plan; `sizes` are of the tensors of the step."""
        rows = [
            (m.leave, m.gone, m.back, m.needed, 0, 0, m.clean, m.host_bytes, m.tensor_id)
            for m in migrations
        ]
        rows += [
            (w.flush, w.gone, w.back, w.needed, w.ready, w.work_bytes, False, 0, 0) for w in work
        ]
        columns = np.array(rows, dtype=np.int64).reshape(-1, 9).T
        stored = np.zeros(len(rows), dtype=bool)
        stored[: len(migrations)] = [m.tier is Tier.STORAGE for m in migrations]
        shared, nbytes = columns[7], sizes[columns[8]]
        split = shared != 0
        first = np.where(split, shared, nbytes)
        parts = np.array([[first, nbytes - first]] * 2)
        parts[0, 0, len(migrations) :] = [w.gradient_bytes for w in work]
        parts[1, 0, len(migrations) :] = [w.parameter_bytes for w in work]
        slots = np.where(stored, storage_slot, host_slot)
        return cls(
            sites=columns[:4],
            ready=columns[4],
            work_nbytes=columns[5],
            written=columns[6] == 0,
            split=split,
            slots=np.array([np.where(split, host_slot, slots), slots]),
            nbytes=parts,
            num_migrations=len(migrations),
        )

    def num_steps(self, num_sites: int) -> int:
        """Into how many steps they have to be unrolled."""
        return 2 if (self.sites >= num_sites).any() else 1


@final
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepEvents:
    """What happens in the unrolled steps, in its order: columns of shape (events,)."""

    sites: Ints
    actions: Ints
    numbers: Ints
    """Of the transfer that is queued or waited for."""
    keys: Ints
    """Which move it is about, and of which step: that of move m in unrolled step c is
    (c + 1) * moves + m."""
    back: npt.NDArray[np.bool_]
    """Whether it is about a copy in."""
    after: dict[int, int]
    """By number, the transfers that others wait for before they are queued."""
    queued_by: Ints
    """The event that queues each transfer; shape (transfers,), as the rest."""
    slots: Ints
    nbytes: Ints

    @classmethod
    def of(cls, moves: Moves, num_sites: int, cores_slot: Slot) -> "StepEvents":
        """The events of `moves` in a step of so many sites."""
        sites, phases, keys = _in_order(moves, num_sites)
        count = moves.ready.size
        index, back = keys % max(count, 1), phases > _READY
        waits = (phases == _GONE) | (phases == _NEEDED)
        both = moves.split[index] & (phases != _READY)
        widths = np.where(waits, 0, 1 + both)
        numbers = np.cumsum(widths) - widths
        first = np.full((2, 3 * count), NOTHING)
        for way, phase in enumerate((_LEAVE, _BACK)):
            first[way, keys[phases == phase]] = numbers[phases == phase]
        ready = phases == _READY
        worked = np.full(3 * count, NOTHING)
        worked[keys[ready]] = numbers[ready]
        follows = (phases == _BACK) & (worked[keys] != NOTHING)
        before = np.where(ready, first[0, keys], worked[keys])
        later = ready | follows
        numbers[waits] = first[back.astype(np.int64)[waits], keys[waits]]
        queued_by = np.repeat(np.arange(len(sites)), widths)
        part = np.arange(len(queued_by)) - numbers[queued_by]
        moved, side = index[queued_by], back[queued_by].astype(np.int64)
        slots = moves.slots[part, moved] + side
        nbytes = moves.nbytes[side, part, moved]
        on_host = ready[queued_by]
        slots[on_host] = cores_slot
        nbytes[on_host] = moves.work_nbytes[moved[on_host]]
        return cls(
            sites=sites,
            actions=np.where(later, QUEUE_AFTER, waits + 2 * both),
            numbers=numbers,
            keys=keys,
            back=back,
            after=dict(zip(numbers[later].tolist(), before[later].tolist(), strict=True)),
            queued_by=queued_by,
            slots=slots,
            nbytes=nbytes,
        )


def _in_order(moves: Moves, num_sites: int) -> tuple[Ints, Ints, Ints]:
    """Site, phase and key of each event, in the order in which they happen.

    Of the step before the first one, only what ends in the first is there; its copies back start at
    site 0.
    """
    num_steps, count = moves.num_steps(num_sites), moves.ready.size
    end = num_steps * num_sites
    leave, gone, back, needed = moves.sites
    begin = np.maximum(moves.ready, leave)  # not before the copy out is queued
    at = np.array([leave, gone, begin, back, needed])
    ranks = np.array([gone, leave, gone, needed, leave])
    ranks[[_GONE, _NEEDED]] = 0
    at = at + np.arange(1 - num_steps, num_steps)[:, None, None] * num_sites
    alive = at[:, _NEEDED] >= 0
    written = alive & moves.written & (at[:, _LEAVE] >= 0) & (at[:, _LEAVE] < end)
    there = (at < end) & alive[:, None]
    there[:, : _READY + 1] &= written[:, None]
    there[:, _READY] = written & (np.arange(count) >= moves.num_migrations)
    copies, phases, index = there.nonzero()
    sites, ranks = np.maximum(at[there], 0), ranks[phases, index]
    keys = index + (copies + 2 - num_steps) * count
    order = np.lexsort((keys, ranks, phases, sites))
    return sites[order], phases[order], keys[order]
