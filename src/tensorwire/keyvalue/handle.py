"""The handles that `KeyValue` calls return, and the lock that separates its threads."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Sequence
from typing import Any, Protocol

from tensorwire.errors import ArgumentError, TensorwireError
from tensorwire.keyvalue.key_arguments import number
from tensorwire.launch.worker import Worker
from tensorwire.store.course import Course
from tensorwire.store.request_client import RequestClient


class BegunPush(Protocol):
    """A push that has begun, of one key."""

    @property
    def applied(self) -> bool:
        """Whether servers have applied it."""

    def wait_for_push(self, timeout: float | None) -> None:
        """Returns when they have."""


class BegunPull(Protocol):
    """A pull that has begun, of one key. ``result``: the value, once it is finished."""

    result: Any

    @property
    def ready(self) -> bool:
        """Whether ``finish`` would return at once."""

    def wait_for_answer(self, timeout: float | None) -> None:
        """Returns when the answer has begun to come. Changes nothing, so that any thread may wait."""

    def finish(self, timeout: float | None) -> None:
        """Waits for the value, and takes it. Idempotent."""


class Calls:
    """Inside it, one thread at a time, and errors say why the job ended.

    Nobody gets in where they are ``closed``, or after a call that was interrupted when a part of it had left:
    ``course`` knows.
    """

    def __init__(self, worker: Worker) -> None:
        self._worker, self.closed = worker, False
        self.course = Course(worker.member)
        self.lock = threading.RLock()

    def check(self) -> None:
        """Raises `ArgumentError` where they are closed."""
        if self.closed:
            raise ArgumentError("these keys were closed: the servers have them no more")

    def __enter__(self) -> None:
        self.check()
        self.lock.acquire()
        try:
            self.course.check()
        except BaseException:
            self.lock.release()
            raise

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self.course.note(error)
        self.lock.release()
        self.explain(error)

    def check_waiting(self) -> None:
        """As entering, for a thread that only waits: others may call meanwhile."""
        self.check()
        if self.lock.acquire(blocking=False):  # otherwise a call is on its way, which is none that was interrupted
            try:
                self.course.check()  # what an interrupted call has not sent has no answer
            finally:
                self.lock.release()

    def explain(self, error: BaseException | None) -> None:
        """Raises what ``error`` means, if it is one of ours."""
        if isinstance(error, TensorwireError):
            raise self._worker.member.explain(error) from None


def finish_all(lock: contextlib.AbstractContextManager[object], clients: Sequence[RequestClient]) -> None:
    """This worker is done with these stores. ``lock``: another thread may be in the middle of a call."""
    with lock:
        there = [client for client in clients if client.step >= 0]  # a call after that has nothing to be interrupted
        for client in there:
            client.course.check()
        for client in there:
            client.finish()


class Handle:
    """A call of `KeyValue` that has begun."""

    def __init__(
        self,
        calls: Calls,
        pulls: Sequence[BegunPull],
        pushes: Sequence[BegunPush],
        single: bool,
    ) -> None:
        self._calls, self._pulls, self._single = calls, pulls, single
        self._pushes = pushes

    @property
    def done(self) -> bool:
        """Whether ``wait()`` would return at once."""
        with self._calls.lock:
            return all(entry.applied for entry in self._pushes) and all(p.ready for p in self._pulls)

    def wait(self, timeout: float | None = None) -> Any:
        """Returns when the call is complete.

        Args:
            timeout: Seconds to wait for each answer. None: those of ``TENSORWIRE_TIMEOUT``.

        Returns:
            Of a pull: the value, or the list of values, of its keys. Of a push: None.

        Raises:
            ArgumentError: ``timeout`` is no number of seconds.
            WaitTimeout: The servers did not answer in time, because another worker has not pushed; one may wait again.
            JobEnded: The job ended; the message says why.
        """
        if timeout is not None and not number("timeout", timeout) >= 0:
            raise ArgumentError(f"timeout must be a number of seconds, 0 or more, not {timeout!r}")
        self._calls.check_waiting()
        try:
            for entry in self._pushes:
                entry.wait_for_push(timeout)
            for pull in self._pulls:
                pull.wait_for_answer(timeout)
        except TensorwireError as error:
            self._calls.explain(error)
        if not self._pulls:
            return None
        with self._calls:
            for pull in self._pulls:
                pull.finish(timeout)
        results = [pull.result for pull in self._pulls]
        return results[0] if self._single else results
