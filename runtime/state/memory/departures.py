"""Which uses of a step are followed by the tensor's leaving memory: the one needed last leaves.

Belady's rule with sizes (L. A. Belady, IBM Systems Journal 5(2), 1966), played through twice, since
a step begins with what the step before has left behind.
"""

import heapq
from collections.abc import Mapping, Sequence

from teraplan.runtime.state.memory.block import Key
from teraplan.values.step_trace import TensorKind

_ROUNDS = 2


def departures(
    uses: Sequence[Key], nbytes_of: Mapping[Key, int], limit_bytes: int
) -> frozenset[int]:
    """Positions in `uses` after which the tensor leaves before its next use.

    Args:
        uses: what one step uses, in order; every step does the same.
        nbytes_of: size of each. Gradients end with their last use in the step.
        limit_bytes: most bytes in memory at once.
    """
    following = _following(uses)
    resident: dict[Key, int] = {}
    """Each with the position of its latest use, counted on from step to step."""
    farthest: list[tuple[int, int, Key]] = []
    total, left = 0, set[int]()
    for position in range(_ROUNDS * len(uses)):
        key = uses[position % len(uses)]
        if key in resident:
            total -= nbytes_of[key]
        if position == len(uses):
            left.clear()
        while total + nbytes_of[key] > limit_bytes and farthest:
            _, used, victim = heapq.heappop(farthest)
            if victim == key or resident.get(victim) != used:
                continue
            del resident[victim]
            total -= nbytes_of[victim]
            left.add(used % len(uses))
        after = following[position % len(uses)]
        if after is None:
            resident.pop(key, None)
            continue
        resident[key] = position
        total += nbytes_of[key]
        heapq.heappush(farthest, (-(position + after), position, key))
    return frozenset(left)


def _following(uses: Sequence[Key]) -> list[int | None]:
    """Distance from each use to the next one of the same tensor; None where its life ends."""
    distances: list[int | None] = [None] * len(uses)
    seen: dict[Key, int] = {}
    for position in reversed(range(2 * len(uses))):
        key = uses[position % len(uses)]
        if position < len(uses):
            ends = key[0] is TensorKind.GRADIENT and seen[key] >= len(uses)
            distances[position] = None if ends else seen[key] - position
        seen[key] = position
    return distances
