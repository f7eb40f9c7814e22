"""Examples worked out by hand, and properties of the simulator."""

from hypothesis import given, settings
from hypothesis import strategies as st

from teraplan.planners import make_plan
from teraplan.planners.search.small_step import StepTimes
from teraplan.simulation.memory_curve import device_curve, least_budget, peak
from teraplan.simulation.simulate import simulate
from teraplan.simulation.simulator import Simulator
from teraplan.values.hardware import Hardware, Link, Tier
from teraplan.values.plan import Migration
from teraplan.values.run_record import Direction
from teraplan.values.step_trace import Site, SiteKind, StepTrace, Tensor, TensorKind
from tests.planning.synthetic import FINGERPRINT, budgets
from tests.planning.traces import machines, traces

S = Tier.STORAGE


def step(num_sites: int, *tensors: tuple[int, tuple[tuple[int, int], ...], bool]) -> StepTrace:
    """Sites of 100 ns each; tensors as (nbytes, windows, persistent)."""
    sites = tuple(
        Site(
            kind=SiteKind.ENTER,
            graph="g",
            call=0,
            backward=False,
            tensor_id=None,
            duration_ns=100,
            workspace_bytes=0,
        )
        for _ in range(num_sites)
    )
    return StepTrace(
        fingerprint=FINGERPRINT,
        state_bytes=1000,
        sites=sites,
        tensors=tuple(
            Tensor(
                name=f"t{i}",
                kind=TensorKind.ACTIVATION,
                nbytes=nbytes,
                shape=(nbytes,),
                dtype="uint8",
                layer="",
                windows=windows,
                persistent=persistent,
            )
            for i, (nbytes, windows, persistent) in enumerate(tensors)
        ),
    )


def one_byte_per_ns(latency_ns: int = 0, both: float = 1.0) -> Hardware:
    link = Link(
        out_bytes_per_s=10**9,
        back_bytes_per_s=10**9,
        out_while_back_bytes_per_s=int(both * 10**9),
        back_while_out_bytes_per_s=int(both * 10**9),
        latency_ns=latency_ns,
    )
    return Hardware(
        device="test",
        device_capacity_bytes=1 << 40,
        host_capacity_bytes=1 << 40,
        storage_capacity_bytes=1 << 40,
        host_link=link,
        storage_link=link,
    )


def move(tensor: int, leave: int, gone: int, back: int, needed: int, tier: Tier = S) -> Migration:
    return Migration(tensor_id=tensor, leave=leave, gone=gone, back=back, needed=needed, tier=tier)


def test_a_simulation_stops_where_the_step_is_sure_to_take_too_long() -> None:
    trace = step(5, (300, ((0, 0), (4, 5)), False))
    simulator, plan = Simulator(trace, one_byte_per_ns()), (move(0, 0, 1, 3, 4),)
    # the copy out is waited for from 100 to 300, the one back from 600 to 800
    assert simulator.step_ns(plan) == simulator.run(plan).step_ns == 900
    assert simulator.step_ns(plan, 901) == 900
    assert simulator.step_ns(plan, 650) == 700


def test_each_plan_is_simulated_once(simulated: list[object]) -> None:
    trace = step(5, (300, ((0, 0), (4, 5)), False))
    times, plan = StepTimes(Simulator(trace, one_byte_per_ns())), (move(0, 0, 1, 3, 4),)
    assert [times.step_ns(plan, below) for below in (650, 600, 700)] == [700, 700, 700]
    assert len(simulated) == 1
    assert [times.step_ns(plan), times.step_ns(plan, 650), times.step_ns(plan)] == [900, 900, 900]
    assert len(simulated) == 2


@settings(max_examples=10, deadline=None)
@given(trace=traces(), hardware=machines(), part=st.floats(0, 1), below=st.floats(0.5, 1.5))
def test_one_that_stops_tells_the_same(
    trace: StepTrace, hardware: Hardware, part: float, below: float
) -> None:
    least, most = least_budget(trace).nbytes, peak(device_curve(trace))
    limit = budgets(least + int((most - least) * part))
    plan = make_plan(trace, hardware, limit, "belady").migrations
    simulator = Simulator(trace, hardware)
    exact = simulator.run(plan).step_ns
    below_ns = int(exact * below)
    said = simulator.step_ns(plan, below_ns)
    assert said == exact if exact < below_ns else below_ns <= said <= exact


def test_without_migrations_nothing_waits() -> None:
    done = simulate(step(4, (50, ((0, 0), (2, 3)), False)), one_byte_per_ns(), ())
    assert (done.step_ns, done.stalls, done.transfers) == (400, (), ())
    assert done.site_start_ns == (0, 100, 200, 300)
    assert done.managed_bytes == (50, 50, 50, 0)
    assert (done.prediction.device_peak_bytes, done.prediction.managed_peak_bytes) == (1050, 50)


def test_a_transfer_that_has_time_costs_nothing() -> None:
    done = simulate(
        step(6, (150, ((0, 0), (5, 6)), False)), one_byte_per_ns(), (move(0, 0, 2, 3, 5),)
    )
    assert done.step_ns == 600
    assert [(t.direction, t.start_ns, t.end_ns) for t in done.transfers] == [
        (Direction.OUT, 0, 150),
        (Direction.BACK, 300, 450),
    ]
    assert done.managed_bytes == (150, 150, 0, 150, 150, 150)
    assert done.prediction.storage_peak_bytes == 150
    assert (done.prediction.out_bytes, done.prediction.back_bytes) == ({S: 150}, {S: 150})


