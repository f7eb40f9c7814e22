"""Lower budgets whose plans are tried too, so that more memory is never slower."""

from teraplan.planners.base import Problem
from teraplan.planners.search.finishing import NEAR
from teraplan.simulation.memory_curve import peak

_RUNGS, _RUNGS_BESIDE_HOST = 8, 2
"""Parts of the way to the unlimited peak, and how many are tried where the host updates, too."""


def rungs(problem: Problem) -> list[int]:
    """Budgets below that of the problem whose plans are tried too, largest first.

    Only the next ones where the host does updates: it is one of several numbers of them that are
    tried, and those farther below have not helped there.
    """
    least, most = problem.least.nbytes, peak(problem.device)
    all_rungs = [least + (most - least) * i // _RUNGS for i in range(_RUNGS)]
    below = [rung for rung in reversed(all_rungs) if rung < problem.limit_bytes]
    if problem.draft or len(problem.lifetimes) > NEAR:
        return []
    return below[:_RUNGS_BESIDE_HOST] if problem.host_work else below
