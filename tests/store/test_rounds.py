"""Who takes part in a round and when it closes: all that can happen to a few workers, breadth first.

The models are what servers do with the rules of `rounds`. What must hold is said here in other words: by who is really
there, whatever the rules make of it. With any rule switched off, something does not hold.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

import pytest

from tensorwire.store import rounds
from tensorwire.store.rounds import Members

ON, DONE, LOST, OUT = "on", "done", "lost", "out"  # where a worker really is


class Violated(Exception):
    """Something does not hold."""


class Model(Protocol):
    """``start``: a state. ``moves``: what may happen in one, and what it leads to. ``ended``: nothing is left to do."""

    start: Hashable

    def moves(self, state: Any) -> Iterator[tuple[str, Callable[[], Hashable]]]: ...

    def ended(self, state: Any) -> bool: ...


def explore(model: Model) -> int:
    """How many states there are. Raises `Violated` with what led to one from which there is no way to an end."""
    came: dict[Hashable, tuple[Hashable, str] | None] = {model.start: None}
    before: dict[Hashable, list[Hashable]] = {}
    ends, todo = [], deque([model.start])

    def trace(state: Hashable, *more: str) -> str:
        names = list(more)
        while (step := came[state]) is not None:
            state = step[0]
            names.insert(0, step[1])
        return " > ".join(names)

    while todo:
        state = todo.popleft()
        try:
            if model.ended(state):
                ends.append(state)
        except Violated as error:
            raise Violated(f"{error}: {trace(state)}") from None
        for name, move in model.moves(state):
            try:
                after = move()
            except Violated as error:
                raise Violated(f"{error}: {trace(state, name)}") from None
            before.setdefault(after, []).append(state)
            if after not in came:
                came[after] = state, name
                todo.append(after)
    sound = set(ends)
    todo = deque(ends)
    while todo:
        for state in before.get(todo.popleft(), ()):
            if state not in sound:
                sound.add(state)
                todo.append(state)
    stuck = next((state for state in came if state not in sound), None)
    if stuck is not None:
        raise Violated(f"no end can be reached: {trace(stuck)}")
    return len(came)


def put(values: tuple[Any, ...], at: int, value: Any) -> tuple[Any, ...]:
    return (*values[:at], value, *values[at + 1 :])


# ---- each worker's rounds at its own pace: all modes but Sync, and keys


class Bucket(NamedTuple):
    pushes: tuple[int, ...]  # by worker, as the rounds count them
    closed: int = 0
    here: frozenset[tuple[int, int]] = frozenset()  # worker and step
    kept: frozenset[tuple[int, int]] = frozenset()
    merged: frozenset[tuple[int, int]] = frozenset()
    waiting: frozenset[int] = frozenset()  # whose push has been merged, for SSP


class Own(NamedTuple):
    members: Members
    where: tuple[str, ...]
    steps: tuple[int, ...]  # each worker's step, from 1
    sent: tuple[frozenset[int], ...]  # buckets that the worker has pushed in it
    answered: tuple[frozenset[int], ...]
    buckets: tuple[Bucket, ...]
    faults: int


@dataclass(frozen=True)
class OwnClocks:
    """``workers`` of which the last ``joiners`` come later, and of which ``faults`` are lost, take ``steps`` each."""

    workers: int
    buckets: int
    steps: tuple[int, ...]
    quorum: int | None
    faults: int = 0
    joiners: int = 0
    grace: bool = False
    bound: int | None = None

    @property
    def start(self) -> Own:
        n, nothing = self.workers, frozenset[int]()
        here = n - self.joiners
        places = (ON,) * here + (OUT,) * self.joiners
        buckets = (Bucket((0,) * n),) * self.buckets
        return Own(Members.first(here), places, (1,) * n, (nothing,) * n, (nothing,) * n, buckets, self.faults)

    def moves(self, state: Own) -> Iterator[tuple[str, Callable[[], Own]]]:
        for w, where in enumerate(state.where):
            if where == OUT:
                yield f"{w} joins", lambda w=w: self.join(state, w)
            if where != ON:
                continue
            if state.steps[w] > self.steps[w]:
                yield f"{w} finishes", lambda w=w: self.leave(state, w, DONE)
            for b in range(self.buckets if state.steps[w] <= self.steps[w] else 0):
                if b not in state.sent[w]:
                    yield f"{w} pushes {b}", lambda w=w, b=b: self.push(state, w, b)
            if state.faults and sum(place == ON for place in state.where) > 1:
                fewer = state._replace(faults=state.faults - 1)
                yield f"{w} is lost", lambda w=w, fewer=fewer: self.leave(fewer, w, LOST)
        for b, bucket in enumerate(state.buckets):
            if self.grace and bucket.here and self.due(state, b):
                yield f"the grace of {b} ends", lambda b=b: self.settle(self.close(state, b))

    def ended(self, state: Own) -> bool:
        if ON in state.where or OUT in state.where:
            return False
        if any(bucket.here or bucket.kept for bucket in state.buckets):
            raise Violated("a push has no fate")
        return True

    # what servers do

    def push(self, state: Own, w: int, b: int) -> Own:
        bucket, push = state.buckets[b], (w, state.steps[w])
        bucket = bucket._replace(pushes=put(bucket.pushes, w, bucket.pushes[w] + 1))
        state = state._replace(sent=put(state.sent, w, state.sent[w] | {b}), buckets=put(state.buckets, b, bucket))
        if rounds.is_late(self.quorum, bucket.pushes[w], bucket.closed):
            if bucket.pushes[w] > bucket.closed:
                raise Violated("a push is late, and its round is open")
            if any(worker == w for worker, _ in bucket.kept):
                state = self.merge(state, b, bucket.kept)
            bucket = state.buckets[b]
            state = self.answer(state, w, b)
            return self.settle(
                state._replace(buckets=put(state.buckets, b, bucket._replace(kept=bucket.kept | {push})))
            )
        state = state._replace(buckets=put(state.buckets, b, bucket._replace(here=bucket.here | {push})))
        return self.settle(self.close_if_due(state, b))

    def leave(self, state: Own, w: int, where: str) -> Own:
        members = state.members.finish(w) if where == DONE else state.members.lose(w)
        state = state._replace(members=members, where=put(state.where, w, where))
        for b in range(self.buckets):
            state = self.close_if_due(state, b)
        return self.settle(state)

    def join(self, state: Own, w: int) -> Own:
        """It pushes for the rounds that are open; its clock is the slowest one's."""
        buckets = []
        for bucket in state.buckets:
            first = bucket.closed
            if self.bound is not None:
                first = min(
                    [bucket.pushes[other] for other in range(self.workers) if state.where[other] == ON], default=0
                )
            buckets.append(bucket._replace(pushes=put(bucket.pushes, w, first)))
        where = put(state.where, w, ON)
        return state._replace(members=state.members.join(w), where=where, buckets=tuple(buckets))

    def due(self, state: Own, b: int) -> bool:
        here, kept = ({w for w, _ in pushes} for pushes in (state.buckets[b].here, state.buckets[b].kept))
        return rounds.is_due(state.members, here, self.quorum, kept)

    def close_if_due(self, state: Own, b: int) -> Own:
        here = {w for w, _ in state.buckets[b].here}
        if not self.due(state, b) or (self.grace and not rounds.is_complete(state.members, here.__contains__)):
            return state
        return self.close(state, b)

    def close(self, state: Own, b: int) -> Own:
        bucket = state.buckets[b]
        here = {w for w, _ in bucket.here}
        if here:
            self.check(state, here)
        state = self.merge(state, b, bucket.here | bucket.kept)
        bucket = state.buckets[b]
        return state._replace(buckets=put(state.buckets, b, bucket._replace(closed=bucket.closed + 1)))

    def check(self, state: Own, here: set[int]) -> None:
        on = {w for w, where in enumerate(state.where) if where == ON}
        finished = sum(where == DONE for w, where in enumerate(state.where) if w not in here)
        if not on <= here and (self.quorum is None or len(here) + finished < self.quorum):
            raise Violated(f"a round closes with {sorted(here)}, and {sorted(on)} are there")

    def merge(self, state: Own, b: int, pushes: frozenset[tuple[int, int]]) -> Own:
        bucket = state.buckets[b]
        if bucket.merged & pushes:
            raise Violated("a push counts twice")
        bucket = bucket._replace(
            here=bucket.here - pushes,
            kept=bucket.kept - pushes,
            merged=bucket.merged | pushes,
            waiting=bucket.waiting | {w for w, _ in pushes & bucket.here},
        )
        return state._replace(buckets=put(state.buckets, b, bucket))

    def settle(self, state: Own) -> Own:
        """Answers all that may be answered; who has all its answers goes on."""
        for b, bucket in enumerate(state.buckets):
            clocks = dict(enumerate(bucket.pushes))
            for w in bucket.waiting:
                if self.bound is None or rounds.may_read(state.members, clocks, w, clocks[w], self.bound):
                    state = self.answer(state, w, b)
                    left = state.buckets[b]
                    state = state._replace(buckets=put(state.buckets, b, left._replace(waiting=left.waiting - {w})))
        for w in range(self.workers):
            if len(state.answered[w]) == self.buckets:
                sent, answered = (put(each, w, frozenset()) for each in (state.sent, state.answered))
                state = state._replace(steps=put(state.steps, w, state.steps[w] + 1), sent=sent, answered=answered)
        here = [{w for w, _ in bucket.here} for bucket in state.buckets]
        finished = {w for w, where in enumerate(state.where) if where == DONE}
        if self.quorum and not self.grace and any(len(each | finished) >= self.quorum for each in here if each):
            raise Violated("a round has its quorum, and is open")
        return state

    def answer(self, state: Own, w: int, b: int) -> Own:
        pushes = state.buckets[b].pushes
        others = [pushes[other] for other, where in enumerate(state.where) if where == ON and other != w]
        if self.bound is not None and state.where[w] == ON and any(pushes[w] - each > self.bound for each in others):
            raise Violated(f"{w} is answered, and others are more than {self.bound} steps behind")
        return state._replace(answered=put(state.answered, w, state.answered[w] | {b}))


