"""Who is in a job: one value, whose number is the epoch. Pure code, without threads, clocks and connections.

The coordinator owns it: what it learns of a process is evidence, from which one membership follows the other. Everybody
else gets it as it is, and acts on that alone, never on a suspicion of its own.

A job that does not ``survive`` ends with its first loss, and has one membership only.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from tensorwire.control.settings import MOST_MEMBERS
from tensorwire.sizes import counted

Rank = Annotated[int, msgspec.Meta(ge=0, lt=MOST_MEMBERS)]
Number = Annotated[int, msgspec.Meta(ge=0, le=2**53)]


class Lost(msgspec.Struct, frozen=True, array_like=True):
    """How a worker was lost: ``what`` happened to the process that was its ``incarnation``-th, from 0.

    ``left``: it said so itself.
    """

    incarnation: Number
    what: str
    left: bool = False


class Membership(msgspec.Struct, frozen=True):
    """The ``workers`` that are in, by rank: which incarnation. ``lost``: those that were, by rank.

    ``least``: with fewer workers the job does not go on; 0: it ends with the first loss.
    """

    epoch: Number
    least: Number
    workers: dict[Rank, Number]
    lost: dict[Rank, Lost] = {}

    @classmethod
    def first(cls, workers: int, least: int = 0) -> Membership:
        """Those that a job begins with."""
        return cls(0, least, dict.fromkeys(range(workers), 0))

    @property
    def survives(self) -> bool:
        """Whether the job may go on without a worker."""
        return self.least > 0

    @property
    def leader(self) -> int:
        """The lowest rank: whose word counts where one has to say what holds for all."""
        return min(self.workers, default=0)

    @property
    def enough(self) -> bool:
        """Whether there are workers to go on with."""
        return len(self.workers) >= self.least

    def lose(self, rank: int, what: str, *, left: bool = False) -> Membership:
        """The next one, without a worker, to whose process ``what`` happened; the same where it is not in."""
        if rank not in self.workers:
            return self
        rest = {other: number for other, number in self.workers.items() if other != rank}
        lost = {**self.lost, rank: Lost(self.workers[rank], what, left)}
        return Membership(self.epoch + 1, self.least, rest, lost)

    def join(self, rank: int) -> Membership:
        """The next one, with another process as the worker of a rank that nobody has."""
        before = self.lost.get(rank)
        workers = {**self.workers, rank: 0 if before is None else before.incarnation + 1}
        lost = {other: how for other, how in self.lost.items() if other != rank}
        return Membership(self.epoch + 1, self.least, dict(sorted(workers.items())), lost)

    def outlook(self) -> str:
        """How the job goes on, in words."""
        left = len(self.workers)
        if self.enough:
            return f"the job goes on with {counted(left, 'worker')}"
        return f"{counted(left, 'worker')} {'is' if left == 1 else 'are'} left, and it needs {self.least}"
