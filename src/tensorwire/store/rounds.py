"""Who takes part in the rounds of a store, and when a round closes: functions of the membership and of what has come.

They have no memory, threads or clocks. Servers call them under locks of their own; a test explores all that can happen
to a few workers. The membership is a set of ranks, never a count: workers may leave, be lost or join between two calls.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Members:
    """The ranks of a store's workers. One that is in no set was lost, or has not joined.

    ``active``: rounds wait for them. ``idle``: they take no part in rounds until all are idle, but means are over them,
    too. ``finished``: they have left in good order. ``least``: with fewer in all of these, rounds wait.
    """

    active: frozenset[int]
    idle: frozenset[int] = frozenset()
    finished: frozenset[int] = frozenset()
    least: int = 0

    @property
    def enough(self) -> bool:
        """Whether rounds go on."""
        return len(self.active) + len(self.idle) + len(self.finished) >= self.least

    @classmethod
    def first(cls, workers: int) -> Members:
        """Those that a job begins with."""
        return cls(frozenset(range(workers)))

    @property
    def leader(self) -> int:
        """Whose options count, and whose values and state where all set these together: the lowest active rank."""
        return min(self.active)

    def rest(self, worker: int) -> Members:
        """A worker is idle from now on."""
        return replace(self, active=self.active - {worker}, idle=self.idle | {worker})

    def resume(self) -> Members:
        """If all are idle, all are active again."""
        return self if self.active else replace(self, active=self.idle, idle=frozenset())

    def without(self, ranks: AbstractSet[int]) -> Members:
        """Rounds do not wait for these yet: they are new, and have not pushed."""
        return replace(self, active=self.active - ranks) if ranks else self

    def finish(self, worker: int) -> Members:
        """A worker has left in good order."""
        return replace(self.lose(worker), finished=self.finished | {worker})

    def lose(self, worker: int) -> Members:
        """A worker is gone: nobody waits for it."""
        return replace(self, active=self.active - {worker}, idle=self.idle - {worker})

    def join(self, worker: int) -> Members:
        """A worker is active from the next round on."""
        return replace(self, active=self.active | {worker}, finished=self.finished - {worker})


def slowest(members: Members, clocks: Mapping[int, int], otherwise: int) -> int:
    """How many steps the slowest active worker has taken: as far is one that joins. ``otherwise``: nobody is active."""
    return min((clocks[worker] for worker in members.active), default=otherwise)


def is_complete(members: Members, has_pushed: Callable[[int], object]) -> bool:
    """Whether a round has the pushes of all that take part, so that there is nobody to wait for."""
    return all(map(has_pushed, members.active))


def is_due(
    members: Members, here: AbstractSet[int], quorum: int | None = None, kept: AbstractSet[int] = frozenset()
) -> bool:
    """Whether a round may close.

    Args:
        members: The membership.
        here: The workers whose pushes the round has.
        quorum: How many it needs, where one that has finished counts as one that has pushed. None: all.
        kept: The workers whose late pushes wait for the next round: no longer, once there is none to come.
    """
    if not here:
        return bool(kept) and not members.active
    if not members.enough:
        return False
    enough = quorum is not None and len(here | members.finished) >= quorum
    return enough or is_complete(members, here.__contains__)


def is_late(quorum: int | None, pushes: int, closed: int) -> bool:
    """Whether a worker's push, its ``pushes``-th, is too late for its round, as so many have ``closed``.

    Round ``k`` of a bucket has the ``k``-th pushes of its workers. A late push is answered at once, and kept for the
    next round: so nobody waits for a worker that has pushed as often, whatever other buckets and servers decide. Where
    one worker is a quorum, no push waits, and none is late.
    """
    return quorum is not None and quorum > 1 and pushes <= closed


def divisor(members: Members, contributors: AbstractSet[int], reduce: str) -> int:
    """What the sum of the contributors' gradients is divided by, where those of idle workers are zero.

    ``reduce``: ``mean`` or ``sum``.
    """
    return len(contributors | members.idle) if reduce == "mean" else 1


def may_read(members: Members, clocks: Mapping[int, int], worker: int, clock: int, bound: int) -> bool:
    """Whether a worker may have the present values after its step ``clock``: others are ``bound`` steps behind at most.

    ``clocks``: the steps of each worker. One that takes no part in rounds waits for nobody.
    """
    others = members.active - {worker} if worker in members.active else ()
    return all(clock - clocks[other] <= bound for other in others)
