"""Policies to compare with, as simple as what they stand for.

`lru` and `belady` move on demand: a tensor leaves where memory is first over the budget and comes
back where it is needed, and the computation waits for both. What LRU takes has been idle for the
longest time; Belady's rule takes what is needed last. `zero-infinity` is static, like the system of
that name (arXiv 2104.07857): parameters, gradients and optimizer state always go, storage first,
and are fetched a little ahead; activations go where that is not enough.
"""

from collections.abc import Mapping
from functools import partial
from types import MappingProxyType

import numpy as np

from teraplan.errors import InfeasibleBudgetError
from teraplan.planners.base import Planner, Problem, no_placement
from teraplan.planners.placing.placement import JUST_IN_TIME, Moves, place
from teraplan.planners.placing.tiers import Spread, assign
from teraplan.planners.placing.victims import Order, choose, farthest_use, first_saved
from teraplan.simulation.lifetimes import Ints
from teraplan.simulation.memory_curve import sum_columns
from teraplan.values.plan import Migration
from teraplan.values.step_trace import TensorKind


def on_demand(problem: Problem, order: Order) -> tuple[Migration, ...]:
    """Migrations that start where they are needed and no sooner.

    Raises:
        InfeasibleBudgetError: if the chosen tensors fit in no way into the other tiers.
    """
    periods, pressure = problem.lifetimes, problem.pressure()
    rows = choose(periods, pressure, order(periods, pressure))
    moves = None if rows is None else assign(problem, rows, Spread.SLOW_FIRST, may_split=False)
    if moves is None:
        raise no_placement(problem)
    pressed = np.flatnonzero(np.tile(pressure > 0, 2))
    migrations: list[Migration] = []
    for row, tier, clean in zip(moves.rows.tolist(), moves.tiers, moves.clean, strict=True):
        start, end = int(periods.start[row]), int(periods.end[row])
        first = int(pressed[np.searchsorted(pressed, start)])
        migrations.append(
            Migration(
                tensor_id=int(periods.tensor_ids[row]),
                leave=first,
                gone=first,
                back=end,
                needed=end,
                tier=tier,
                clean=clean,
            )
        )
    return tuple(migrations)


def statically(problem: Problem) -> tuple[Migration, ...]:
    """All that outlives a micro-batch moves; activations where that is not enough.

    Raises:
        InfeasibleBudgetError: if the chosen tensors fit in no way into the other tiers.
    """
    periods, pressure, tensors = problem.lifetimes, problem.pressure(), problem.trace.tensors
    if not pressure.any():
        return ()
    kinds = np.array([tensors[i].kind for i in periods.tensor_ids.tolist()])
    activations = kinds == TensorKind.ACTIVATION
    always: Ints = np.flatnonzero(~activations)
    columns = (periods.start[always], periods.end[always], periods.nbytes[always])
    away = sum_columns(periods.num_sites, *columns)
    left = np.maximum(pressure - away, 0)
    more = choose(periods, left, first_saved(periods, left), activations)
    if more is None:
        raise no_placement(problem)
    rows = np.union1d(always, more)
    moves: Moves | None = assign(problem, rows, Spread.SLOW_FIRST)
    if moves is None:
        raise no_placement(problem)
    return place(problem, moves, periods.site_ns.astype(float), JUST_IN_TIME)


SIMPLE: Mapping[str, Planner] = MappingProxyType(
    {
        "lru": partial(on_demand, order=first_saved),
        "belady": partial(on_demand, order=farthest_use),
        "zero-infinity": statically,
    }
)
"""By the names of their policies; without reasons."""


def plan_or_none(planner: Planner, problem: Problem) -> tuple[Migration, ...] | None:
    """None if it finds no room in the other tiers, where others may have."""
    try:
        return planner(problem)
    except InfeasibleBudgetError:
        return None