# ---- all workers round by round together: Sync


class Together(NamedTuple):
    members: Members
    where: tuple[str, ...]
    idle: frozenset[int]  # who really is
    steps: tuple[int, ...]  # that each worker has taken
    heads: frozenset[int]  # whose head of the round has come
    open: bool  # the round has begun
    sent: tuple[frozenset[int], ...]  # by worker: the buckets that it has pushed in the round
    closed: frozenset[int]  # the round's buckets that have their update
    faults: int


@dataclass(frozen=True)
class Lockstep:
    """Worker ``w`` takes ``steps[w]`` steps inside `job.uneven()`, and finishes with all others."""

    steps: tuple[int, ...]
    buckets: int
    faults: int = 0

    @property
    def start(self) -> Together:
        n, nothing = len(self.steps), frozenset[int]()
        return Together(
            Members.first(n), (ON,) * n, nothing, (0,) * n, nothing, False, (nothing,) * n, nothing, self.faults
        )

    def moves(self, state: Together) -> Iterator[tuple[str, Callable[[], Together]]]:
        for w, where in enumerate(state.where):
            if where != ON:
                continue
            if not state.open and w not in state.heads and w not in state.idle:
                yield f"{w} sends its head", lambda w=w: self.begin(state._replace(heads=state.heads | {w}))
            for b in range(self.buckets if w in state.heads and self.pushing(state, w) else 0):
                if b not in state.sent[w]:
                    yield f"{w} pushes {b}", lambda w=w, b=b: self.push(state, w, b)
            if state.faults and sum(place == ON for place in state.where) > 1:
                yield f"{w} is lost", lambda w=w: self.lose(state, w)

    def pushing(self, state: Together, w: int) -> bool:
        return state.steps[w] < self.steps[w]

    def ended(self, state: Together) -> bool:
        return ON not in state.where

    # what servers do

    def begin(self, state: Together) -> Together:
        """The round begins when the heads of all that take part are there."""
        if state.open or not rounds.is_complete(state.members, state.heads.__contains__):
            return state
        members = state.members
        resting = {w for w in state.heads if state.where[w] == ON and state.steps[w] == self.steps[w]}
        for w in resting:
            members = members.rest(w)
        state = state._replace(members=members, idle=state.idle | resting)
        if members.active:
            return self.close(state._replace(open=True))
        members = members.resume()  # all are idle: they go on, and here they finish together
        if members.active != {w for w, where in enumerate(state.where) if where == ON}:
            raise Violated("all are idle, and do not go on")
        return state._replace(members=members, where=tuple(LOST if p == LOST else DONE for p in state.where))

    def push(self, state: Together, w: int, b: int) -> Together:
        return self.close(state._replace(sent=put(state.sent, w, state.sent[w] | {b})))

    def lose(self, state: Together, w: int) -> Together:
        state = state._replace(
            members=state.members.lose(w),
            where=put(state.where, w, LOST),
            idle=state.idle - {w},
            faults=state.faults - 1,
        )
        return self.close(state) if state.open else self.begin(state)

    def close(self, state: Together) -> Together:
        """Updates the buckets that are complete; after the last one the round is over."""
        for b in range(self.buckets) if state.open else ():
            here = {w for w, sent in enumerate(state.sent) if b in sent}
            if b not in state.closed and here and rounds.is_complete(state.members, here.__contains__):
                self.check(state, here)
                state = state._replace(closed=state.closed | {b})
        on = {w for w, where in enumerate(state.where) if where == ON}
        if not state.open or (len(state.closed) < self.buckets and on - state.idle):
            return state  # a round whose workers are all lost leaves the parameters as they are
        nothing = frozenset[int]()
        steps = tuple(step + (w in on - state.idle) for w, step in enumerate(state.steps))
        sent = (nothing,) * len(self.steps)
        state = state._replace(heads=nothing, open=False, sent=sent, closed=nothing, steps=steps)
        return self.begin(state) if on == state.idle else state

    def check(self, state: Together, here: set[int]) -> None:
        on = {w for w, where in enumerate(state.where) if where == ON}
        if not on - state.idle <= here:
            raise Violated(f"a round closes with {sorted(here)} of {sorted(on - state.idle)}")
        if on - state.idle and state.members.leader not in on - state.idle:
            raise Violated(f"worker {state.members.leader}'s options count, and it takes no part")
        if rounds.divisor(state.members, here, "mean") != len(here | state.idle):
            raise Violated("a mean is over other workers than those who contribute or are idle")


