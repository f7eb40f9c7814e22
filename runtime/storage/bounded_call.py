"""A system call that may hang, waited for only so long.

A thread that is stuck in the kernel cannot be ended. So the call gets a thread of its own, and as
long as it hangs no other one is made.
"""

import errno
import threading
from collections.abc import Callable

from teraplan.units import format_ns


class BoundedCall:
    """One call at a time. Its caller sees to it that only one thread is here."""

    def __init__(self) -> None:
        self._running: _Call | None = None

    @property
    def hangs(self) -> bool:
        """True if a call has not come back yet. Any thread may ask."""
        return self._running is not None and self._running.is_made

    def end(self) -> bool:
        """See that nothing is called any more; False if a call has not come back."""
        running = self._running
        return running is None or running.ended.is_set() or running.call_off()

    def make(self, call: Callable[[], None], patience_s: float) -> None:
        """Make the call, after what an interrupted one still does.

        Args:
            call: what is called.
            patience_s: for how long it is waited for; one that hangs already gets no more time.

        Raises:
            OSError: ETIMEDOUT, nothing came back; or what the call raised.
        """
        if self._running is not None and not self._running.call_off():
            self._running.wait(patience_s)
        self._running = running = _Call(call)
        running.start()
        running.wait(patience_s)
        self._running = None
        if running.error is not None:
            raise running.error


class _Call:
    """A call in a thread of its own."""

    def __init__(self, call: Callable[[], None]) -> None:
        self._call = call
        self._begins: dict[None, bool] = {}
        """One entry, from when it begins or is called off: whoever is first has it."""
        self._was_waited_for = False
        self.ended = threading.Event()
        self.error: OSError | None = None

    @property
    def is_made(self) -> bool:
        return self._begins.get(None, False) and not self.ended.is_set()

    def start(self) -> None:
        try:
            threading.Thread(target=self._run, name="teraplan-grow", daemon=True).start()
        except RuntimeError:  # no more threads: then nobody watches over it
            self._run()

    def call_off(self) -> bool:
        """See that it is not made, if an interrupt came before its start; False if it is."""
        return not self._begins.setdefault(None, False)

    def wait(self, patience_s: float) -> None:
        patience_s = 0 if self._was_waited_for else patience_s
        if not self.ended.wait(patience_s):
            self._was_waited_for = True
            waited = f"no answer within {format_ns(int(patience_s * 1e9))}"
            raise OSError(errno.ETIMEDOUT, waited if patience_s else "still no answer")

    def _run(self) -> None:
        if not self._begins.setdefault(None, True):
            return
        try:
            self._call()
        except OSError as error:
            self.error = error
        finally:
            self.ended.set()
