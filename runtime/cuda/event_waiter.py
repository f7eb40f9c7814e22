"""A thread that waits for device events, so that no other thread has to."""

import logging
import threading
from collections.abc import Callable
from queue import SimpleQueue

from teraplan.runtime.cuda.runtime import Event
from teraplan.runtime.process.threads import start_thread

_log = logging.getLogger(__name__)

Then = Callable[[Exception | None], None]
"""Gets the error that the device reported at the event, or None."""

_Item = tuple[Event, object, Then | None]


class EventWaiter:
    """Waits for events in the order in which they are given, as one stream reaches them.

    Waiting happens in the driver without the GIL. An event always comes: what it stands behind was
    given to the device before, and the device waits for nothing that this process has yet to do.
    """

    def __init__(self, name: str, enter_thread: Callable[[], None]) -> None:
        """With a thread `name`, which calls `enter_thread` first."""
        self._enter_thread = enter_thread
        self._queue: SimpleQueue[_Item | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        start_thread(self._thread)

    def when(self, event: Event, then: Then | None = None, *, keep: object = None) -> None:
        """Call `then` after `event`; until then hold on to `keep` (memory that a copy uses)."""
        self._queue.put((event, keep, then))

    def close(self, timeout_s: float) -> bool:
        """Wait for the events given so far and end the thread; False if that took too long."""
        self._queue.put(None)
        if self._thread is not threading.current_thread():
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        self._enter_thread()
        while True:
            item = self._queue.get()
            if item is None:
                return
            _finish(*item)
            del item  # not kept until the next one comes


def _finish(event: Event, keep: object, then: Then | None) -> None:
    error: Exception | None = None
    try:
        event.synchronize()
    except Exception as caught:  # noqa: BLE001  whatever the driver reports, somebody waits for it
        error = caught.with_traceback(None)  # it would hold this frame, and with it `keep`
    if then is not None:
        try:
            then(error)
        except Exception:  # noqa: BLE001  a bug in one must not stop all that follow
            _log.critical("what was to follow a copy failed", exc_info=True)
    elif error is not None:
        _log.error("the device reported an error after a copy: %s", error)
