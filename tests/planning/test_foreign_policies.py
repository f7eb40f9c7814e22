"""Policies of other packages: what they return, and what they do wrong."""

from collections.abc import Iterator
from dataclasses import replace
from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path

import numpy as np
import pytest

from teraplan import planners
from teraplan.cli import main
from teraplan.errors import ConfigError, InfeasibleBudgetError, InvalidPlanError
from teraplan.files.plan_file import read_plan, write_plan
from teraplan.planners import make_plan, planner_named
from teraplan.planners.base import Problem
from teraplan.planners.search.stall_driven import plan_by_stalls
from teraplan.simulation.memory_curve import device_curve, least_budget, peak
from teraplan.values.hardware import Tier
from teraplan.values.plan import Migration
from teraplan.values.step_trace import StepTrace
from tests.planning.synthetic import budgets, gpt_trace, machine


def half(trace: StepTrace) -> int:
    return (least_budget(trace).nbytes + peak(device_curve(trace))) // 2


def install(monkeypatch: pytest.MonkeyPatch, **places: str) -> None:
    """Makes policies of what is at these places, or has these names here."""
    here = {
        name: place if ":" in place else f"{__name__}:{place}" for name, place in places.items()
    }
    points = [EntryPoint(name, place, planners.ENTRY_POINTS) for name, place in here.items()]
    monkeypatch.setattr(planners, "entry_points", lambda group: EntryPoints(points))


def test_a_policy_of_another_package(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, mine="teraplan.planners.search.stall_driven:plan_by_stalls")
    trace = gpt_trace(2)
    plan = make_plan(trace, machine(), budgets(half(trace)), "mine")
    assert plan.policy == "mine"
    assert plan.migrations == make_plan(trace, machine(), plan.budgets).migrations
    with pytest.raises(ConfigError, match='did you mean "mine"'):
        make_plan(trace, machine(), plan.budgets, "mines")


def of_a_tensor_that_there_is_not(problem: Problem) -> tuple[Migration, ...]:
    number = len(problem.trace.tensors)
    return (Migration(tensor_id=number, leave=1, gone=1, back=3, needed=3, tier=Tier.STORAGE),)


