"""Points in a step at which tests make a process fail.

A ``worker`` has ``headed`` its step for all shards, ``pushed`` a bucket, or ``answered_some``: has got the new version
of one. The ``primary`` of a shard, its server, has ``reduced`` the pushes of a bucket, ``applied`` the update, or
``published_some``: told one worker of the new version.

Without a listener, a point costs one comparison: ``failpoints.listener is not None``.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

# Called with the role, its index, the step, and the state that the step has reached; it may raise.
listener: Callable[[str, int, int, str], object] | None = None


def reach(role: str, index: int, step: int, state: str) -> None:
    """Worker or shard ``index`` has reached a ``state`` of its step, or of the update of that number."""
    if listener is not None:
        listener(role, index, step, state)


def fail_at(role: str, index: int, step: int, state: str, error: BaseException | None = None) -> None:
    """Raises ``error`` once, the first time that the place is reached; None: kills this process there."""

    def fail(*place: object) -> None:
        global listener
        if place != (role, index, step, state):
            return
        if error is None:
            os.kill(os.getpid(), signal.SIGKILL)
        else:
            listener = None
            raise error

    global listener
    listener = fail
