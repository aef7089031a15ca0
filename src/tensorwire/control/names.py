"""The names of processes in messages, shared by the coordinator and the members, which do not import it."""

from __future__ import annotations

import signal

# What a control connection authenticates for.
PURPOSE = b"control"

# The role of processes that look at a job without being part of it: nobody waits for them or misses them.
READER = "reader"
MOST_READERS = 1 << 20
STATS = "stats"  # what every member answers: what it has done so far
READER_LEFT = "reader left"  # what servers are told by the coordinator in the name of one that is gone

# Who notices first that a process ended without leaving, its connection or its leash, says it in the same words.
GONE = "is gone: its connection closed without a word"


def member_name(role: str, index: int) -> str:
    """``worker 0``: how messages name a process."""
    return f"{role} {index}"


def describe_exit(status: int) -> str:
    """What a launcher says of a process that is gone; ``status`` as in ``Popen.returncode``."""
    if status < 0:
        try:
            return f"was killed by {signal.Signals(-status).name}"
        except ValueError:
            return f"was killed by signal {-status}"
    return f"exited with status {status}"
