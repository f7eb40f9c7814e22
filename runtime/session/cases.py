"""Which kind a step that begins is believed to be: by its first graph and the sizes of its inputs.

Steps that begin alike may go on differently in turn, as where every second one has another loss. So
where those of a kind turn out to be different, they are told apart by the step before, and where
that is not enough, by the one before it:

    A B A B A B      after A comes B, after B comes A
    A A B A A B      after B comes A; after A either, but after A and A comes B
"""

from collections import deque
from collections.abc import Iterator

from teraplan.runtime.engine.recorder import StepRecorder
from teraplan.runtime.session.case import Case

FirstCall = tuple[str, tuple[object, ...]]
"""The graph that a step begins with, and the sizes of its inputs."""
_Kind = tuple[FirstCall, tuple[int, ...]]
"""How its steps begin, and the steps before as far as they count, the last one first."""
_MOST_BEFORE = 4
_MOST_KINDS = 12
"""Told apart of those that begin alike: where steps change for ever, those before say nothing."""
_MOST_MET_ONCE = 1024
"""Kinds that were met are remembered, so that they are measured when they come again: so many, and
those that come again. Where sizes never repeat there is no end of them."""


class Cases:
    """The kinds of steps of one session."""

    def __init__(self) -> None:
        self._cases: dict[_Kind, Case] = {}
        self._divided: set[_Kind] = set()
        """Kinds whose steps are told apart."""
        self._before: deque[int] = deque(maxlen=_MOST_BEFORE)
        self._num_met = 0

    def __len__(self) -> int:
        return len(self._cases)

    def values(self) -> Iterator[Case]:
        """All that there are, in the order in which they were met."""
        return iter(self._cases.values())

    def clear(self) -> None:
        """No step has been met."""
        self._cases.clear()
        self._divided.clear()
        self._before.clear()
        self._num_met = 0

    def begun(self, call: FirstCall) -> Case:
        """The kind of a step that begins with `call`."""
        kind: _Kind = call, ()
        for before in self._before:
            if kind not in self._divided:
                break
            kind = call, (*kind[1], before)
        if kind not in self._cases and kind[1]:
            alike = sum(known == call for known, before in self._cases if before)
            kind = kind if alike < _MOST_KINDS else (call, ())
        return self._cases.get(kind) or self._met(kind)

    def _met(self, kind: _Kind) -> Case:
        if len(self._cases) >= _MOST_MET_ONCE:
            alone = (known for known, one in self._cases.items() if one.may_be_alone)
            self._cases.pop(next(alone, kind), None)
        new = self._cases[kind] = Case(number=self._num_met, in_turn=bool(kind[1]))
        self._num_met += 1
        return new

    def ended(self, recorder: StepRecorder) -> None:
        """The step that this has written down is the one before the next."""
        if self._divided:
            self._before.appendleft(hash(recorder.signature()))

    def tell_apart(self, case: Case) -> bool:
        """Steps of `case` are different kinds after different steps; False if that cannot be.

        To be called before the step under way has `ended`.
        """
        (kind,) = (kind for kind, one in self._cases.items() if one is case)
        if kind in self._divided or len(kind[1]) == _MOST_BEFORE:
            return False
        self._divided.add(kind)
        return True

    def renew(self, case: Case) -> None:
        """Its steps are measured as if it had never been met."""
        for kind, one in self._cases.items():
            if one is case:
                self._cases[kind] = case.anew()
