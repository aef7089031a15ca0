"""``sys.excepthook`` in a worker: an exception that ends the script ends the job, and is printed once."""

from __future__ import annotations

import contextlib
import sys
from types import TracebackType
from typing import TYPE_CHECKING

from tensorwire.errors import JobEnded
from tensorwire.launch.place import Place

if TYPE_CHECKING:
    from tensorwire.launch.worker import Worker


class ExceptHook:
    """Takes the place of ``sys.excepthook``, and calls the one before for what the launcher does not print.

    Attributes:
        worker: Set once this process has joined the job.
        refusal: Why a worker of ``tensorwire run`` could not join.
    """

    def __init__(self, place: Place) -> None:
        self.worker: Worker | None = None
        self.refusal: BaseException | None = None
        self._place = place
        self._previous = sys.excepthook
        sys.excepthook = self

    def __call__(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if error is self.refusal:  # a traceback would only show where the script calls init()
            _write_line(f"worker {self._place.rank} could not join the job: {error}")
            return
        printed = self.worker.fail(error) if self.worker is not None else False
        if not _is_consequence(error):
            if not printed:
                self._previous(kind, error, trace)
        elif self.worker is not None:
            self.worker.print_end(error)
        elif self._place.starter != "run":  # the job failed before this worker had joined
            print_end(f"worker {self._place.rank}", error)

    def remove(self) -> None:
        """Puts the hook before this one back, unless another one has replaced this one since."""
        if sys.excepthook is self:
            sys.excepthook = self._previous


def print_end(name: str, why: object) -> None:
    """Prints one line about how the job ended for the process ``name``."""
    _write_line(f"{name}: the job ended: {why}")


def _write_line(text: str) -> None:
    with contextlib.suppress(OSError, ValueError):
        sys.stderr.write(f"tensorwire: {text}\n")
        sys.stderr.flush()


def _is_consequence(error: BaseException | None) -> bool:
    """Whether ``error`` is the job's end, or was raised while that was handled."""
    while error is not None:
        if isinstance(error, JobEnded):
            return True
        error = error.__cause__ or error.__context__
    return False
