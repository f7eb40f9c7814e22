"""A session, held for as long as there are the models that it trains.

What Dynamo has compiled goes with its model, but for code behind a graph break, which it keeps for
good. So parameters hold the session, or the modules where those are replaced, and a graph that
another model calls later finds a new one.
"""

import functools
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import nn

from teraplan.runtime.session.session import Session


class HeldSession:
    """What all graphs have that are compiled under one configuration."""

    def __init__(
        self, open_session: Callable[[], Session], models: Callable[[], Iterable[nn.Module]]
    ) -> None:
        self._open, self._models = open_session, models
        self._session: Session | None = open_session()
        self._owners: dict[int, weakref.ref[object]] = {}
        """By identity, the parameters that graphs have been called with, as long as they live."""

    @property
    def alive(self) -> Session | None:
        """The session, if there is one."""
        return self._session

    def session(self) -> Session:
        """The session; a new one if the models of the last one are gone."""
        if self._session is None:
            self._session = self._open()
        return self._session

    def own(self, owners: Iterable[object]) -> None:
        """Hold the session until all of these are gone, and those of other calls."""
        for owner in owners:
            if id(owner) not in self._owners:
                ended = functools.partial(_disown, weakref.ref(self), id(owner))
                self._owners[id(owner)] = weakref.ref(owner, ended)

    def knows(self, owner: object) -> bool:
        """True if the session is held for this one."""
        return id(owner) in self._owners

    def disown(self, key: int) -> None:
        """What had this identity is gone."""
        self._owners.pop(key, None)
        if not self._owners:
            self.own(self._models())  # that have been given other parameters
        if not self._owners:
            self._session = None


class Lifeline:
    """One graph's part in it."""

    def __init__(self, held: HeldSession, inputs: Sequence[Any]) -> None:
        self._held = held
        self._indices = [i for i, x in enumerate(inputs) if isinstance(x, nn.Parameter)]

    def session(self, args: Sequence[Any]) -> Session:
        """The session that a call with these arguments belongs to."""
        # All that a model has comes and goes together: to look at one is enough.
        if self._indices and not self._held.knows(args[self._indices[0]]):
            self._held.own(args[i] for i in self._indices)
        return self._held.session()


def _disown(held: "weakref.ref[HeldSession]", key: int, _: object) -> None:
    alive = held()
    if alive is not None:
        alive.disown(key)
