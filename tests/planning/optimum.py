"""The exact optimum of a small step, by trying every plan."""

import itertools

import numpy as np

from teraplan.checker.check_plan import check_plan
from teraplan.simulation.memory_curve import fixed_curve, managed_curve
from teraplan.simulation.simulator import Simulator
from teraplan.values.hardware import Budgets, Hardware, Tier
from teraplan.values.plan import Migration
from teraplan.values.step_trace import StepTrace
from tests.planning.synthetic import plan_of


def optimum_ns(
    trace: StepTrace, hardware: Hardware, limits: Budgets, most_plans: int = 20_000
) -> int | None:
    """The shortest step of all plans that move tensors as a whole, each for all of a period.

    None if no plan holds, or there are too many of them to be tried.
    """
    options = _options(trace, hardware)
    if np.prod([len(o) for o in options], dtype=float) > most_plans:
        return None
    simulator, fixed = Simulator(trace, hardware), fixed_curve(trace)
    largest = sum(tensor.nbytes for tensor in trace.tensors)
    rooms = {
        Tier.HOST: hardware.host_room_bytes(limits.host_bytes),
        Tier.STORAGE: min(limits.storage_bytes, hardware.storage_capacity_bytes),
    }
    short = {tier for tier, room in rooms.items() if room < largest}
    best: int | None = None
    for chosen in itertools.product(*options):
        plan = tuple(m for m in chosen if m is not None)
        if (fixed + managed_curve(trace, plan) > limits.device_bytes).any():
            continue
        in_doubt = any(m.clean or m.tier in short for m in plan)
        if in_doubt and check_plan(plan_of(trace, hardware, limits, plan)):
            continue
        step_ns = simulator.run(plan).step_ns
        best = step_ns if best is None else min(best, step_ns)
    return best


def _options(trace: StepTrace, hardware: Hardware) -> list[list[Migration | None]]:
    """For each idle period, all that can be done with it."""
    periods = [row for row in trace.periods() if trace.tensors[row[0]].nbytes]
    several = {i for i, _, _ in periods if sum(i == other for other, _, _ in periods) > 1}
    return [
        [
            None,
            *(
                Migration(
                    tensor_id=i, leave=start, gone=a, back=b, needed=end, tier=tier, clean=clean
                )
                for tier in Simulator(trace, hardware).links
                for clean in ((False, True) if i in several else (False,))
                for a in range(start, end)
                for b in range(a + 1, end + 1)
            ),
        ]
        for i, start, end in periods
    ]
