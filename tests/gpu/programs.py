"""Functions in processes of their own, which can fail, hang and be killed without harm to others.

The parent never touches the device, so that a fault there ends one part and no other. What children print goes to a
file, whose end says why one died without a word.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

_LEAVE_SECONDS = 10.0


class Failed(Exception):
    """A program came to nothing, and why in one line."""


class NotHere(Exception):
    """In a program: what it needs is not here, such as a library, or a device that the library takes."""


class Program:
    """``function(pipe, *args)`` in a new process, which leads a process group. Use `answer` there.

    Attributes:
        seconds: How long ``get`` waits at most.
    """

    def __init__(self, function: Callable[..., None], *args: Any, seconds: float) -> None:
        context = multiprocessing.get_context("spawn")
        self.seconds = seconds
        file, self._log = tempfile.mkstemp(prefix="tensorwire-gpu-")
        os.close(file)
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_begin, args=(theirs, self._log, function, args))
        self._process.start()
        theirs.close()

    def get(self, seconds: float | None = None) -> Any:
        """The next answer. Raises `Failed`."""
        limit = max(0.0, self.seconds if seconds is None else seconds)
        try:
            if not self._pipe.poll(limit):
                raise Failed(f"no answer within {limit:.0f} s")
            failed, value = self._pipe.recv()
        except (EOFError, ConnectionResetError):
            self._process.join(_LEAVE_SECONDS)
            raise Failed(f"it ended with status {self._process.exitcode}: {self._last_words()}") from None
        if failed:
            raise Failed(str(value))
        return value

    def ask(self, *request: Any) -> Any:
        """Sends a request, and returns the answer. Raises `Failed`."""
        try:
            self._pipe.send(request)
        except BrokenPipeError:
            pass  # why it is gone can still be read
        return self.get()

    def close(self, seconds: float = _LEAVE_SECONDS) -> None:
        """Ends it and all that it has started, after ``seconds`` in which it may leave by itself."""
        with contextlib.suppress(OSError):
            self._pipe.send(None)
        wait([self._process.sentinel], seconds)  # not join(): until then its number is not given to others
        assert self._process.pid is not None
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.kill()  # one that had not come to lead its group
        self._process.join()
        self._pipe.close()
        Path(self._log).unlink(missing_ok=True)

    def __enter__(self) -> Program:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close(_LEAVE_SECONDS if kind is None else 0.0)

    def _last_words(self) -> str:
        lines = [line for line in Path(self._log).read_text(errors="replace").splitlines() if line.strip()]
        return lines[-1].strip()[:300] if lines else "it printed nothing"


def answer(pipe: Connection, value: Any) -> None:
    """In a program: what the next ``get`` returns."""
    pipe.send((False, value))


def one_line(error: BaseException) -> str:
    """An error as a line; of one that stands for a traceback, the line that counts."""
    lines = [line for line in str(error).splitlines() if line.strip()]
    if isinstance(error, (NotHere, Failed)):
        return str(error)
    return f"{type(error).__name__}: {lines[0].strip()[:300] if lines else 'without a word'}"


def _begin(pipe: Connection, log: str, function: Callable[..., None], args: tuple[Any, ...]) -> None:
    os.setsid()
    threading.Thread(target=_end_with_parent, daemon=True).start()
    file = os.open(log, os.O_WRONLY | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    try:
        function(pipe, *args)
    except BaseException as error:
        traceback.print_exc()
        with contextlib.suppress(OSError):
            pipe.send((True, one_line(error)))
        sys.stderr.flush()
        os._exit(1)  # threads of a library may not end by themselves


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os.killpg(0, signal.SIGKILL)
