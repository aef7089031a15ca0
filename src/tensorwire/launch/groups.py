"""The process groups of a launcher's children: a worker and its own children end together."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from tensorwire.launch import guard

# How long the guard may take to leave when it is asked to, before it is killed: it may have been stopped.
_GUARD_SECONDS = 2.0


class Guard:
    """The process that outlives a killed launcher for a moment, to end its children.

    Args:
        gone: Called from a thread, with the status as ``Popen.returncode`` has it, if the guard ends before `close`.
    """

    def __init__(self, gone: Callable[[int], None]) -> None:
        command = [sys.executable, "-I", "-S", str(Path(guard.__file__))]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, start_new_session=True, bufsize=0
        )
        assert self._process.stdin is not None
        os.set_blocking(self._process.stdin.fileno(), False)
        self._gone = gone
        self._closing = False
        self._thread = threading.Thread(target=self._watch, name="tensorwire-guard", daemon=True)
        self._thread.start()

    def add(self, group: int) -> None:
        """``group`` is to end with the launcher."""
        self._send(f"{group}\n")

    def remove(self, folder: Path) -> None:
        """``folder`` is not to outlive the launcher."""
        self._send(f"remove {folder}\n")

    def close(self) -> None:
        """All groups have ended. Idempotent."""
        if self._closing:
            return
        self._closing = True
        self._send("done\n")
        self._thread.join(_GUARD_SECONDS)
        if self._thread.is_alive():
            self._process.kill()
            self._thread.join()
        assert self._process.stdin is not None
        self._process.stdin.close()

    def _watch(self) -> None:
        status = self._process.wait()
        if not self._closing:
            self._gone(status)

    def _send(self, line: str) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):  # it has been killed, or it is stopped and its pipe is full
            self._process.stdin.write(line.encode())


def signal_groups(groups: Iterable[int], number: int) -> None:
    """Sends a signal to the processes left in the groups."""
    for group in groups:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(group, number)


def end_groups(groups: Iterable[int], seconds: float, idle: Callable[[float], None] = time.sleep) -> None:
    """SIGTERM, and after ``seconds`` SIGKILL, to all groups; returns when they are empty.

    A leader that died before leaves its group behind: data loaders, shells, whatever it started. ``idle`` passes time.
    """
    groups = list(groups)
    signal_groups(groups, signal.SIGTERM)
    signal_groups(groups, signal.SIGCONT)  # a stopped process takes SIGTERM when it goes on
    if not _empty(groups, seconds, idle):
        signal_groups(groups, signal.SIGKILL)
        _empty(groups, 2.0, idle)


def _empty(groups: list[int], seconds: float, idle: Callable[[float], None]) -> bool:
    end = time.monotonic() + seconds
    while any(_alive(g) for g in groups):
        if time.monotonic() > end:
            return False
        idle(0.02)  # there is no notice of the end of a group that is not our child
    return True


def _alive(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
