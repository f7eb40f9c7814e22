"""When a kind of step whose plans do not hold is measured anew."""

from itertools import count
from types import SimpleNamespace
from typing import cast

from teraplan.runtime.engine.planned_sizes import PlannedSizes
from teraplan.runtime.engine.recorder import StepRecorder
from teraplan.runtime.engine.saved import Saved
from teraplan.runtime.engine.schedule import Schedule
from teraplan.runtime.session.case import Case
from teraplan.runtime.session.memory_profile import MemoryProfile
from teraplan.runtime.session.why_unplanned import (
    do_without_plan,
    tell_why_unplanned,
    why_unplanned,
)
from teraplan.units import MIB


def _steps_until_anew(case: Case) -> tuple[int, Case]:
    for number in count(1):
        if case.diverged(for_good=False):
            return number, case.anew()
    raise AssertionError


def test_it_takes_twice_as_many_steps_each_time_but_never_ends() -> None:
    case, taken = Case(number=7), list[int]()
    for _ in range(8):
        number, case = _steps_until_anew(case)
        taken.append(number)
    assert taken == [3, 6, 12, 24, 48, 96, 96, 96]
    assert case.number == 7


def test_new_graphs_need_no_second_step_and_do_not_count() -> None:
    case = Case(number=0)
    assert case.diverged(for_good=True)
    assert _steps_until_anew(case.anew())[0] == 3


def _why(case: Case) -> str:
    return why_unplanned(case, num_kinds=3, profile_steps=4)


def test_why_there_is_no_plan_is_told_in_each_state() -> None:
    case = Case(number=1, num_begun=1)
    assert "none before began with the same graph at the same sizes; 3 kinds" in _why(case)
    case.num_begun = 2
    assert "memory is measured in the first step" in _why(case)
    case.attempts = 2
    assert "were different 2 times" in _why(case)
    case.attempts = 4
    assert "after 16 more they are measured again" in _why(case)
    case.count_pause()
    assert "after 15 more" in _why(case)
    for _ in range(15):
        case.count_pause()
    assert "memory is measured" in _why(case)


def test_why_there_is_no_plan_is_not_told_of_the_first_kind_as_of_others() -> None:
    assert "memory is measured" in _why(Case(number=0, num_begun=1))


def _saved(nbytes: int, order: int, tokens: int = 1) -> Saved:
    return cast("Saved", SimpleNamespace(nbytes=nbytes, order=order, tokens=tokens))


def test_a_plan_is_left_where_all_tensors_together_are_far_larger() -> None:
    planned = SimpleNamespace(
        sizes_bytes=(4 * MIB, 4 * MIB, MIB, 0), bearable_bytes=MIB, most_workspace_bytes=6 * MIB
    )
    schedule, sizes = cast("Schedule", planned), PlannedSizes()
    assert sizes.compare(_saved(5 * MIB, 0), schedule) is None, "a little more"
    assert sizes.any_larger
    assert sizes.compare(_saved(5 * MIB, 0, tokens=2), schedule) is None, "the same once more"
    assert sizes.compare(_saved(2 * MIB, 1), schedule) is None, "less"
    assert sizes.compare(_saved(2 * MIB, 2), schedule) is None, "in all they are as large"
    assert sizes.compare(_saved(9 * MIB, 0), schedule) == int(1.25 * 6 * MIB)
    assert (sizes.compare(_saved(MIB, 3), schedule) or 0) > 1 << 40, "nothing was planned for"


def test_memory_is_measured_again_where_a_step_saves_far_more() -> None:
    memory = MemoryProfile(
        signature=(),
        state_bytes=0,
        overhead_bytes=0,
        workspaces_bytes=(),
        tables={},
        saved_bytes=64 * MIB,
        most_bytes=0,
    )
    assert not memory.is_outgrown(66 * MIB)
    assert memory.is_outgrown(66 * MIB + 1)


def test_steps_go_without_a_plan_only_where_they_keep_to_the_budget() -> None:
    case = Case(number=0)
    case.memory = MemoryProfile(
        signature=(),
        state_bytes=0,
        overhead_bytes=0,
        workspaces_bytes=(),
        tables={},
        saved_bytes=0,
        most_bytes=64 * MIB,
    )
    for is_alone in (False, True):
        case.last = cast(
            "StepRecorder",
            SimpleNamespace(has_forwards_alone=is_alone, state=SimpleNamespace(blocks=())),
        )
        assert not do_without_plan(case, 64 * MIB - 1)
        assert case.repeats
        assert do_without_plan(case, 64 * MIB) == is_alone
    assert not case.repeats
    assert "torch.no_grad()" in tell_why_unplanned(case)
