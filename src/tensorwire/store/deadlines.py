"""Rounds that close some time after reaching their quorum."""

from __future__ import annotations

import heapq
import threading
import time
from collections.abc import Callable
from queue import SimpleQueue


class Deadlines:
    """Calls ``close(bucket, version)`` in a thread, at the time that was set."""

    def __init__(self, close: Callable[[int, int], None]) -> None:
        self._close = close
        self._waiting: list[tuple[float, int, int]] = []  # a heap
        self._stopped = False
        self._changed = threading.Condition()

    def start(self, name: str, ends: SimpleQueue[BaseException | None]) -> None:
        """Starts the thread. What ``close`` raises is put into ``ends``."""
        threading.Thread(target=self._run, args=(ends,), name=name, daemon=True).start()

    def set(self, at: float, bucket: int, version: int) -> None:
        """The round of a bucket after ``version`` closes at that time of the monotonic clock; the earliest counts."""
        with self._changed:
            heapq.heappush(self._waiting, (at, bucket, version))
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
                heapq.heappop(self._waiting)
                return bucket, version
        return None
