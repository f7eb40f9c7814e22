"""SIGUSR1 prints what is going on, unless the program has another use for it."""

import faulthandler
import os
import signal
import threading
from collections.abc import Callable
from types import FrameType


def dump_on_signal(describe: Callable[[], str]) -> None:
    """From now on SIGUSR1 writes `describe()` and all threads' stacks to standard error.

    Nothing is changed where somebody handles the signal, or ignores it, already: job schedulers
    use it to tell of an end that is near. It would end the process otherwise.
    """
    if threading.current_thread() is not threading.main_thread():
        return
    if signal.getsignal(signal.SIGUSR1) is not signal.SIG_DFL:
        return

    def handle(number: int, frame: FrameType | None) -> None:
        # Not `print`: the signal may have come in the middle of one.
        os.write(2, f"{describe()}\n".encode())
        faulthandler.dump_traceback(file=2, all_threads=True)

    signal.signal(signal.SIGUSR1, handle)
