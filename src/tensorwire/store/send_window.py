"""The buckets to send to one server, the most urgent first.

A device sends in order; nothing overtakes an earlier write. So this window hands over only enough to keep the link
busy, and adds the most urgent of the rest as writes complete. Backward ends with the first layers, and the next forward
begins with them.
"""

from __future__ import annotations

import heapq
import itertools
import threading
from collections.abc import Callable
from functools import partial

from tensorwire.device import Completion
from tensorwire.errors import StepInterrupted, WaitTimeout

Send = Callable[[], Completion]
# While so many bytes are under way, the rest waits: 7 ms at 10 Gbit/s, longer than it takes to come round to the next.
AHEAD = 8 << 20


class SendWindow:
    """Any thread may call. What has to wait is sent by a thread of the device."""

    def __init__(self, ahead: int | None = None) -> None:
        self._ahead = AHEAD if ahead is None else ahead
        self._waiting: list[tuple[tuple[int, int], int, int, Send]] = []
        self._numbers = itertools.count()
        self._under_way = 0
        self._error: BaseException | None = None
        self._lock = threading.Lock()  # taken by itself: an interrupt cannot leave it locked, as it could a Condition
        self._changed = threading.Condition(self._lock)

    def submit(self, urgency: tuple[int, int], nbytes: int, send: Send) -> None:
        """Calls ``send()``, now or in its turn: smaller ``urgency`` first. Raises what an earlier one raised."""
        with self._lock:
            self._check()
            heapq.heappush(self._waiting, (urgency, next(self._numbers), nbytes, send))
        self._go_on()

    def flush(self, timeout: float) -> None:
        """Returns when everything has arrived. Raises what a ``send()`` raised, or `WaitTimeout`."""
        with self._lock:
            if not self._changed.wait_for(self._at_rest, timeout):
                raise WaitTimeout(f"gradients did not reach their server within {timeout:g} s")
            self._check()

    @property
    def error(self) -> BaseException | None:
        """What a ``send()`` raised, or a transfer, if one did."""
        return self._error

    @property
    def empty(self) -> bool:
        """Whether all has arrived that was sent here, and nothing failed."""
        return not (self._waiting or self._under_way or self._error)

    def _at_rest(self) -> bool:
        return self._error is not None or not (self._waiting or self._under_way)

    def _check(self) -> None:
        if self._error is not None:
            raise self._error

    def _go_on(self) -> None:
        """Sends as much as may be under way. Errors are kept: this may run in a thread of the device."""
        while (found := self._next()) is not None:
            nbytes, send = found
            try:
                completion = send()
            except BaseException as error:
                self._fail(error)
                return
            if completion.done:
                self._arrived(nbytes, completion)  # not by a callback in this very thread, which would send in its turn
            else:
                completion.on_done(partial(self._come, nbytes))

    def _next(self) -> tuple[int, Send] | None:
        with self._lock:
            if not self._waiting or self._under_way >= self._ahead:
                return None
            _, _, nbytes, send = heapq.heappop(self._waiting)
            self._under_way += nbytes
            return nbytes, send

    def _arrived(self, nbytes: int, completion: Completion) -> None:
        try:
            completion.wait(0.0)
        except BaseException as error:
            self._fail(error)
        finally:
            with self._lock:
                self._under_way -= nbytes
                self._changed.notify_all()

    def _fail(self, error: BaseException) -> None:
        """Keeps ``error`` for later calls. What interrupts this thread is raised here, and no later call."""
        kept: BaseException = error
        if not isinstance(error, Exception):
            what = f"sending was interrupted by {type(error).__name__}"
            kept = StepInterrupted(f"{what}: end the job, and start it again from a checkpoint")
        with self._lock:
            self._error = self._error or kept
            self._waiting.clear()
            self._changed.notify_all()
        if kept is not error:
            raise error

    def _come(self, nbytes: int, completion: Completion) -> None:
        self._arrived(nbytes, completion)
        self._go_on()
