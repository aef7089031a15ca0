"""When worker 0 makes a version for readers, and what it says of it. Imports no framework."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Protocol

from tensorwire.store.versions.every import Every

_log = logging.getLogger("tensorwire")


class CutsVersions(Protocol):
    """A worker's end of a store of which there are versions."""

    @property
    def asked(self) -> int:
        """How often readers have asked for one."""

    def cut(self, run: int, step: int, *, wait: bool) -> int | None:
        """Worker 0: the present state becomes a version; as `StoreClient.cut`."""


class Publishing:
    """``client()``: of the store that has what is published. ``rank``: this worker's.

    Attributes:
        run: How often a checkpoint was loaded.
        steps: How many steps of the training are over.
        skipped: Versions that were left out, because readers held all buffers.
    """

    def __init__(self, rank: int, every: Every, client: Callable[[], CutsVersions]) -> None:
        self._rank, self._every, self._client = rank, every, client
        self._answered = 0  # requests of readers
        self.steps = 0
        self.run = 0
        self.skipped = 0

    @property
    def due(self) -> bool:
        """Whether a reader has asked for a version since this was made, or since the last one that was made for it."""
        return self._client().asked > self._answered

    def step(self) -> None:
        """A step is over."""
        self.steps += 1
        if self.due or (self._every.steps is not None and self.steps % self._every.steps == 0):
            self.publish()

    def publish(self) -> int | None:
        """The counter of the version that the present state becomes; None on other workers, and if it is left out."""
        if self._rank:
            return None
        client = self._client()
        asked = client.asked
        counter = client.cut(self.run, self.steps, wait=self._every.when_held == "wait")
        self._answered = asked
        if counter is None:
            self.skipped += 1
            if self.skipped == 1:
                _log.warning(
                    "no version of step %d for readers: they hold all %d snapshot buffers but the published one; "
                    "tw.store.Every(buffers=) makes more, when_held='wait' waits",
                    self.steps,
                    self._every.buffers,
                )
        return counter
