"""Which kinds of steps are remembered."""

from teraplan.runtime.session import cases as cases_module
from teraplan.runtime.session.cases import Cases

_MOST = cases_module._MOST_MET_ONCE


def _begin(cases: Cases, size: int) -> int:
    case = cases.begun(("graph", (size,)))
    case.num_begun += 1
    return case.number


def test_kinds_that_never_come_again_have_an_end() -> None:
    cases = Cases()
    numbers = [_begin(cases, size) for size in range(3 * _MOST)]
    assert len(cases) == _MOST
    assert numbers == list(range(3 * _MOST)), "each has a number of its own"


def test_what_comes_again_is_remembered() -> None:
    cases = Cases()
    first = _begin(cases, 0)
    again = {_begin(cases, size) for size in (1, 1, 2, 2)}
    for size in range(3, 3 * _MOST):
        _begin(cases, size)
    assert _begin(cases, 0) == first, "also met once, but it is the training"
    assert {_begin(cases, size) for size in (1, 2)} == again


def test_the_last_ones_are_remembered() -> None:
    cases = Cases()
    numbers = {size: _begin(cases, size) for size in range(2 * _MOST)}
    late = range(2 * _MOST - _MOST // 2, 2 * _MOST)
    assert [_begin(cases, size) for size in late] == [numbers[size] for size in late]
