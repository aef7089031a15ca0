"""Where a server's threads, one per worker, wait for each other."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable

from tensorwire.control import Member
from tensorwire.store.consensus import Disagreement, Finished, agreed
from tensorwire.store.rounds import Members, is_complete, may_read, slowest
from tensorwire.store.step_header import StepOperation

_PATIENCE = 60.0  # between looks at the job while others compute


class WorkerClocks:
    """Which workers take part and how many steps each has taken; and a place where all set values together."""

    def __init__(self, member: Member, ranks: Iterable[int]) -> None:
        self._member = member
        self.members = Members(
            frozenset(ranks), least=member.membership.least
        )  # changed as a whole: it may be read at any time
        self._clocks = dict.fromkeys(self.members.active, 0)
        self._here: dict[int, StepOperation] = {}
        self._ended = 0
        self._changed = threading.Condition()

    def tick(self, worker: int, step: bool) -> None:
        """A worker has taken a step, if ``step``."""
        if step:
            with self._changed:
                self._clocks[worker] += 1
                self._changed.notify_all()

    def leave(self, worker: int) -> None:
        """A worker has finished."""
        with self._changed:
            self.members = self.members.finish(worker)
            self._changed.notify_all()

    def has(self, worker: int) -> bool:
        """Whether rounds wait for a worker."""
        return worker in self.members.active

    def slowest(self) -> int:
        """How many steps the slowest of those has taken for whom rounds wait; where there is nobody, of all."""
        return slowest(self.members, self._clocks, min(self._clocks.values()))

    def join(self, worker: int) -> None:
        """A worker takes part, as far as the slowest of the others."""
        with self._changed:
            self._clocks[worker] = self.slowest()
            self.members = self.members.join(worker)
            self._changed.notify_all()

    def lose(self, worker: int) -> None:
        """A worker is lost. Raises `Disagreement` while all set values or state, or before they have done so."""
        with self._changed:
            self.members = self.members.lose(worker)
            self._changed.notify_all()
            self._here.pop(worker, None)
            if self._here or not self._ended:
                raise Disagreement(worker, "was lost before all had the same parameters and state")

    def may_read(self, worker: int, bound: int) -> bool:
        """Whether a worker may have present values, after the step that it takes now."""
        with self._changed:
            return may_read(self.members, self._clocks, worker, self._clocks[worker] + 1, bound)

    def wait_for_slowest(self, worker: int, bound: int) -> None:
        """Returns when a worker may have present values, after its last step. Raises what ended the job."""
        self._wait(lambda: may_read(self.members, self._clocks, worker, self._clocks[worker], bound))

    def enter(self, worker: int, operation: StepOperation) -> bool:
        """Waits for all others. True, for their leader: do what is to be done, and then ``end()``; others return after
        that.

        Raises `Finished` or `Disagreement`, or what ended the job.
        """
        with self._changed:
            self._here[worker] = operation
            ended = self._ended
            self._changed.notify_all()
        alone = not self._member.membership.survives
        self._wait(lambda: (alone and bool(self.members.finished)) or self._ended > ended or self._leads(worker))
        if self._ended > ended:
            return False
        if self.members.finished and alone:
            raise Finished(
                min(self.members.finished),
                f"finished, and worker {worker} sets parameters or state, which all workers have to do together",
            )
        agreed(self._here, [], self._clocks[worker])
        return True

    def _leads(self, worker: int) -> bool:
        return worker == self.members.leader and is_complete(self.members, self._here.__contains__)

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
