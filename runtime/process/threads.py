"""Threads, or an error that says why there is none."""

import threading

from teraplan.errors import ThreadLimitError


def start_thread(thread: threading.Thread) -> None:
    """Start it.

    Raises:
        ThreadLimitError: the process may have no more.
    """
    try:
        thread.start()
    except RuntimeError as error:
        raise ThreadLimitError(
            f"the thread {thread.name} cannot be started beside {threading.active_count()} others: "
            f"{error}; raise the limit of processes (ulimit -u), or that of the container (pids)"
        ) from None
