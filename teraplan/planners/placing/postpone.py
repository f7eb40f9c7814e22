"""Lets copies out begin late, so that copies in have the link for themselves while it is short.

    leave                      gone          leave                      gone
      |= out =|. . . . . . . . .|     ->       |. . . . . . . . .|= out =|
             memory is held                           memory is held

A plan holds the memory of a tensor until `gone`, which may be long after its copy out is done. A
link that is slower with both directions busy is then slowed down for nothing: where an optimizer
waits for its state, what it has updated can as well be written in the next forward. So each copy
out begins as late as it can and still be done by `gone`, the last ones first, as all later ones
have to be done as well. Memory at no site changes. How much time copies will take is known to the
simulator alone: several factors on it are tried, and the fastest plan counts.
"""

from bisect import bisect_right
from collections.abc import Sequence

import numpy as np

from teraplan.planners.base import Problem
from teraplan.simulation.simulator import Simulator, Timing
from teraplan.values.plan import Migration

_FACTORS = (1.0, 1.15, 1.3, 1.6, 2.0)
_ROUNDS = 2
_WORK, _LEAST = 100_000, 1
"""Migrations times simulations of one search, and the least of these."""

Plan = tuple[Migration, ...]


def postpone_copies_out(
    problem: Problem, simulator: Simulator, migrations: Plan, timing: Timing, enough_ns: int
) -> Plan:
    """The same migrations, or with later `leave` sites if the step is shorter then.

    Args:
        problem: the step and the machine.
        simulator: of both.
        migrations: a plan that holds.
        timing: of its step.
        enough_ns: a lower bound on the step, at which nothing is tried.
    """
    best = migrations
    left = max(_LEAST, _WORK // (len(migrations) + 1))
    for _ in range(_ROUNDS):
        before = timing
        for factor in _FACTORS:
            if problem.is_late or left <= 0 or timing.step_ns <= enough_ns:
                return best
            left -= 1
            found = _postponed(problem, migrations, before, factor)
            again = simulator.run(found)
            if again.step_ns < timing.step_ns:
                best, timing = found, again
        if timing is before:
            break
    return best


def _postponed(
    problem: Problem, migrations: Sequence[Migration], timing: Timing, factor: float
) -> Plan:
    """Each copy out as late as it is done in time by the times of `timing`."""
    once = timing.site_ns.astype(np.float64)
    arrive: list[float] = np.concatenate([once, once[1:] + once[-1]]).tolist()
    free_until = dict.fromkeys(problem.links, arrive[-1])
    found = list(migrations)
    for i in sorted(range(len(found)), key=lambda i: (-found[i].gone, -found[i].leave)):
        m = found[i]
        if m.clean:
            continue
        begin = arrive[m.gone]
        for tier, nbytes in m.parts(problem.trace.tensors[m.tensor_id].nbytes):
            link = problem.links[tier]
            # some disks write next to nothing while they read: no copy would ever be in time
            speed = max(link.out_while_back_bytes_per_s, link.out_bytes_per_s // 2)
            duration = link.latency_ns + nbytes * 1e9 / speed
            free_until[tier] = min(free_until[tier], arrive[m.gone]) - duration * factor
            begin = min(begin, free_until[tier])
        latest = bisect_right(arrive, begin) - 1
        if latest > m.leave:
            found[i] = _leaving(m, min(latest, m.gone))
    return tuple(found)


def _leaving(m: Migration, leave: int) -> Migration:
    """The same with another `leave`; `dataclasses.replace` takes thrice as long."""
    return Migration(
        tensor_id=m.tensor_id,
        leave=leave,
        gone=m.gone,
        back=m.back,
        needed=m.needed,
        tier=m.tier,
        host_bytes=m.host_bytes,
        clean=m.clean,
        reason=m.reason,
    )
