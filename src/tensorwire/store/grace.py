"""How long a round stays open for more workers than its quorum."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from tensorwire.store.modes import DiLoCo, OwnClock


class Grace:
    """So many ``seconds`` from the quorum on."""

    def __init__(self, seconds: float, now: Callable[[], float] = time.monotonic) -> None:
        self._seconds, self._now = seconds, now

    def contributed(self, bucket: int, worker: int) -> None:
        """A worker's push of a bucket has come."""

    def updated(self, bucket: int, seconds: float) -> None:
        """So long did it take from closing a bucket's round to answering the last worker."""

    def deadline(self, bucket: int, workers: Sequence[int]) -> float:
        """When a round that now has its quorum, from ``workers``, is to close, by the clock ``now``."""
        return self._now() + self._seconds


class AdaptiveGrace(Grace):
    """As long as waiting costs those who have come nothing: until the first of them needs its answer.

    A worker needs it ``delay`` steps after it has sent. How long its steps take is seen from the time between its last
    two pushes of a bucket, which are ``every`` steps apart; before its second one nothing is known, and nobody waits.

    Source: Decoupled DiLoCo, arXiv 2604.21428.
    """

    def __init__(self, delay: int, every: int, now: Callable[[], float] = time.monotonic) -> None:
        super().__init__(0.0, now)
        self._steps = delay / every  # how much of the time between two pushes an answer may take
        self._sent: dict[tuple[int, int], float] = {}  # by bucket and worker
        self._needed: dict[tuple[int, int], float] = {}
        self._took: dict[int, float] = {}

    def contributed(self, bucket: int, worker: int) -> None:
        place, now = (bucket, worker), self._now()
        self._needed[place] = now + self._steps * (now - self._sent.get(place, now))
        self._sent[place] = now

    def updated(self, bucket: int, seconds: float) -> None:
        self._took[bucket] = seconds

    def deadline(self, bucket: int, workers: Sequence[int]) -> float:
        return min(self._needed[bucket, worker] for worker in workers) - self._took.get(bucket, 0.0)


def grace_of(mode: OwnClock) -> Grace | None:
    """The grace of a mode's rounds; None where they close with their quorum."""
    if not isinstance(mode, DiLoCo) or not mode.grace:
        return None
    if not isinstance(mode.grace, str):
        return Grace(mode.grace)
    return AdaptiveGrace(mode.delay, mode.every) if mode.delay else None
