"""A training of about so many seconds, in which workers that wait for each other take the same number of steps.

Those go in step, so that they can agree on a number, but not each look at its own clock. Others do look at it.
Worker 0 measures the first steps and says at which step it will know better; there, with two thirds done, it says
which step is the last. That is two requests to the coordinator; from then on the job needs none.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from typing import TypeVar

from tensorwire import Job
from tensorwire.observe import Counters, counters

Batch = TypeVar("Batch")
# The steps before are slower: memory is touched for the first time.
FIRST_MEASURED, FIRST_MEETING = 2, 6


class Pace:
    """Hands out batches until the time is over, and measures.

    ``together``: all workers take the same number of steps. ``steps``: taken so far. ``total``: the last step, None
    while it is not known. ``steady``: what this process counted in the ``steady_steps`` steps of about the last third.
    """

    def __init__(self, job: Job, seconds: float, *, together: bool) -> None:
        self._job, self._seconds, self._together = job, seconds, together
        self._began = self._measured = time.monotonic()
        self._now = self._began
        self._meeting = FIRST_MEETING
        self._meetings = 0
        self.steps = 0
        self.total: int | None = None
        self.steady = Counters()
        self.steady_steps = 0

    def over(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """As many of ``batches`` as there is time for; a step is what the caller does with one."""
        self._began = self._measured = time.monotonic()
        before = counters.snapshot()
        for batch in batches:
            yield batch
            self.steps += 1
            self._now = time.monotonic()
            if self.steps == FIRST_MEASURED:
                self._measured = self._now
            if self.steps == self._meeting:
                self._look_ahead()
                before = counters.snapshot()
            if self.steps == self.total:
                break
        self.steady, self.steady_steps = counters.since(before), self.steps - self._meeting

    @property
    def seconds(self) -> float:
        """How long the training has taken so far."""
        return self._now - self._began

    @property
    def steps_a_second(self) -> float:
        """The mean without the first steps (of those, as long as there are no others)."""
        if self.steps > FIRST_MEASURED:
            return (self.steps - FIRST_MEASURED) / (self._now - self._measured)
        return self.steps / (self._now - self._began) if self.steps else 0.0

    @property
    def seconds_left(self) -> float:
        """By the clock until the number of steps is agreed, then by the steps that are left."""
        if self.total is None:
            return max(0.0, self._seconds - self.seconds)
        return (self.total - self.steps) / self.steps_a_second

    def _look_ahead(self) -> None:
        """To the step at which to look again, or to the last one: together, all learn of it from worker 0."""
        self._meetings += 1
        left = max(2, int((self._seconds - self.seconds) * self.steps_a_second))
        if self._meetings == 2:  # where the machine has become slower, there are still steps to count in
            left = max(left, self.steps // 4)
        there = self.steps + (2 * left // 3 if self._meetings == 1 else left)
        if self._together:
            there = self._job.broadcast(there)
        if self._meetings == 1:
            self._meeting = there
        else:
            self.total = there
