"""The thread that updates parameters on the host's cores, and waiting for it."""

import threading
import time
from queue import SimpleQueue

from teraplan.errors import DeadlineError, HostUpdateError
from teraplan.runtime.process.threads import start_thread
from teraplan.runtime.state.host_updates.host_step import HostStep

_LOOK_S = 0.05


class HostWorker:
    """One thread, made when it is first needed, and anew if it has gone (a forked process)."""

    def __init__(self, deadline_s: float) -> None:
        self._deadline_s = deadline_s
        self._thread: threading.Thread | None = None
        self._queue: SimpleQueue[HostStep | None] = SimpleQueue()

    def start(self, step: HostStep) -> None:
        """Let the thread run the step."""
        if self._thread is None or not self._thread.is_alive():
            self._queue = SimpleQueue()
            self._thread = threading.Thread(
                target=_work, args=(self._queue,), name="teraplan-host-updates", daemon=True
            )
            start_thread(self._thread)
        self._queue.put(step)

    def join(self, step: HostStep) -> None:
        """Wait until the step has ended; an interrupt stops it, and is raised when it has.

        Raises:
            DeadlineError: for `deadline_s` no bucket has come to its end.
            HostUpdateError: the thread is gone.
        """
        interrupt: BaseException | None = None
        seen, since = -1, time.monotonic()
        while not step.ended.is_set():
            try:
                step.ended.wait(_LOOK_S)
                if len(step.updated) != seen:
                    seen, since = len(step.updated), time.monotonic()
                self._check(step, since)
            except (DeadlineError, HostUpdateError):
                raise
            except BaseException as error:  # noqa: BLE001  raised when the thread is done
                step.stopped, interrupt = True, error
        if interrupt is not None:
            raise interrupt

    def close(self) -> None:
        """End the thread when it has nothing more to do."""
        self._queue.put(None)

    def _check(self, step: HostStep, since: float) -> None:
        if step.ended.is_set():
            return
        if self._thread is None or not self._thread.is_alive():
            raise HostUpdateError(
                f"the thread that updates parameters on the host has ended in the middle of "
                f"{step.what}; their optimizer state may be half updated: go back to a checkpoint"
            )
        if time.monotonic() - since > self._deadline_s:
            step.stopped = True
            raise DeadlineError(
                f"the update of {step.what} on the host has not ended in {self._deadline_s:g} s; "
                'raise deadline_s, or set host_updates to "never"'
            )


def _work(queue: "SimpleQueue[HostStep | None]") -> None:
    while (step := queue.get()) is not None:
        step.run(in_worker=True)
        del step  # not kept until the next one comes
