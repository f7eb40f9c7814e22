"""The links of a machine under simulation: a queue and a running transfer per tier and direction.

Each transfer takes its link's latency and then its bytes at the speed of its direction, which is
lower while a transfer runs in the other direction. Where the device has a port that all links
share, its speed is divided among the transfers of one direction in proportion to their own speeds.
The host's cores are one slot more: what they update in host memory is a transfer of theirs, and
where host memory carries less than they and the host link would move, all of it is as much slower.
A transfer can wait for another one to end before it is queued.
Times are nanoseconds as floats, so that many short transfers add no rounding; the caller rounds
when it reports.

A transfer is told by its number; what is known of it is kept in lists.
"""

import itertools
import math
from collections import deque
from collections.abc import Mapping
from typing import final

from teraplan.values.hardware import HostCores, Link, Tier
from teraplan.values.run_record import Direction

Slot = int
"""Two for each tier: out is even, back is odd; the last is that of the host's cores."""
NOTHING = -1
"""The number of no transfer."""


def slots_of(tiers: Mapping[Tier, Link]) -> dict[tuple[Tier, Direction], Slot]:
    """The slot of each tier and direction."""
    return {
        (tier, direction): 2 * index + (direction is Direction.BACK)
        for index, tier in enumerate(tiers)
        for direction in Direction
    }


def speeds(
    links: Mapping[Tier, Link], port: Link | None, cores: HostCores | None = None
) -> list[list[float]]:
    """Bytes per ns of each slot, by the set of busy slots (bit s is set where slot s is busy)."""
    without = _link_speeds(links, port)
    if cores is None:
        return without
    of_host = [
        slot for (tier, _), slot in slots_of(links).items() if tier is Tier.HOST
    ]  # the slot of the cores is the last, so its bit is the highest
    result = [[*row, cores.update_bytes_per_s * 1e-9] for row in without]
    for busy, row in enumerate(without):
        moving = [slot for slot in of_host if busy >> slot & 1]
        own = cores.update_bytes_per_s * 1e-9
        total = own + sum(row[slot] for slot in moving)
        part = min(1.0, cores.memory_bytes_per_s * 1e-9 / total)
        shared = [speed * part if slot in moving else speed for slot, speed in enumerate(row)]
        result.append([*shared, own * part])
    return result


def _link_speeds(links: Mapping[Tier, Link], port: Link | None) -> list[list[float]]:
    result: list[list[float]] = []
    for busy in itertools.product((False, True), repeat=2 * len(links)):
        row: list[float] = []
        for index, link in enumerate(links.values()):
            row += link.speeds(out=busy[2 * index], back=busy[2 * index + 1])
        if port is not None:
            limits = port.speeds(out=any(busy[0::2]), back=any(busy[1::2]))
            for side, limit in enumerate(limits):
                total = sum(row[slot] for slot in range(side, len(row), 2) if busy[slot])
                if total > limit:
                    for slot in range(side, len(row), 2):
                        row[slot] *= limit / total
        result.append([speed * 1e-9 for speed in row])
    # `product` counts with the last slot first
    num_slots = 2 * len(links)
    order = [
        sum(1 << (num_slots - 1 - s) for s in range(num_slots) if mask >> s & 1)
        for mask in range(1 << num_slots)
    ]
    return [result[index] for index in order]


