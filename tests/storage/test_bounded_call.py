"""A call that may hang: made once, waited for only so long, never begun after its end."""

import errno
import threading

import pytest

from teraplan.runtime.storage.bounded_call import BoundedCall


def test_whoever_asks_does_not_disturb_it() -> None:
    bounded, seen = BoundedCall(), list[bool]()
    assert not bounded.hangs
    bounded.make(lambda: seen.append(bounded.hangs), 10.0)
    assert seen == [True]
    assert not bounded.hangs
    assert bounded.end()


def test_its_error_is_the_callers() -> None:
    def fails() -> None:
        raise OSError(errno.ENOSPC, "full")

    bounded = BoundedCall()
    with pytest.raises(OSError, match="full"):
        bounded.make(fails, 10.0)
    assert bounded.end()


def test_one_that_hangs_is_waited_for_once() -> None:
    gate, calls = threading.Event(), list[int]()

    def hangs() -> None:
        calls.append(1)
        gate.wait(30)

    bounded = BoundedCall()
    for why in ("no answer within 50.00 ms", "still no answer"):
        with pytest.raises(OSError, match=why) as raised:
            bounded.make(hangs, 0.05)
        assert raised.value.errno == errno.ETIMEDOUT
    assert bounded.hangs
    assert not bounded.end()
    gate.set()
    bounded._running.ended.wait(10)  # type: ignore[union-attr]
    bounded.make(lambda: calls.append(2), 10.0)
    assert calls == [1, 2]


def test_where_no_thread_can_be_had_it_is_made_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    calls = list[int]()
    BoundedCall().make(lambda: calls.append(1), 10.0)
    assert calls == [1]


def test_an_interrupt_before_its_start_leaves_nothing_to_come(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def interrupted(_: threading.Thread) -> None:
        raise KeyboardInterrupt

    calls, bounded = list[int](), BoundedCall()
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", interrupted)
        with pytest.raises(KeyboardInterrupt):
            bounded.make(lambda: calls.append(1), 10.0)
    assert not bounded.hangs
    bounded.make(lambda: calls.append(2), 10.0)
    assert bounded.end()
    assert calls == [2]