def test_waits_where_gone_and_needed_come_too_early() -> None:
    trace = step(4, (250, ((0, 0), (3, 4)), False))
    done = simulate(trace, one_byte_per_ns(latency_ns=10), (move(0, 0, 1, 2, 3),))
    # out 0..260, waited for from 100; site 2 at 360; back 360..620, waited for from 460
    assert [(s.site, s.start_ns, s.duration_ns) for s in done.stalls] == [
        (1, 100, 160),
        (3, 460, 160),
    ]
    assert done.site_start_ns == (0, 100, 360, 460)
    assert done.step_ns == 720
    assert done.prediction.stall_ns == {0: 320}


def test_at_one_site_waits_for_out_before_back_starts() -> None:
    trace = step(4, (100, ((0, 0), (3, 4)), False), (100, ((0, 0), (2, 3)), False))
    plan = (move(0, 0, 1, 3, 3), move(1, 0, 1, 2, 2))
    done = simulate(trace, one_byte_per_ns(), plan)
    # out: t0 0..100, t1 100..200, waited for at site 1; back: t1 300..400 at 2; t0 500..600 at 3
    assert done.step_ns == 400 + 100 + 100 + 100


def test_both_ways_at_once_is_slower() -> None:
    trace = step(6, (200, ((0, 0), (5, 6)), False), (100, ((0, 0), (3, 4)), False))
    plan = (move(0, 2, 4, 5, 5), move(1, 0, 2, 2, 3))
    done = simulate(trace, one_byte_per_ns(both=0.5), plan)
    times = [(t.tensor, t.direction, t.start_ns, t.end_ns) for t in done.transfers]
    # t0 out from 200 at half speed until t1 is back at 400: 100 bytes; the rest until 500
    assert times[1:3] == [("t1", Direction.BACK, 200, 400), ("t0", Direction.OUT, 200, 500)]


def test_the_awaited_transfer_jumps_the_queue_but_does_not_interrupt() -> None:
    trace = step(
        6,
        (100, ((0, 0), (5, 6)), False),
        (100, ((0, 0), (5, 6)), False),
        (100, ((0, 0), (5, 6)), False),
        (100, ((0, 0), (3, 4)), False),
    )
    plan = (*(move(i, 0, 1, 2, 5) for i in range(3)), move(3, 0, 1, 3, 3))
    done = simulate(trace, one_byte_per_ns(), plan)
    # at site 3, t0 has just ended and t1 started; t3 goes before t2
    back = [t.tensor for t in done.transfers if t.direction is Direction.BACK]
    assert back == ["t0", "t1", "t3", "t2"]


def test_links_do_not_disturb_each_other() -> None:
    trace = step(4, (100, ((0, 0), (3, 4)), False), (100, ((0, 0), (3, 4)), False))
    plan = (move(0, 0, 1, 2, 3), move(1, 0, 1, 2, 3, Tier.HOST))
    done = simulate(trace, one_byte_per_ns(), plan)
    assert done.step_ns == 400
    assert (done.prediction.host_peak_bytes, done.prediction.storage_peak_bytes) == (100, 100)


def test_a_persistent_tensor_wraps_into_the_next_step() -> None:
    trace = step(4, (150, ((1, 2),), True))
    done = simulate(trace, one_byte_per_ns(), (move(0, 2, 4, 4, 5),))
    assert done.managed_bytes == (150, 150, 150, 150)  # out in 2, 3; coming in from 0
    done = simulate(trace, one_byte_per_ns(), (move(0, 2, 3, 4, 5),))
    # out 200..350 waited for at site 3 (300); site 4 = 0 of the next step at 450;
    # back 0..150 of each step, waited for at site 1 (100) for 50
    assert done.managed_bytes == (150, 150, 150, 0)
    assert done.step_ns == 400 + 50 + 50
    assert [(s.site, s.duration_ns) for s in done.stalls] == [(1, 50), (3, 50)]


def test_a_clean_copy_is_not_written() -> None:
    trace = step(8, (100, ((0, 0), (3, 4), (7, 8)), False))
    second = Migration(tensor_id=0, leave=4, gone=4, back=5, needed=7, tier=S, clean=True)
    done = simulate(trace, one_byte_per_ns(), (move(0, 0, 1, 2, 3), second))
    assert done.prediction.out_bytes == {S: 100}
    assert done.prediction.back_bytes == {S: 200}
    assert done.step_ns == 800
    assert done.prediction.storage_peak_bytes == 100


@settings(max_examples=60, deadline=None)
@given(trace=traces(), hardware=machines(), part=st.floats(0, 1))
def test_times_add_up(trace: StepTrace, hardware: Hardware, part: float) -> None:
    least, most = least_budget(trace).nbytes, peak(device_curve(trace))
    plan = make_plan(trace, hardware, budgets(least + int((most - least) * part)), "teraio")
    done = simulate(trace, hardware, plan.migrations)
    waits = sum(stall.duration_ns for stall in done.stalls)
    assert abs(done.step_ns - done.prediction.ideal_ns - waits) <= len(done.stalls) + 1
    busy: dict[tuple[Tier, Direction], int] = {}
    for t in sorted(done.transfers, key=lambda t: t.start_ns):
        assert t.start_ns >= busy.get((t.tier, t.direction), 0)
        busy[t.tier, t.direction] = t.end_ns
    if all(m.needed < len(trace.sites) for m in plan.migrations):
        moved = sum(t.nbytes for t in done.transfers)
        assert moved == sum(done.prediction.out_bytes.values()) + sum(
            done.prediction.back_bytes.values()
        )
