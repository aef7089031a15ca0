"""Restricts an optimizer to one thread at a time: its steps are rounds in one order."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterator

from tensorwire.errors import ArgumentError
from tensorwire.store.course import Course


class Alone:
    """Who is inside keeps other threads out, by an error and not by waiting: their order would be another each time.

    No call begins where an earlier one broke ``course``; ``go_on()`` does what an earlier one left to be done.
    """

    def __init__(self, course: Course, go_on: Callable[[], None]) -> None:
        self._course = course
        self._go_on = weakref.WeakMethod(go_on)  # hooks must not keep the optimizer
        self._lock = threading.RLock()
        self._inside = ""  # the call that is inside; empty for a hook
        self.closed = False

    def check(self) -> None:
        """Raises `ArgumentError` for an optimizer that was closed."""
        if self.closed:
            raise ArgumentError(
                "this optimizer was closed, and its parameters are ordinary tensors: construct another one to go on"
            )

    @contextlib.contextmanager
    def calling(self, what: str) -> Iterator[None]:
        """Around a method that users call. Raises `ArgumentError` where another thread is inside, or as `check`."""
        self.check()
        if not self._lock.acquire(blocking=False):
            raise _refusal(what, self._inside or "backward()")
        before, self._inside = self._inside, self._inside or what
        try:
            self.go_on()
            yield
        except BaseException as error:
            self._course.note(error)
            raise
        finally:
            self._inside = before
            self._lock.release()

    @contextlib.contextmanager
    def hook(self) -> Iterator[None]:
        """Around what backward calls: several backward passes take turns, but none goes on beside a call."""
        if not self._lock.acquire(blocking=False):
            if inside := self._inside:
                raise _refusal("backward()", inside)
            self._lock.acquire()
        try:
            yield
        except BaseException as error:
            self._course.note(error)
            raise
        finally:
            self._lock.release()

    def go_on_if_free(self) -> None:
        """`go_on`, unless another thread is inside: then nothing was interrupted."""
        if self._lock.acquire(blocking=False):
            try:
                self.go_on()
            finally:
                self._lock.release()

    def go_on(self) -> None:
        """Before a call or a hook does anything. Raises `StepInterrupted`, or what comes of the waiting."""
        self._course.check()
        go_on = self._go_on()
        if go_on is not None:
            go_on()


def _refusal(what: str, inside: str) -> ArgumentError:
    return ArgumentError(
        f"{what} was called while another thread is in {inside} of this optimizer: call its methods from one thread, "
        "or hold a threading.Lock of your own around backward() and step()"
    )
