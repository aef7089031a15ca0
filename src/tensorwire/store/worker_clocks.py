"""Where a server's threads, one per worker, wait for each other."""

from __future__ import annotations

import threading
from collections.abc import Callable

from tensorwire.control import Member
from tensorwire.store.consensus import Finished, agreed
from tensorwire.store.step_header import StepOperation

_PATIENCE = 60.0  # between looks at the job while others compute


class WorkerClocks:
    """Which workers take part and how many steps each has taken; and a place where all set values together."""

    def __init__(self, member: Member, workers: int) -> None:
        self._member = member
        self._clocks = dict.fromkeys(range(workers), 0)  # of those that have not finished
        self._left: list[int] = []
        self._here: dict[int, StepOperation] = {}
        self._ended = 0
        self._changed = threading.Condition()

    @property
    def active(self) -> set[int]:
        """Who has not finished."""
        with self._changed:
            return set(self._clocks)

    def tick(self, worker: int, step: bool) -> None:
        """A worker has taken a step, if ``step``."""
        if step:
            with self._changed:
                self._clocks[worker] += 1
                self._changed.notify_all()

    def leave(self, worker: int) -> None:
        """A worker has finished."""
        with self._changed:
            del self._clocks[worker]
            self._left.append(worker)
            self._changed.notify_all()

    def ahead(self, worker: int) -> int:
        """By how many steps a worker is ahead of the slowest of the others, before its present one counts."""
        with self._changed:
            slowest = min((c for w, c in self._clocks.items() if w != worker), default=None)
            return -1 if slowest is None else self._clocks[worker] - slowest

    def wait_for_slowest(self, worker: int, bound: int) -> None:
        """Returns when the slowest worker is at most ``bound`` steps behind. Raises what ended the job."""
        self._wait(lambda: self._clocks[worker] - min(self._clocks.values()) <= bound)

    def enter(self, worker: int, operation: StepOperation) -> bool:
        """Waits for all others. True, for worker 0: do what is to be done, and then ``end()``. Others return after it.

        Raises `Finished` or `Disagreement`, or what ended the job.
        """
        with self._changed:
            self._here[worker] = operation
            ended = self._ended
            self._changed.notify_all()
        self._wait(lambda: bool(self._left) or self._ended > ended or (worker == 0 and self._all_here()))
        if self._ended > ended:
            return False
        if self._left:
            raise Finished(
                self._left[0],
                f"finished, and worker {worker} sets parameters or state, which all workers have to do together",
            )
        agreed(self._here, [], self._clocks[0])
        return True

    def _all_here(self) -> bool:
        return self._here.keys() == self._clocks.keys()

    def end(self) -> None:
        """What all waited for is done."""
        with self._changed:
            self._here = {}
            self._ended += 1
            self._changed.notify_all()

    def _wait(self, reached: Callable[[], bool]) -> None:
        while True:
            with self._changed:
                if self._changed.wait_for(reached, _PATIENCE):
                    return
            self._member.check()
