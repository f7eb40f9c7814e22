"""Locks where waiting could be a dead-lock: finalizers, signal handlers."""

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
