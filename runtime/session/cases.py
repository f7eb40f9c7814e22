"""Which kind a step that begins is believed to be: by its first graph and the sizes of its inputs.

Steps that begin alike may go on differently in turn, as where every second one has another loss:

    A B A B     is never the same twice in a row, and could not be measured
    after A comes B, after B comes A

So where a kind was different every time, its steps are told apart by the step before.
"""

from collections.abc import Iterator

from teraplan.runtime.engine.recorder import StepRecorder
from teraplan.runtime.session.case import Case

FirstCall = tuple[str, tuple[object, ...]]
"""The graph that a step begins with, and the sizes of its inputs."""
_MOST_TOLD_APART = 8
"""Of those that begin alike: where steps change for ever, one before says nothing of the next."""


class Cases:
    """The kinds of steps of one session."""

    def __init__(self) -> None:
        self._cases: dict[tuple[FirstCall, int | None], Case] = {}
        """By how they begin, and the step before where that counts."""
        self._told_apart: dict[FirstCall, int] = {}
        """Those that begin so are, and how many kinds of them there are."""
        self._before: int | None = None

    def __len__(self) -> int:
        return len(self._cases)

    def values(self) -> Iterator[Case]:
        """All that there are, in the order in which they were met."""
        return iter(self._cases.values())

    def clear(self) -> None:
        """No step has been met."""
        self._cases.clear()
        self._told_apart.clear()

    def begun(self, call: FirstCall) -> Case:
        """The kind of a step that begins with `call`."""
        key = call, self._before if call in self._told_apart else None
        if key not in self._cases:
            if key[1] is not None and self._told_apart[call] >= _MOST_TOLD_APART:
                key = call, None
            elif key[1] is not None:
                self._told_apart[call] += 1
        return self._cases.setdefault(key, Case(number=len(self._cases)))

    def ended(self, recorder: StepRecorder) -> None:
        """The step that this has written down is the one before the next."""
        self._before = hash(recorder.signature()) if self._told_apart else None

    def tell_apart(self, case: Case) -> bool:
        """Steps of `case` count as different kinds after different steps; False if they already do.

        To be called before the step under way has `ended`.
        """
        ((call, before),) = (key for key, one in self._cases.items() if one is case)
        if call in self._told_apart or before is not None:
            return False
        self._told_apart[call] = 0
        return True

    def renew(self, case: Case) -> None:
        """Its steps are measured as if it had never been met."""
        for key, one in self._cases.items():
            if one is case:
                self._cases[key] = case.anew()