# ---- all that can happen

MODELS: dict[str, Model] = {
    "all": OwnClocks(3, 2, (2, 1, 1), None, faults=2),
    "all, one joins": OwnClocks(3, 1, (2, 1, 2), None, faults=1, joiners=1),
    "two of three": OwnClocks(3, 3, (1, 1, 1), 2),
    "two of three, twice": OwnClocks(3, 2, (2, 2, 1), 2, faults=1),
    "two of three, two are lost": OwnClocks(3, 1, (3, 2, 2), 2, faults=2),
    "two of three, with a grace": OwnClocks(3, 2, (2, 1, 1), 2, faults=1, grace=True),
    "two of three, one joins": OwnClocks(3, 2, (2, 2, 1), 2, faults=1, joiners=1),
    "one": OwnClocks(3, 1, (2, 1, 2), 1, faults=2),
    "at most one step behind": OwnClocks(3, 1, (3, 2, 2), 1, faults=2, bound=1),
    "at most one step behind, one joins": OwnClocks(3, 1, (3, 3, 2), 1, faults=1, joiners=1, bound=1),
    "together": Lockstep((2, 1, 2), 1, faults=2),
    "together, two buckets": Lockstep((1, 2, 1), 2, faults=2),
}


@pytest.mark.parametrize("name", MODELS)
def test_whatever_happens_each_push_has_one_fate_and_an_end_can_be_reached(name: str) -> None:
    assert explore(MODELS[name]) > 50


