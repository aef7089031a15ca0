"""A server's threads, one for each worker: all modes but `Sync`."""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue

Ends = SimpleQueue[BaseException | None]  # how threads ended: what they raised, or None


def start_attended(name: str, call: Callable[[], None], ends: Ends) -> None:
    """Runs ``call`` in a thread of that name. How it ends is put into ``ends``."""
    threading.Thread(target=_run, args=(call, ends), name=name, daemon=True).start()


def _run(call: Callable[[], None], ends: Ends) -> None:
    try:
        call()
    except BaseException as error:
        ends.put(error)
    else:
        ends.put(None)
