"""Which idle periods to spend elsewhere, so that enough bytes are away wherever there is pressure.

This is multi-covering of a line by intervals: in each interval of the step, the periods chosen
must together have at least as many bytes as there are over the budget. For tensors of one size,
going from left to right and taking the period that ends last, of those that cover a place where
bytes are missing, moves the fewest bytes (Belady's rule). Other orders win where sizes, speeds and
gaps differ, so the planner tries several and simulates.
"""

import heapq
from collections.abc import Callable
from typing import final

import numpy as np
import numpy.typing as npt

from teraplan.planners.placing.room import Room
from teraplan.simulation.lifetimes import Floats, Ints, Lifetimes
from teraplan.simulation.memory_curve import Curve, sum_columns

Order = Callable[[Lifetimes, Curve], Floats]


def farthest_use(periods: Lifetimes, pressure: Curve) -> Floats:
    """Belady: the next use is the latest."""
    return periods.end.astype(np.float64)


def longest_idle(periods: Lifetimes, pressure: Curve) -> Floats:
    """The most computation passes meanwhile: the transfers have the most time."""
    return periods.idle_ns.astype(np.float64)


def largest(periods: Lifetimes, pressure: Curve) -> Floats:
    """The most bytes: the fewest transfers."""
    return periods.nbytes.astype(np.float64)


def closest_fit(periods: Lifetimes, pressure: Curve) -> Floats:
    """The fewest bytes of those that leave nothing missing, else the most: nothing is wasted."""
    twice = np.tile(pressure, 2)
    ends = zip(periods.start.tolist(), periods.end.tolist(), strict=True)
    needed = [twice[start:end].max(initial=0) for start, end in ends]
    left: Floats = (periods.nbytes - np.array(needed, dtype=np.int64)).astype(np.float64)
    enough: Floats = np.where(left >= 0, -left, left - left.max(initial=0.0))
    return enough


def first_saved(periods: Lifetimes, pressure: Curve) -> Floats:
    """Idle first, so that the copy out can start first."""
    return -periods.start.astype(np.float64)


def longest_pressed(periods: Lifetimes, pressure: Curve) -> Floats:
    """The most time of pressure is covered per byte moved."""
    num_sites = periods.num_sites
    duration = np.diff(periods.site_ns)
    pressed = np.tile(pressure > 0, 2) * duration
    total: Floats = np.concatenate([np.zeros(1), np.cumsum(pressed, dtype=np.float64)])
    assert len(total) == 2 * num_sites + 1, "two steps"
    covered: Floats = total[periods.end] - total[periods.start]
    return covered


@final
class Priced:
    """An order that also looks at how dear the transfers of a period are."""

    def __init__(self, order: Order, prices: Floats, weight: float) -> None:
        self._order = order
        self._prices = prices
        self._weight = weight

    def __call__(self, periods: Lifetimes, pressure: Curve) -> Floats:
        """The rank of each period in the order, less its price as a part of the highest."""
        ranks = np.empty(len(periods))
        ranks[np.argsort(self._order(periods, pressure), kind="stable")] = np.arange(len(periods))
        out = self._prices[0, periods.start % periods.num_sites]
        back = self._prices[1, (periods.end - 1) % periods.num_sites]
        price: Floats = (out + back) / max(float((out + back).max(initial=0.0)), 1.0)
        return ranks / max(len(periods), 1) - self._weight * price


ORDERS: tuple[Order, ...] = (
    farthest_use,
    longest_idle,
    longest_pressed,
    first_saved,
    largest,
    closest_fit,
)


def choose(
    periods: Lifetimes, pressure: Curve, score: Floats, allowed: npt.NDArray[np.bool_] | None = None
) -> Ints | None:
    """Rows of periods that together cover `pressure`, none of them superfluous; ascending.

    Goes through the intervals from left to right; where bytes are missing it takes the period with
    the highest score that covers the place, the larger of equals. None if `allowed` is too few.
    """
    taken = _sweep(periods, pressure, score, allowed)
    return None if taken is None else _without_superfluous(periods, pressure, score, taken)


def _sweep(
    periods: Lifetimes,
    pressure: Curve,
    score: Floats,
    allowed: npt.NDArray[np.bool_] | None,
) -> list[int] | None:
    num_sites = periods.num_sites
    start, end, nbytes = periods.start.tolist(), periods.end.tolist(), periods.nbytes.tolist()
    by_rank = np.lexsort((periods.start, -periods.nbytes, -score))
    rank = np.empty(len(start), dtype=np.int64)
    rank[by_rank] = np.arange(len(start))
    ranks, rows_by_rank = rank.tolist(), by_rank.tolist()
    usable = [True] * len(start) if allowed is None else allowed.tolist()
    heap = [ranks[row] for row in range(len(start)) if end[row] > num_sites and usable[row]]
    heapq.heapify(heap)
    taken: list[int] = []
    chosen = [False] * len(start)
    change = [0] * (num_sites + 1)
    """Bytes that become covered at each site by what was taken before it."""
    covered, next_row = 0, 0
    for site, missing in enumerate(pressure.tolist()):
        covered += change[site]
        while next_row < len(start) and start[next_row] <= site:
            if usable[next_row] and not chosen[next_row]:
                heapq.heappush(heap, ranks[next_row])
            next_row += 1
        while covered < missing:
            if not heap:
                return None
            row = rows_by_rank[heapq.heappop(heap)]
            last = end[row] if start[row] <= site else end[row] - num_sites
            if last <= site or chosen[row]:
                continue
            chosen[row] = True
            taken.append(row)
            covered += nbytes[row]
            change[min(last, num_sites)] -= nbytes[row]
            if start[row] > site:
                change[min(start[row], num_sites)] += nbytes[row]
    return taken


def _without_superfluous(
    periods: Lifetimes, pressure: Curve, score: Floats, taken: list[int]
) -> Ints:
    start, end, nbytes = periods.start, periods.end, periods.nbytes
    covered = sum_columns(periods.num_sites, start[taken], end[taken], nbytes[taken])
    room = Room(covered - pressure)
    # the worst first: what goes out must be worth least
    keep = set(taken)
    for row in sorted(taken, key=lambda row: (score[row], nbytes[row], -start[row], row)):
        first, last, size = int(start[row]), int(end[row]), int(nbytes[row])
        if room.least(first, last) >= size:
            room.add(first, last, -size)
            keep.discard(row)
    return np.array(sorted(keep), dtype=np.int64)
