"""Marks messages to servers that may have left only in part, so that every later call refuses to continue.

The mark is set before the first word of a round or request leaves, and removed after the last. Any exception in
between, even one from a signal handler, leaves it in place: no code has to run for that.
"""

from __future__ import annotations

import contextlib

from tensorwire.control import Member
from tensorwire.errors import StepInterrupted, WaitTimeout


class Course:
    """The marks of one worker, for all stores that have to stay together: those of an optimizer, or of a `KeyValue`."""

    def __init__(self, member: Member) -> None:
        self._member = member
        self._begun: dict[str, None] = {}
        self._cause = ""

    def begin(self, what: str) -> None:
        """From now on ``what`` has begun, and `end` has to follow."""
        self._begun[what] = None

    def end(self, what: str) -> None:
        """All of it has left."""
        self._begun.pop(what, None)

    def unit(self, what: str) -> contextlib.AbstractContextManager[None]:
        """Around what leaves entirely or not at all; inside of another unit, it is a part of that."""
        return _PART if self._begun else _Unit(self, what)

    def note(self, error: BaseException | None) -> None:
        """``error`` ended a call: if it ended a unit, later calls name it."""
        if error is not None and self._begun and not self._cause and not isinstance(error, StepInterrupted):
            lines = str(error).splitlines()
            self._cause = f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__

    def follow(self, other: Course) -> None:
        """Where a unit of ``other`` was left, this one's later calls say so, too."""
        self._begun.update(other._begun)
        self._cause = self._cause or other._cause

    @property
    def broken(self) -> str:
        """Outside of a unit: what was left in the middle, and by what; empty: nothing was."""
        if not self._begun:
            return ""
        return f"{next(iter(self._begun))} was interrupted by {self._cause or 'an exception'}"

    def check(self) -> None:
        """Raises `StepInterrupted` where a unit was left, or why the job ended."""
        if broken := self.broken:
            self._member.check()
            raise StepInterrupted(
                f"{broken} when a part of it had left for the servers: its gradients must not be mixed with others, so "
                "end the job, and start it again from a checkpoint that was written before"
            )


class _Unit(contextlib.AbstractContextManager[None]):
    """A generator would take several times as long as all that this does."""

    def __init__(self, course: Course, what: str) -> None:
        self._course, self._what = course, what

    def __enter__(self) -> None:
        self._course.begin(self._what)

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None:
            self._course.end(self._what)
        else:
            self._course.note(error)


_PART = contextlib.nullcontext()


def last_request_waited(store: str, timeout: float) -> WaitTimeout:
    """The error where servers did not come to a worker's last request."""
    return WaitTimeout(
        f"the servers of {store} did not come to this worker's last request within {timeout:g} s "
        "(TENSORWIRE_TIMEOUT sets the limit)"
    )
