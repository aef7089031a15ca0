"""Ends a launcher's processes when the launcher is gone, even if it was killed.

The guard is a process of its own that imports nothing of Tensorwire. The launcher names process groups on the guard's
standard input, one a line, or by ``remove PATH`` a folder that is not to outlive the job; ``done`` before the end of
the input means that nothing is left. The guard ends only by that, by the launcher's death or by SIGKILL: it ignores
signals meant for the launcher.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys

_IGNORED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)

_REMOVE = "remove "


def main() -> None:
    """Reads until the launcher closes the pipe or dies."""
    for number in _IGNORED:
        signal.signal(number, signal.SIG_IGN)
    groups: list[int] = []
    folders: list[str] = []
    for line in sys.stdin:
        if line == "done\n":
            return
        if line.startswith(_REMOVE):
            folders.append(line.removeprefix(_REMOVE).rstrip("\n"))
        else:
            groups.append(int(line))
    if groups:
        with contextlib.suppress(OSError):
            cursor = "\x1b[?25h" if sys.stderr.isatty() else ""  # the launcher's table may have hidden it
            print(f"{cursor}tensorwire: the launcher was killed: its processes are ended", file=sys.stderr, flush=True)
    for group in groups:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(group, signal.SIGKILL)
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