def test_what_others_plan_is_checked_before_it_is_simulated(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    install(monkeypatch, wrong="of_a_tensor_that_there_is_not")
    trace = gpt_trace(2)
    with pytest.raises(InvalidPlanError, match="1 rule:\n  tensor: migration 0: tensor"):
        make_plan(trace, machine(), budgets(half(trace)), "wrong")


def numbers_of_numpy(problem: Problem) -> Iterator[Migration]:
    for m in plan_by_stalls(problem):
        yield Migration(
            tensor_id=np.int64(m.tensor_id),  # type: ignore[arg-type]
            leave=np.int32(m.leave),  # type: ignore[arg-type]
            gone=np.uint16(m.gone),  # type: ignore[arg-type]
            back=np.int64(m.back),  # type: ignore[arg-type]
            needed=np.int64(m.needed),  # type: ignore[arg-type]
            tier=m.tier.value,  # type: ignore[arg-type]
            host_bytes=np.int64(m.host_bytes),  # type: ignore[arg-type]
            clean=np.bool_(m.clean),  # type: ignore[arg-type]
            reason=m.reason,
        )


def test_numbers_of_numpy_become_those_of_a_plan(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    install(monkeypatch, mine="numbers_of_numpy")
    trace = gpt_trace(2)
    plan = make_plan(trace, machine(), budgets(half(trace)), "mine")
    assert plan.migrations
    assert plan.migrations == make_plan(trace, machine(), plan.budgets).migrations
    write_plan(plan, tmp_path / "plan.json")
    assert read_plan(tmp_path / "plan.json") == plan


def nothing(problem: Problem) -> None:
    pass


def words(problem: Problem) -> list[object]:
    return ["a"]


def changed(problem: Problem, **fields: object) -> tuple[Migration, ...]:
    return tuple(replace(m, **fields) for m in plan_by_stalls(problem))  # type: ignore[arg-type]


def floats(problem: Problem) -> tuple[Migration, ...]:
    return changed(problem, leave=1.0)


def disks(problem: Problem) -> tuple[Migration, ...]:
    return changed(problem, tier="disk")


def unclear(problem: Problem) -> tuple[Migration, ...]:
    return changed(problem, clean=None)


def unnamed(problem: Problem) -> tuple[Migration, ...]:
    return changed(problem, reason=3)


def wordy(problem: Problem) -> tuple[Migration, ...]:
    return changed(problem, reason="so " * 50_000)


def fails(problem: Problem) -> tuple[Migration, ...]:
    raise ZeroDivisionError("two\nlines")


def exits(problem: Problem) -> tuple[Migration, ...]:
    raise SystemExit(0)


def fails_later(problem: Problem) -> Iterator[Migration]:
    yield from plan_by_stalls(problem)
    raise KeyError("late")


def finds_no_plan(problem: Problem) -> tuple[Migration, ...]:
    raise InfeasibleBudgetError("no plan was found")


number = 5


@pytest.mark.parametrize(
    ("place", "message"),
    [
        ("nothing", "returned something of type NoneType"),
        ("words", "returned something of type str among its migrations"),
        ("floats", "returned a migration whose leave is wrong: TypeError: 'float'"),
        ("disks", "returned a migration whose tier is wrong: ValueError: 'disk'"),
        (
            "unclear",
            "returned a migration whose clean is wrong: TypeError: something of type NoneType",
        ),
        (
            "unnamed",
            "returned a migration whose reason is wrong: TypeError: something of type int",
        ),
        ("wordy", "returned a migration whose reason is wrong: ValueError: 150000 characters, at"),
        ("fails", r"failed: ZeroDivisionError: two\\nlines; correct it"),
        ("exits", "failed: SystemExit: 0; correct it"),
        ("fails_later", "failed: KeyError: 'late'"),
        ("number", "is something of type int; let its entry point name a function"),
        ("no.such:place", "cannot be loaded: ModuleNotFoundError"),
    ],
)
def test_what_a_policy_does_wrong_names_it(
    place: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(monkeypatch, mine=place)
    trace = gpt_trace(2)
    with pytest.raises(ConfigError, match=rf'^policy "mine" \(.*{place}\) {message}'):
        make_plan(trace, machine(), budgets(half(trace)), "mine")


def twice(problem: Problem) -> tuple[Migration, ...]:
    return 2 * plan_by_stalls(problem)


def test_a_plan_that_does_not_hold_names_its_policy(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, mine="twice")
    trace = gpt_trace(2)
    with pytest.raises(InvalidPlanError, match=r'^the plan of policy "mine" breaks \d+ rules:'):
        make_plan(trace, machine(), budgets(half(trace)), "mine")


def test_the_error_of_a_policy_is_the_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, mine="fails", none="finds_no_plan")
    trace = gpt_trace(2)
    problem = Problem.of(trace, machine(), budgets(half(trace)))
    with pytest.raises(ConfigError) as raised:
        planner_named("mine")(problem)
    assert isinstance(raised.value.__cause__, ZeroDivisionError)
    with pytest.raises(InfeasibleBudgetError, match="no plan was found"):
        planner_named("none")(problem)


def test_a_policy_that_fails_is_bad_input(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    install(monkeypatch, mine="fails")
    trace = str(tmp_path / "trace.json")
    assert main(["trace", "--library", "unet", "--hardware", "h200", "-o", trace]) == 0
    arguments = ["--policy", "mine", "--hardware", "h200", "--device-budget", "90%"]
    assert main(["plan", trace, *arguments, "-o", str(tmp_path / "plan.json")]) == 2
    said = capsys.readouterr().err
    assert said.startswith('teraplan plan: policy "mine" ')
    assert said.count("\n") == 1
