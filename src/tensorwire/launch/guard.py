"""Ends a launcher's processes when the launcher is gone, even if it was killed.

The guard is a process of its own that imports nothing of Tensorwire. The launcher names process groups on the guard's
standard input, one a line; ``done`` before the end of the input means that none is left. The guard ends only by that,
by the launcher's death or by SIGKILL: it ignores signals meant for the launcher.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys

_IGNORED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)


def main() -> None:
    """Reads until the launcher closes the pipe or dies."""
    for number in _IGNORED:
        signal.signal(number, signal.SIG_IGN)
    groups: list[int] = []
    for line in sys.stdin:
        if line == "done\n":
            return
        groups.append(int(line))
    if groups:
        with contextlib.suppress(OSError):
            cursor = "\x1b[?25h" if sys.stderr.isatty() else ""  # the launcher's table may have hidden it
            print(f"{cursor}tensorwire: the launcher was killed: its processes are ended", file=sys.stderr, flush=True)
    for group in groups:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(group, signal.SIGKILL)


if __name__ == "__main__":
    main()
