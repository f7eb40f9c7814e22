"""What the default policy tries first: orders of tensors, and ways to spread them over tiers."""

from teraplan.planners.base import Problem
from teraplan.planners.placing.tiers import Spread
from teraplan.planners.placing.victims import ORDERS, Order, farthest_use, largest, longest_idle
from teraplan.planners.search.finishing import NEAR, PLENTY

_SPREADS = (Spread.SHORT_IDLE_FAST, Spread.BALANCED, Spread.SLOW_FIRST, Spread.BY_LOAD)
SECOND_SPREADS = {True: (Spread.SHORT_IDLE_FAST, 200), False: (Spread.BALANCED, 30)}
"""The one of a second search, and its attempts; True: behind a port that links share."""
OTHER_SPREADS = (Spread.SHORT_IDLE_FAST, Spread.BALANCED)
"""From which splits begin, too, beside those of the best plan."""
_GOOD_ORDERS = (longest_idle, largest, farthest_use)
_BEST_ORDERS = (longest_idle, farthest_use)


def all_spreads(problem: Problem) -> tuple[Spread, ...]:
    """All that make a difference on this machine."""
    return _SPREADS if len(problem.links) > 1 else (Spread.SLOW_FIRST,)


def first_orders(problem: Problem) -> tuple[Order, ...]:
    """The fewer, the more idle periods there are."""
    if len(problem.lifetimes) <= NEAR:
        return ORDERS
    return _GOOD_ORDERS if len(problem.lifetimes) <= PLENTY else _BEST_ORDERS


def first_spreads(problem: Problem, spreads: tuple[Spread, ...]) -> tuple[Spread, ...]:
    """All of these where there are few idle periods, else the last one."""
    return spreads if len(problem.lifetimes) <= NEAR else spreads[-1:]
