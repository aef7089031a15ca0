"""Named time ranges for a framework's own profiler, where users already look.

The store marks its phases, and an adapter passes the marks on. Without an adapter they cost next to nothing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager

PUSH = "tensorwire.push"
WAIT = "tensorwire.wait"

Opener = Callable[[str], AbstractContextManager[object]]

_nothing: AbstractContextManager[object] = contextlib.nullcontext()


def _ignore(name: str) -> AbstractContextManager[object]:
    return _nothing


_open: Opener = _ignore


def named(name: str) -> AbstractContextManager[object]:
    """``with named(PUSH):`` is one stretch."""
    return _open(name)


def shown_by(opener: Opener | None) -> None:
    """From now on stretches are ``opener(name)``, in this process; None: they are nothing again."""
    global _open
    _open = _ignore if opener is None else opener