def finish(members: Members, worker: int) -> Members:
    return replace(members, active=members.active - {worker}, finished=members.finished | {worker})


def without_kept(*args: Any) -> bool:
    return is_due(*args[:3])


is_due, is_late, may_read, divisor = rounds.is_due, rounds.is_late, rounds.may_read, rounds.divisor
OFF: dict[str, tuple[object, str, Any, str, str]] = {
    "a round waits for all": (rounds, "is_complete", lambda *_: True, "all", "a round closes with"),
    "a round of Sync waits for all": (rounds, "is_complete", lambda *_: True, "together", "a round closes with"),
    "a round waits for its quorum": (rounds, "is_due", lambda m, here, *_: bool(here), "two of three", "closes with"),
    "a quorum is enough": (
        rounds,
        "is_due",
        lambda m, here, quorum, kept: is_due(m, here, None, kept),
        "two of three, twice",
        "has its quorum, and is open",
    ),
    "late pushes do not wait for a round that never comes": (
        rounds, "is_due", without_kept, "two of three", "a push has no fate",
    ),
    "late pushes are answered at once": (rounds, "is_late", lambda *_: False, "two of three", "no end"),
    "a push is late only if its round has closed": (
        rounds, "is_late", lambda q, n, closed: n <= closed + 1, "two of three", "its round is open",
    ),
    "one who has finished is not waited for": (Members, "finish", lambda m, w: m, "all", "a push has no fate"),
    "one who has finished counts as one that has pushed": (
        Members, "finish", Members.lose, "two of three, twice", "has its quorum, and is open",
    ),
    "one who is lost is not waited for": (Members, "lose", lambda m, w: m, "all", "a push has no fate"),
    "one who is lost in Sync is not waited for": (Members, "lose", lambda m, w: m, "together", "it takes no part"),
    "one who is lost does not count as one that has pushed": (
        Members, "lose", finish, "two of three, two are lost", "closes with",
    ),
    "one who joins is waited for": (Members, "join", lambda m, w: m, "all, one joins", "a round closes with"),
    "one who is idle is not waited for": (Members, "rest", lambda m, w: m, "together", "no end"),
    "all who are idle go on together": (Members, "resume", lambda m: m, "together", "do not go on"),
    "the options are those of the lowest that is active": (
        Members, "leader", property(lambda m: 0), "together", "worker 0's options",
    ),
    "a mean is over idle workers, too": (
        rounds, "divisor", lambda m, here, reduce: len(here), "together", "a mean is over",
    ),
    "a push counts though its worker is lost": (
        rounds, "divisor", lambda m, here, reduce: len(m.active | m.idle), "together, two buckets", "a mean is over",
    ),
    "nobody is too far ahead": (rounds, "may_read", lambda *_: True, "at most one step behind", "steps behind"),
    "nobody waits for the clock of one who is gone": (
        rounds,
        "may_read",
        lambda m, clocks, worker, clock, bound: all(clock - other <= bound for other in clocks.values()),
        "at most one step behind",
        "no end",
    ),
}  # fmt: skip


@pytest.mark.parametrize("rule", OFF)
def test_without_any_rule_something_does_not_hold(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    where, name, instead, model, why = OFF[rule]
    monkeypatch.setattr(where, name, instead)
    with pytest.raises(Violated, match=why):
        explore(MODELS[model])
