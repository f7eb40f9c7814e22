"""How fast computation and links are, told by the steps of a plan alone."""

from pathlib import Path

import pytest

from teraplan.errors import StorageUnusableError
from teraplan.planners import make_plan, with_choices_of
from teraplan.runtime.links import storage_link
from teraplan.runtime.session.calibration import Calibration, calibrated, with_durations
from teraplan.simulation.memory_curve import device_curve, peak
from teraplan.simulation.simulate import simulate
from teraplan.values.hardware import Hardware
from teraplan.values.plan import Plan
from teraplan.values.run_record import TRAINING_STATE, RunRecord, StallRecord
from tests.planning.synthetic import budgets, gpt_trace, machine

NUM_RUNS = 4


@pytest.fixture(scope="module")
def plan() -> Plan:
    """One that waits for its links."""
    trace = gpt_trace(layers=4)
    made = make_plan(trace, machine(), budgets(int(peak(device_curve(trace))) // 2))
    assert made.prediction.step_ns > 1.1 * trace.duration_ns
    return made


def runs_of(
    plan: Plan, hardware: Hardware, slower: float, extra_wait_ns: int = 0
) -> list[RunRecord]:
    """What steps of the plan are on this machine, where computing takes `slower` times as long."""
    simulation = simulate(with_durations(plan.trace, slower), hardware, plan.migrations)
    stalls = simulation.stalls
    if extra_wait_ns:
        wait = StallRecord(site=0, tensor=TRAINING_STATE, start_ns=0, duration_ns=extra_wait_ns)
        stalls = (*stalls, wait)
    run = RunRecord(
        step=0,
        duration_ns=simulation.step_ns + extra_wait_ns,
        device_peak_bytes=0,
        managed_peak_bytes=0,
        site_start_ns=(),
        managed_bytes=(),
        transfers=(),
        stalls=stalls,
    )
    return [run] * NUM_RUNS


def learned(plan: Plan, runs: list[RunRecord], known: Calibration) -> Calibration | None:
    measured_ns = int(plan.trace.duration_ns / known.slowdown)
    return calibrated(known, plan, runs, measured_ns, may_slow_down=True)


@pytest.mark.parametrize("slower", [0.7, 1.0, 1.3])
@pytest.mark.parametrize("links", [0.4, 1.0, 1.5])
def test_both_are_found(plan: Plan, slower: float, links: float) -> None:
    runs = runs_of(plan, plan.hardware.with_links(links), slower)
    found = learned(plan, runs, Calibration())
    if runs[0].duration_ns == pytest.approx(plan.prediction.step_ns, rel=0.03):
        assert links == 1.0
        assert found is None, "as predicted"
        return
    assert found is not None
    assert found.slowdown == pytest.approx(slower, rel=0.01)
    assert found.link_speed == pytest.approx(links, rel=0.05)
    assert found.unplanned_wait_ns == 0


def test_what_is_known_is_the_base(plan: Plan) -> None:
    """A plan made with links at 0.8, which are slower by another half, has links at 0.4."""
    known = Calibration(slowdown=1.2, link_speed=0.8)
    found = learned(plan, runs_of(plan, plan.hardware.with_links(0.5), 1.0), known)
    assert found is not None
    assert found.slowdown == pytest.approx(1.2, rel=0.01)
    assert found.link_speed == pytest.approx(0.4, rel=0.05)


def test_what_moving_takes_from_the_computation(plan: Plan) -> None:
    """It is learned once; a plan that moves half as much is slowed down half as much."""
    moved, measured_ns = plan.prediction.moved_bytes, plan.trace.duration_ns
    found = learned(plan, runs_of(plan, plan.hardware, 1.6), Calibration())
    assert found is not None
    assert found.contention_ns_per_byte == pytest.approx(0.6 * measured_ns / moved, rel=0.05)
    less = found.when_moving(moved // 2, moved, measured_ns)
    assert less.slowdown == pytest.approx(1.3, rel=0.01)
    assert less.when_moving(moved, moved // 2, measured_ns).slowdown == pytest.approx(1.6, rel=0.01)
    again = make_plan_of(plan, found)
    later = learned(again, runs_of(plan, plan.hardware, 2.0), found)
    assert later is not None
    assert later.slowdown == pytest.approx(2.0, rel=0.01)
    assert later.contention_ns_per_byte == found.contention_ns_per_byte


def test_steps_that_move_nothing_are_slower_for_other_reasons(plan: Plan) -> None:
    moves_nothing = make_plan(plan.trace, plan.hardware, budgets(1 << 50))
    found = learned(moves_nothing, runs_of(moves_nothing, plan.hardware, 1.5), Calibration())
    assert found is not None
    assert found.contention_ns_per_byte == 0
    assert found.when_moving(1 << 30, 0, 1) == found


def test_links_that_nobody_waits_for_are_as_before(plan: Plan) -> None:
    moved_nothing = make_plan(plan.trace, plan.hardware, budgets(1 << 50))
    found = learned(moved_nothing, runs_of(moved_nothing, plan.hardware, 1.5), Calibration())
    assert found is not None
    assert found.slowdown == pytest.approx(1.5, rel=0.01)
    assert found.link_speed == 1.0


def test_waits_that_no_plan_knows_are_not_the_links(plan: Plan) -> None:
    wait_ns = plan.prediction.step_ns // 4
    found = learned(plan, runs_of(plan, plan.hardware, 1.0, wait_ns), Calibration())
    assert found is not None
    assert found.unplanned_wait_ns == wait_ns
    assert found.link_speed == 1.0
    assert found.slowdown == pytest.approx(1.0, rel=0.01)


def test_what_was_learned_predicts_the_same_runs(plan: Plan) -> None:
    """So the same steps teach nothing a second time."""
    runs = runs_of(plan, plan.hardware.with_links(0.6), 1.1)
    found = learned(plan, runs, Calibration())
    assert found is not None
    again = make_plan_of(plan, found)
    assert again.prediction.step_ns == pytest.approx(runs[0].duration_ns, rel=0.02)
    assert learned(again, runs, found) is None


def make_plan_of(plan: Plan, known: Calibration) -> Plan:
    """The same choices, predicted with what is known."""
    hardware = plan.hardware.with_links(known.link_speed)
    remade = with_choices_of(plan, with_durations(plan.trace, known.slowdown), hardware)
    assert remade is not None
    return remade


def test_at_a_limit_of_speed_the_search_ends(plan: Plan) -> None:
    """No links are so fast or slow; nothing hangs, and the answer is bounded."""
    for factor in (0.01, 100.0):
        found = learned(plan, runs_of(plan, plan.hardware.with_links(factor), 1.0), Calibration())
        assert found is not None
        assert 1 / 16 <= found.link_speed <= 16
    assert learned(plan, runs_of(plan, plan.hardware, 1.0), Calibration()) is None


def test_what_is_no_directory_is_not_measured(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    for path in (file, tmp_path / "absent"):
        with pytest.raises(StorageUnusableError, match="is no directory; name one that exists"):
            storage_link([path])
