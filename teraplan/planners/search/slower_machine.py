"""A plan of a slower machine, for a faster one: with copies that meet as they did there.

    planned   |back asked for          |needed
    slower         . . . waits . . [== copy in ==]
    faster    [copy in]                                asked for as early: it meets other copies
    here                           [copy in]

Links that share a port, and both directions of a link, slow each other down. So a copy that a
faster link begins sooner can delay another one that is needed sooner, and the same plan can take
longer on the faster machine (an anomaly of queues). With the copies in where they were, less is
under way at any time than there was; with storage driven as fast as there, the step is the same
where nothing else is faster.
"""

from bisect import bisect_right
from dataclasses import replace

from teraplan.simulation.placed_step import PlacedStep
from teraplan.simulation.simulator import Simulator
from teraplan.values.plan import Migration, Plan
from teraplan.values.run_record import Direction


def as_on_its_machine(plan: Plan, here: Plan) -> tuple[Plan, Plan]:
    """`here`, which is `plan` for another machine, with the pace of storage there, or its times.

    Their predictions are to be made anew.
    """
    as_fast = replace(here, storage_pace=plan.machine.storage_link)
    return as_fast, replace(here, migrations=_begun_as_there(plan))


def _begun_as_there(plan: Plan) -> tuple[Migration, ...]:
    """The plan's migrations, with each `back` where the copy in began on the plan's machine.

    The memory of no site gets more. A copy in two parts begins with the first of them.
    """
    placed = PlacedStep.of(plan.step, plan.host_updates)
    simulator = Simulator(placed.trace, plan.machine, placed.work)
    timing = simulator.run(plan.migrations, with_transfers=True)
    sites = timing.site_ns.tolist()
    num_sites = len(sites) - 1
    found = list(plan.migrations)
    seen: set[int] = set()
    for transfer in timing.transfers:  # in order of start
        index = transfer.migration
        if transfer.direction is Direction.OUT or index >= len(found) or index in seen:
            continue
        seen.add(index)
        m = found[index]
        here = bisect_right(sites, transfer.start_ns) - 1
        back = here + num_sites * transfer.steps_before
        found[index] = replace(m, back=max(m.back, min(back, m.needed)))
    return tuple(found)
