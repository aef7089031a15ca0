"""Shows a step's pushing and waiting in torch.profiler, as ``tensorwire.push`` and ``tensorwire.wait``."""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager

from torch.autograd import profiler

from tensorwire.observe import ranges

_nothing: AbstractContextManager[object] = contextlib.nullcontext()


def _open(name: str) -> AbstractContextManager[object]:
    # record_function costs microseconds even where nobody profiles.
    return profiler.record_function(name) if profiler._is_profiler_enabled else _nothing


def show_ranges() -> None:
    """Makes the profiler's ranges of ours, in this process."""
    ranges.shown_by(_open)
