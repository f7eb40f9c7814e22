"""When a kind of step whose plans do not hold is measured anew."""

from itertools import count

from teraplan.runtime.session.case import Case


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
