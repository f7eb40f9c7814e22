"""Which migrations find their bytes still in the tier that they go to, and write nothing.

windows     [w0]        [w1]        [w2 changes]        [w3]
period 0        [written]
period 1                    [clean]                          relies on period 0
period 2                                        [written]    what was there is of before w2
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace

from teraplan.planners.base import Problem
from teraplan.values.hardware import Tier
from teraplan.values.plan import Migration
from teraplan.values.step_trace import Tensor


def kept_copies(
    tensor: Tensor, spans: Sequence[tuple[int, int]], places: Sequence[object], num_sites: int
) -> Iterator[tuple[int, int, int]]:
    """Migrations of one tensor that can rely on the copy of the one before.

    Args:
        tensor: what moves.
        spans: from which to which site it is away, in order; the last may end in the next step.
        places: where its bytes are meanwhile: a copy is of use where the same bytes are to go.
        num_sites: of the step.

    Yields:
        The position of such a migration, and from which to which site the copy of the one before
        is kept for it; if that is of the step before, for the migration in the next step.
    """
    if len(spans) < 2:
        return
    changes = [tensor.windows[number] for number in tensor.changes]
    for position, (start, _) in enumerate(spans):
        if position == 0 and not (tensor.persistent and changes):
            continue  # of all that go round, one must write
        shift = 0 if position else num_sites
        since = spans[position - 1][1] - shift
        if places[position] == places[position - 1] and not _changed(changes, since, start, shift):
            yield position, since + shift, start + shift


def _changed(changes: list[tuple[int, int]], since: int, until: int, num_sites: int) -> bool:
    """Whether a window in which the tensor changes lies between, also one of the step before."""
    return any(
        since <= start - shift and end - shift <= until
        for start, end in changes
        for shift in (0, num_sites)
    )


def with_kept_copies(problem: Problem, migrations: Sequence[Migration]) -> tuple[Migration, ...]:
    """The same with all `clean` that can be, if the tiers have room to keep every copy."""
    tensors, num_sites = problem.trace.tensors, problem.lifetimes.num_sites
    of_tensor: dict[int, list[int]] = defaultdict(list)
    for index in sorted(range(len(migrations)), key=lambda i: migrations[i].leave):
        of_tensor[migrations[index].tensor_id].append(index)
    clean: set[int] = set()
    for tensor_id, indices in of_tensor.items():
        moved = [migrations[i] for i in indices]
        spans = [(m.leave, m.needed) for m in moved]
        places = [(m.tier, m.host_bytes) for m in moved]
        kept = kept_copies(tensors[tensor_id], spans, places, num_sites)
        clean.update(indices[position] for position, _, _ in kept)
        if tensor_id in problem.host_copies:
            clean.update(i for i in indices if migrations[i].tier is Tier.HOST)
    return tuple(
        m if m.clean == (i in clean) else replace(m, clean=not m.clean)
        for i, m in enumerate(migrations)
    )
