"""An optimizer's versions for readers: when worker 0 makes a cut, and what it says of it."""

from __future__ import annotations

import logging
from collections.abc import Callable

from tensorwire.launch import Worker
from tensorwire.store.store_client import StoreClient
from tensorwire.store.versions.every import Every

_log = logging.getLogger("tensorwire")


class Publishing:
    """``client()``: of the only store that the optimizer's parameters are in.

    Attributes:
        run: How often a checkpoint was loaded.
        skipped: Versions that were left out, because readers held all buffers.
    """

    def __init__(self, worker: Worker, every: Every, client: Callable[[], StoreClient]) -> None:
        self._worker, self._every, self._client = worker, every, client
        self._steps = 0
        self._answered = 0  # requests of readers
        self.run = 0
        self.skipped = 0

    def step(self) -> None:
        """A step is over."""
        self._steps += 1
        asked = self._client().asked
        if asked > self._answered or (self._every.steps is not None and self._steps % self._every.steps == 0):
            self._answered = asked
            self.publish()

    def publish(self) -> int | None:
        """The counter of the version that the present state becomes; None on other workers, and if it is left out."""
        if self._worker.rank:
            return None
        counter = self._client().cut(self.run, self._steps, wait=self._every.when_held == "wait")
        if counter is None:
            self.skipped += 1
            if self.skipped == 1:
                _log.warning(
                    "no version of step %d for readers: they hold all %d snapshot buffers but the published one; "
                    "tw.store.Every(buffers=) makes more, when_held='wait' waits",
                    self._steps,
                    self._every.buffers,
                )
        return counter
