"""A server's threads, one for each worker: all modes but `Sync`."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from queue import SimpleQueue

Ends = SimpleQueue[BaseException | None]  # how threads ended: what they raised, or None


def attend(calls: Mapping[str, Callable[[], None]], ends: Ends | None = None) -> None:
    """Runs each call in a thread of the name that it has, and returns when all have ended.

    ``ends``: where other threads report what they raise, too. Raises the first error.
    """
    ended: Ends = SimpleQueue() if ends is None else ends
    for name, call in calls.items():
        threading.Thread(target=_run, args=(call, ended), name=name, daemon=True).start()
    for _ in calls:
        error = ended.get()
        if error is not None:
            raise error


def _run(call: Callable[[], None], ends: Ends) -> None:
    try:
        call()
    except BaseException as error:
        ends.put(error)
    else:
        ends.put(None)
