"""Copies out that begin later: by hand, and what must not change."""

from dataclasses import replace

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from teraplan.checker.check_plan import check_plan
from teraplan.library.machines import machine_named
from teraplan.library.models import Workload, trace_of
from teraplan.planners import make_plan
from teraplan.planners.base import Problem
from teraplan.planners.placing.postpone import postpone_copies_out
from teraplan.simulation.memory_curve import device_curve, managed_curve, peak
from teraplan.values.hardware import Hardware
from teraplan.values.step_trace import StepTrace
from tests.planning.synthetic import budgets, plan_of
from tests.planning.test_plans import between
from tests.planning.test_simulate import move, one_byte_per_ns, step
from tests.planning.traces import machines, traces

BOUND_NS = 1_619_941_718
"""Of the third test, by the linear program."""
quick = settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def test_a_copy_out_makes_way_for_a_copy_in() -> None:
    """Both directions at once go at half speed: t0 is late by 100 ns while t1 is written."""
    trace = step(10, (200, ((0, 0), (4, 5)), False), (100, ((0, 1), (8, 9)), False))
    problem = Problem.of(trace, one_byte_per_ns(both=0.5), budgets(1 << 40))
    simulator = problem.simulator()
    plan = (move(0, leave=0, gone=2, back=2, needed=4), move(1, leave=1, gone=6, back=7, needed=8))
    assert simulator.run(plan).step_ns == 1100
    later = postpone_copies_out(problem, simulator, plan, simulator.run(plan), 0)
    assert later == (plan[0], move(1, leave=4, gone=6, back=7, needed=8))
    assert simulator.run(later).step_ns == 1000
    assert postpone_copies_out(problem, simulator, plan, simulator.run(plan), 1100) is plan


def test_a_disk_that_writes_nothing_while_it_reads() -> None:
    trace = step(10, (200, ((0, 0), (4, 5)), False), (100, ((0, 1), (8, 9)), False))
    hardware = one_byte_per_ns(both=0.5)
    assert hardware.storage_link is not None
    disk = replace(hardware.storage_link, out_while_back_bytes_per_s=1)
    hardware = replace(hardware, storage_link=disk)
    problem = Problem.of(trace, hardware, budgets(1 << 40))
    plan = (move(0, leave=0, gone=2, back=2, needed=4), move(1, leave=1, gone=6, back=7, needed=8))
    simulator = problem.simulator()
    later = postpone_copies_out(problem, simulator, plan, simulator.run(plan), 0)
    assert later[1].leave > 1
    assert simulator.run(later).step_ns == 1000


@quick
@given(trace=traces(), hardware=machines(), part=st.floats(0, 1))
def test_memory_stays_and_no_step_is_longer(
    trace: StepTrace, hardware: Hardware, part: float
) -> None:
    limit = budgets(between(trace, part))
    plan = make_plan(trace, hardware, limit, "lru")
    problem = Problem.of(trace, hardware, limit)
    simulator = problem.simulator()
    timing = simulator.run(plan.migrations)
    later = postpone_copies_out(problem, simulator, plan.migrations, timing, 0)
    assert simulator.run(later).step_ns <= timing.step_ns
    assert check_plan(plan_of(trace, hardware, limit, later)) == ()
    before = managed_curve(trace, plan.migrations)
    assert managed_curve(trace, later).tolist() == before.tolist()


def test_in_coarse_steps_too() -> None:
    """What an optimizer has updated is written in the next forward: by 9 % the shorter step."""
    hardware = machine_named("h100-nvl:ssd=4:host=128GiB")
    work = Workload(model="llama3-70b", batch=1, length=2048, micro_batches=4, stages=10)
    trace = trace_of(work, hardware)
    most = peak(device_curve(trace))
    assert len(Problem.of(trace, hardware.hardware, budgets(most)).lifetimes) > 1000
    plan = make_plan(trace, hardware.hardware, budgets(most * 6 // 10))
    assert check_plan(plan) == ()
    assert plan.prediction.step_ns <= 1.05 * BOUND_NS
    windows = {(i, end) for i, tensor in enumerate(trace.tensors) for _, end in tensor.windows}
    assert {(m.tensor_id, m.leave) for m in plan.migrations} - windows, "nothing leaves late"
