"""The last step for small problems with two tiers: divides tensors between them a part at a time.

    host memory    [ tensor 0      ][free]          [ tensor 0 ][ tensor 1 ]
    storage        [ 0 ][ tensor 1       ]    ->    [ 0     ][ 1     ]

Which shares are best follows from no formula: copies wait for each other, and what one tensor has
of the host's room, another one lacks. So a part of one tensor is moved to the other tier, or its
room in host memory is given to another tensor that is away at the same time; what shortens the
simulated step stays, and is done again. The parts begin at a half of a tensor and become smaller.
"""

from collections.abc import Iterator

from teraplan.planners.search.small_step import Plan, SmallStep
from teraplan.planners.search.tier_split import share_of, together, with_share

_PARTS = (0.5, 0.25, 0.125, 0.0625, 0.03125)
"""Of a tensor, how much is moved at once."""

_Trade = tuple[int, int, int | None]
"""A migration, the bytes that it gets in host memory, and which other one gives them up."""


def divide(step: SmallStep, plan: Plan, enough_ns: int) -> Plan:
    """A plan that is no slower than `plan`, with other shares of host memory.

    Args:
        step: what is planned.
        plan: one that holds.
        enough_ns: a lower bound on the step, at which the search stops.
    """
    best, best_ns = plan, step.step_ns(plan)
    for part in _PARTS:
        for trade in _trades(step, best, part):
            helps = True
            while helps and best_ns > enough_ns and not step.spent():
                raw = _traded(step, best, trade)
                other = None if raw == best else step.settled(raw)
                ns = best_ns if other is None else step.step_ns(other, best_ns)
                helps = ns < best_ns
                if other is not None and helps:
                    best, best_ns = other, ns
    return best


def _trades(step: SmallStep, plan: Plan, part: float) -> Iterator[_Trade]:
    """All that may be tried with a plan, of which shares alone change meanwhile."""
    problem = step.problem
    moves = [i for i, m in enumerate(plan) if problem.may_be_split(m.tensor_id)]
    nbytes = [int(problem.trace.tensors[m.tensor_id].nbytes * part) for m in plan]
    for i in moves:
        yield i, nbytes[i], None
        yield i, -nbytes[i], None
    for i in moves:
        for j in moves:
            one, two = plan[i], plan[j]
            if i != j and one.leave < two.needed and two.leave < one.needed:
                yield i, nbytes[i], j


def _traded(step: SmallStep, plan: Plan, trade: _Trade) -> Plan:
    """The plan with a trade made, as far as there are so many bytes; those of one copy together."""
    gets, nbytes, gives = trade
    groups, changed = together(plan), list(plan)
    if gives is not None:
        nbytes = min(nbytes, share_of(step.problem, plan[gives]))
    for index, more in ((gets, nbytes), (gives, -nbytes)):
        if index is None or more == 0:
            continue
        tensor_id = plan[index].tensor_id
        size = step.problem.trace.tensors[tensor_id].nbytes
        wanted = min(max(share_of(step.problem, plan[index]) + more, 0), size)
        host_bytes = step.problem.cut(tensor_id, wanted)
        for one in groups[index]:
            changed[one] = with_share(step.problem, changed[one], host_bytes)
    return tuple(changed)
