"""What a step is as long as: by hand, and its length for any step."""

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from teraplan.planners import make_plan
from teraplan.report.critical_path import critical_path
from teraplan.simulation.memory_curve import device_curve, least_budget, peak
from teraplan.values.hardware import Hardware, Tier
from teraplan.values.plan import Migration
from teraplan.values.run_record import Direction
from teraplan.values.step_trace import StepTrace
from tests.planning.synthetic import budgets
from tests.planning.test_simulate import one_byte_per_ns, step
from tests.planning.traces import machines, traces


def move(tensor_id: int, leave: int, gone: int, back: int, needed: int) -> Migration:
    return Migration(
        tensor_id=tensor_id,
        leave=leave,
        gone=gone,
        back=back,
        needed=needed,
        tier=Tier.STORAGE,
    )


def test_a_queue_is_to_blame_and_not_the_copy_that_is_waited_for() -> None:
    # t0 goes out for 500, then t1 for 50, which the computation waits for at site 1
    trace = step(4, (500, ((0, 0), (3, 4)), False), (50, ((0, 0), (3, 4)), False))
    plan = (move(0, 0, 0, 3, 3), move(1, 0, 1, 3, 3))
    found = critical_path(trace, one_byte_per_ns(), plan)
    # out of both is waited for: t0 at site 0, t1 at 1 (hidden by interval 0); back one by one
    assert found.step_ns == 500 + 100 + 100 + 100 + 500 + 50 + 100
    assert found.computation_ns == 400
    assert found.copies_ns == {
        (Tier.STORAGE, Direction.OUT): 500,
        (Tier.STORAGE, Direction.BACK): 550,
    }
    assert found.tensors_ns == {0: 1000, 1: 50}
    assert "copies back from storage" in found.describe(trace)[0]


def test_copies_that_have_time_are_not_on_the_path() -> None:
    trace = step(6, (150, ((0, 0), (5, 6)), False))
    found = critical_path(trace, one_byte_per_ns(), (move(0, 0, 2, 3, 5),))
    assert (found.computation_ns, found.copies_ns, found.before_ns) == (600, {}, 0)


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    trace=traces(),
    hardware=machines(),
    part=st.floats(0, 1),
    policy=st.sampled_from(["belady", "zero-infinity"]),
)
def test_the_path_is_as_long_as_the_step(
    trace: StepTrace, hardware: Hardware, part: float, policy: str
) -> None:
    least, most = least_budget(trace).nbytes, peak(device_curve(trace))
    limit = budgets(least + int((most - least) * part))
    plan = make_plan(trace, hardware, limit, policy)
    found = critical_path(trace, hardware, plan.migrations)
    total = found.computation_ns + found.before_ns + sum(found.copies_ns.values())
    # each copy is rounded to whole nanoseconds
    assert abs(total - found.step_ns) <= 2 + 2 * len(plan.migrations)
