"""Tokens, and what becomes of those whose finalizer was interrupted."""

import sys

import pytest

from teraplan.runtime.engine import tokens
from teraplan.runtime.engine.tokens import make_token, owner_of, release_lost
from tests.fakes.interrupts import InterruptAt


class Owner:
    """Notes which of its tokens are gone."""

    def __init__(self) -> None:
        self.released: list[int] = []

    def release(self, key: int) -> None:
        self.released.append(key)


def test_a_token_says_when_it_is_gone() -> None:
    owner = Owner()
    key, token = make_token(owner)
    assert owner_of(token) == (owner, key)
    release_lost([key])
    assert not owner.released, "it is there"
    del token
    assert owner.released == [key]
    release_lost([key])
    assert owner.released == [key], "once"


@pytest.mark.parametrize("line", [1, 2])
def test_a_token_whose_finalizer_was_interrupted_is_released_later(
    line: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "unraisablehook", lambda _: None)
    owner = Owner()
    key, token = make_token(owner)
    addresses = len(tokens._keys_at)
    with InterruptAt(line, str(tokens.__file__)) as interrupt:
        del token
    assert interrupt.has_come
    assert not owner.released
    release_lost([key, key + 1])
    assert owner.released == [key]
    assert key not in tokens._owners
    assert len(tokens._keys_at) == addresses - 1
