"""The exact optimum of a small step, by trying every plan."""

import itertools

import numpy as np

from teraplan.hardware import Hardware
from teraplan.memory_curve import fixed_curve, managed_curve
from teraplan.plan import Migration
from teraplan.simulator import Simulator
from teraplan.step_trace import StepTrace


def optimum_ns(
    trace: StepTrace, hardware: Hardware, limit: int, most_plans: int = 20_000
) -> int | None:
    """The shortest step of all plans, None if there are too many of them to be tried."""
    options: list[list[Migration | None]] = []
    for tensor_id, start, end in trace.periods():
        if not trace.tensors[tensor_id].nbytes:
            continue
        tiers = Simulator(trace, hardware).links
        moves = [
            Migration(tensor_id=tensor_id, leave=start, gone=a, back=b, needed=end, tier=tier)
            for tier in tiers
            for a in range(start, end)
            for b in range(a + 1, end + 1)
        ]
        options.append([None, *moves])
    if np.prod([len(o) for o in options], dtype=float) > most_plans:
        return None
    simulator, fixed = Simulator(trace, hardware), fixed_curve(trace)
    best: int | None = None
    for chosen in itertools.product(*options):
        plan = tuple(m for m in chosen if m is not None)
        if (fixed + managed_curve(trace, plan) <= limit).all():
            step_ns = simulator.run(plan).step_ns
            best = step_ns if best is None else min(best, step_ns)
    return best