@final
class Channels:
    """All links of a machine, and the transfers of a step. Calls must come in order of time."""

    __slots__ = (
        "_after",
        "_begin",
        "_busy",
        "_end_at",
        "_followers",
        "_latency",
        "_nbytes",
        "_next_end",
        "_queues",
        "_running",
        "_slot",
        "_speeds",
        "_urgent",
        "end",
        "start",
    )

    def __init__(
        self,
        links: Mapping[Tier, Link],
        speeds_by_busy: list[list[float]],
        slots: list[Slot],
        nbytes: list[int],
    ) -> None:
        """Channels for transfers with these slots and bytes, by number; `speeds` of the links."""
        num_slots = len(speeds_by_busy[0])
        self._speeds = speeds_by_busy
        self._latency = [float(link.latency_ns) for link in links.values() for _ in range(2)]
        self._latency += [0.0] * (num_slots - len(self._latency))
        self._queues: list[deque[int]] = [deque() for _ in range(num_slots)]
        self._running = [NOTHING] * num_slots
        self._begin = [0.0] * num_slots
        """When the bytes of the running transfer start to move."""
        self._end_at = [math.inf] * num_slots
        """When the running transfer ends at the present speeds."""
        self._next_end = math.inf
        """The least of these."""
        self._busy = 0
        self._after: dict[int, int] = {}
        """What each transfer that is not queued yet waits for."""
        self._followers: dict[int, list[int]] = {}
        self._urgent: set[int] = set()
        """Of those, what goes to the front of its queue."""
        self._slot, self._nbytes = slots, nbytes
        self.start = [-1.0] * len(slots)
        """When each transfer starts; negative while it waits."""
        self.end = [-1.0] * len(slots)
        """When each transfer ends; negative until it has."""

    def submit(self, number: int, now: float) -> None:
        """Queues a transfer at time `now`; it starts at once if its slot is idle."""
        if self._next_end <= now:
            self._advance(now)
        self._enqueue(number, now)

    def submit_after(self, number: int, after: int, now: float) -> None:
        """The same, but the transfer is not queued before another one has ended."""
        self._advance(now)
        if self.end[after] >= 0.0:
            self._enqueue(number, now)
            return
        self._after[number] = after
        self._followers.setdefault(after, []).append(number)

    def finish(self, number: int, now: float) -> float:
        """When a transfer ends, if the computation waits for it from `now` on.

        A queued one goes to the front of its queue.
        """
        end = self.end
        if end[number] >= 0.0:
            return end[number]
        self._advance(now)
        self._hurry(number)
        while end[number] < 0.0:
            self._end_next()
        return end[number]

    def finish_both(self, first: int, second: int, now: float) -> float:
        """When the later of two transfers ends; both go to the front of their queues."""
        self._advance(now)
        for number in (first, second):
            if self.end[number] < 0.0:
                self._hurry(number)
        return max(self.finish(first, now), self.finish(second, now))

    def _hurry(self, number: int) -> None:
        """Puts a transfer to the front of its queue, and first what it waits for."""
        if self.start[number] >= 0.0:
            return
        if number in self._after:
            self._urgent.add(number)
            self._hurry(self._after[number])
            return
        queue = self._queues[self._slot[number]]
        if queue[0] != number:
            queue.remove(number)
            queue.appendleft(number)

    def drain(self) -> None:
        """Runs everything that is queued to its end."""
        while self._busy:
            self._end_next()

    def _advance(self, until: float) -> None:
        while self._next_end <= until:
            self._end_next()

    def _end_next(self) -> None:
        """Ends the running transfer that ends first, and starts the next of its slot."""
        now = self._next_end
        slot = self._end_at.index(now)
        ended = self._running[slot]
        self.end[ended] = now
        if self._queues[slot]:
            self._begin_transfer(slot, self._queues[slot].popleft(), now)
            self._next_end = min(self._end_at)
        else:
            self._running[slot] = NOTHING
            self._end_at[slot] = math.inf
            self._set_busy(self._busy & ~(1 << slot), now)
        if ended in self._followers:
            for number in self._followers.pop(ended):
                del self._after[number]
                self._enqueue(number, now)

    def _enqueue(self, number: int, now: float) -> None:
        slot = self._slot[number]
        if self._running[slot] == NOTHING:
            self._begin_transfer(slot, number, now)
            self._set_busy(self._busy | 1 << slot, now)
        elif number in self._urgent:
            self._queues[slot].appendleft(number)
        else:
            self._queues[slot].append(number)

    def _begin_transfer(self, slot: Slot, number: int, now: float) -> None:
        self._running[slot] = number
        self.start[number] = now
        begin = now + self._latency[slot]
        self._begin[slot] = begin
        self._end_at[slot] = begin + self._nbytes[number] / self._speeds[self._busy][slot]

    def _set_busy(self, busy: int, now: float) -> None:
        """The slots that are busy from `now` on: what is running goes on at other speeds."""
        before, after = self._speeds[self._busy], self._speeds[busy]
        self._busy = busy
        for slot, number in enumerate(self._running):
            if number != NOTHING and before[slot] != after[slot]:
                moving = self._begin[slot] if self._begin[slot] > now else now
                left = (self._end_at[slot] - moving) * before[slot]
                self._end_at[slot] = moving + left / after[slot]
        self._next_end = min(self._end_at)
