"""Rounds that close some time after their quorum was there."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from queue import SimpleQueue


class Deadlines:
    """Calls ``close(bucket, version)`` in a thread, ``seconds`` after it was set. All have the same time to wait."""

    def __init__(self, seconds: float, close: Callable[[int, int], None]) -> None:
        self._seconds, self._close = seconds, close
        self._waiting: deque[tuple[float, int, int]] = deque()
        self._stopped = False
        self._changed = threading.Condition()

    def start(self, name: str, ends: SimpleQueue[BaseException | None]) -> None:
        """Starts the thread. What ``close`` raises is put into ``ends``."""
        threading.Thread(target=self._run, args=(ends,), name=name, daemon=True).start()

    def set(self, bucket: int, version: int) -> None:
        """From now on the round of a bucket after ``version`` has that long; set again, it is called again, later."""
        with self._changed:
            self._waiting.append((time.monotonic() + self._seconds, bucket, version))
            self._changed.notify_all()

    def stop(self) -> None:
        """Ends the thread."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()

    def _run(self, ends: SimpleQueue[BaseException | None]) -> None:
        try:
            while (found := self._next()) is not None:
                self._close(*found)
        except BaseException as error:
            ends.put(error)

    def _next(self) -> tuple[int, int] | None:
        with self._changed:
            while not self._stopped:
                if not self._waiting:
                    self._changed.wait()
                    continue
                at, bucket, version = self._waiting[0]
                left = at - time.monotonic()
                if left > 0:
                    self._changed.wait(left)
                    continue
                self._waiting.popleft()
                return bucket, version
        return None
