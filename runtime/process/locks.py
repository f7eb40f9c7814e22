"""Locks where waiting could be a dead-lock, and waits that an interrupt may end.

Finalizers and the handlers of signals run at any point of a thread; a handler may raise there.
"""

import threading
from collections.abc import Callable
from typing import Protocol


class Lock(Protocol):
    """What `threading` calls a lock."""

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        """Whether it could be had."""
        ...

    def release(self) -> None:
        """Let others have it."""


def if_free(lock: Lock, action: Callable[[], object], *, timeout_s: float = 0.0) -> bool:
    """Call `action` with the lock held if it can be had within `timeout_s`; whether it could.

    No interrupt leaves the lock taken: none can come between taking it and knowing it, since both
    are one call into C.
    """
    locked: list[bool] = []
    try:
        locked.extend(map(lock.acquire, (True,), (timeout_s,)))
        if locked[0]:
            action()
        return locked[0]
    finally:
        if locked == [True]:
            lock.release()


class Bell:
    """Wakes threads that wait for something to change. Call `enlist` and `ring` with one lock held.

    `threading.Condition` would do, but for interrupts: one that comes while a wait takes its lock
    again makes `with` give up a lock that another thread has. Here whoever waits has no lock.
    """

    def __init__(self) -> None:
        self._waiting: list[threading.Lock] = []

    def enlist(self) -> threading.Lock:
        """A lock that can be had again when the bell has rung."""
        waiter = threading.Lock()
        waiter.acquire()
        self._waiting.append(waiter)
        return waiter

    def ring(self) -> None:
        """Wake all. What an interrupt has left undone the next call does."""
        while self._waiting:
            if self._waiting[-1].locked():
                self._waiting[-1].release()
            self._waiting.pop()
