"""Calls that are interrupted at any line of the package."""

from __future__ import annotations

import sys
from collections.abc import Callable
from linecache import getline
from pathlib import Path
from types import FrameType
from typing import Any

import tensorwire as tw

_PACKAGE = str(Path(tw.__file__).parent)


def interrupt_at(call: Callable[[], object], line: int, *, also: str = _PACKAGE) -> int:
    """Counts the lines of the package that ``call()`` runs, and raises `KeyboardInterrupt` before that ``line``.

    ``also``: a file or a folder whose lines count, too.

    Before the next one, if it is that of a ``with``: at its end, where Python handles no signal, that would leave a
    lock locked.
    """
    ran, due = 0, line > 0

    def trace(frame: FrameType, event: str, _: object) -> Any:
        nonlocal ran, due
        if event == "line":
            ran += 1
            text = getline(frame.f_code.co_filename, frame.f_lineno).strip()
            if due and ran >= line and not text.startswith("with "):
                due = False
                raise KeyboardInterrupt
        return trace if frame.f_code.co_filename.startswith((_PACKAGE, also)) else None

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
    return ran
