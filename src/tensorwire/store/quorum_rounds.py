"""Rounds of a fragment that some workers of all close: the same ones for all of its buckets, on every server.

Update ``k`` of a fragment has the ``k``-th pushes of the first workers that are enough. A ``k``-th push that comes
later is *late*: its worker gets the present version at once, and what it pushed counts in the next update. So no worker
waits for one that has pushed as often. Server 0 decides who is late and who contributes, and tells the other servers,
which wait for the pushes of these workers. All of these come: a worker pushes a fragment to all servers.
"""

from __future__ import annotations

import itertools
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Generic, NamedTuple, TypeVar

from tensorwire.control.names import member_name
from tensorwire.device import Channel, Region, RemoteRegion
from tensorwire.edge import Consumer, Producer, Word
from tensorwire.errors import ProtocolError
from tensorwire.sizes import round_up
from tensorwire.store.deadlines import Deadlines
from tensorwire.store.grace import Grace
from tensorwire.store.shard import Shard
from tensorwire.store.worker_threads import Ends

_WORD = 64
_HEAD = struct.Struct("<II")  # a fragment, and what is decided
_CLOSED, _LATE, _END = range(3)  # a round with these workers; a worker is late; all workers have finished
_DEPTH = 16  # decisions that server 0 may be ahead of another one
_PUBLISH_SECONDS = 600.0

T = TypeVar("T")


class _Decision(NamedTuple):
    kind: int
    fragment: int
    workers: tuple[int, ...] = ()


class QuorumRounds(Generic[T]):
    """The rounds of all fragments on one server. ``T`` is what a worker has pushed to a bucket.

    Args:
        shard: The server's part of the store.
        quorum: How many workers close a round; one that has finished counts as one that has pushed.
        fragments: The buckets of each fragment on this server.
        grace: How long others may join after that; None: they may not.
        close: Closes a bucket's round with what some have pushed, and answers those that wait for it.
        keep: Answers a worker that is late. Returns what it has pushed, to be merged when it has pushed again.
    """

    def __init__(
        self,
        shard: Shard,
        quorum: int,
        fragments: Sequence[Sequence[int]],
        grace: Grace | None,
        close: Callable[[int, list[T]], None],
        keep: Callable[[int, T], T],
    ) -> None:
        self._shard, self._quorum, self._fragments, self._grace = shard, quorum, fragments, grace
        self._close_bucket, self._keep_bucket = close, keep
        self._lock = threading.Lock()
        self._active, self._left = set(range(len(shard.workers))), set[int]()
        self._counts = [[0] * len(shard.workers) for _ in fragments]  # pushes of each worker
        self._versions = [0] * len(fragments)
        self._here: list[dict[int, Mapping[int, T]]] = [{} for _ in fragments]  # by worker, which waits for its answer
        self._kept: list[dict[int, Mapping[int, T]]] = [{} for _ in fragments]  # of workers that were late
        self._deadlines = Deadlines(self._close_late) if grace is not None else None
        self._decisions = _Decisions(shard, len(fragments))
        self._decided: list[deque[_Decision]] = [deque() for _ in fragments]  # on other servers than 0, to be done

    def start(self, ends: Ends) -> None:
        """Starts the thread of the grace, if there is any."""
        if self._deadlines is not None:
            self._deadlines.start(f"{self._shard.name} grace", ends)

    def stop(self, *, finished: bool) -> None:
        """The store ends. ``finished``: because all workers have finished."""
        if self._deadlines is not None:
            self._deadlines.stop()
        if finished and not self._shard.index:
            self._decisions.end()

    def contribute(self, fragment: int, worker: int, pushed: Mapping[int, T]) -> None:
        """A worker has pushed a fragment: to each of its buckets here."""
        with self._lock:
            self._here[fragment][worker] = pushed
            if self._shard.index:
                self._follow(fragment)
                return
            self._counts[fragment][worker] += 1
            if self._counts[fragment][worker] <= self._versions[fragment]:
                self._decisions.send(_Decision(_LATE, fragment, (worker,)))
                self._keep(fragment, worker)
                return
            if self._grace is not None:
                self._grace.contributed(fragment, worker)
            self._close_if_due(fragment)

    def leave(self, worker: int) -> None:
        """A worker has finished: no round waits for it."""
        with self._lock:
            self._active.discard(worker)
            self._left.add(worker)
            for fragment in range(0 if self._shard.index else len(self._fragments)):
                self._close_if_due(fragment)

    def meet(self) -> None:
        """All workers set values together, and go on as if all had pushed equally often."""
        with self._lock:
            for counts, version in zip(self._counts, self._versions, strict=True):
                counts[:] = [version] * len(counts)

    def merge_late(self) -> None:
        """What workers pushed late does not wait for the next update: values are to be saved, or set."""
        with self._lock:
            for fragment in range(len(self._fragments)):
                if self._kept[fragment]:
                    self._merge(fragment, ())

    def follow(self) -> None:
        """On other servers than 0: does what server 0 decides, until all workers have finished."""
        for number in itertools.count(1):
            decision = self._decisions.receive(number)
            if decision.kind == _END:
                return
            with self._lock:
                self._decided[decision.fragment].append(decision)
                self._follow(decision.fragment)

    # ---- the caller holds the lock

    def _follow(self, fragment: int) -> None:
        """Does what is decided, as far as the pushes are here."""
        decided, here = self._decided[fragment], self._here[fragment]
        while decided and set(decided[0].workers) <= here.keys():
            decision = decided.popleft()
            if decision.kind == _LATE:
                self._keep(fragment, *decision.workers)
            else:
                self._close(fragment, decision.workers)

    def _close_if_due(self, fragment: int) -> None:
        here = self._here[fragment]
        if not self._active and self._kept[fragment]:
            self._decide(fragment)
        if not here or len(self._left | here.keys()) < self._quorum:
            return
        if self._grace is None or self._deadlines is None or self._active <= here.keys():
            self._decide(fragment)
        else:
            self._deadlines.set(self._grace.deadline(fragment, list(here)), fragment, self._versions[fragment])

    def _decide(self, fragment: int) -> None:
        """All who wait contribute."""
        workers = tuple(sorted(self._here[fragment]))
        self._decisions.send(_Decision(_CLOSED, fragment, workers))
        self._close(fragment, workers)

    def _close(self, fragment: int, workers: Collection[int]) -> None:
        start = time.monotonic()
        self._merge(fragment, workers)
        self._versions[fragment] += 1
        if self._grace is not None:
            self._grace.updated(fragment, time.monotonic() - start)

    def _merge(self, fragment: int, workers: Collection[int]) -> None:
        """What these workers have pushed, and what others have pushed late."""
        pushed = [*self._kept[fragment].values(), *(self._here[fragment].pop(worker) for worker in workers)]
        self._kept[fragment] = {}
        for bucket in self._fragments[fragment]:
            self._close_bucket(bucket, [each[bucket] for each in pushed])

    def _keep(self, fragment: int, worker: int) -> None:
        """Answers a worker that is late. One push of it is kept at most: an earlier one is merged before."""
        if worker in self._kept[fragment]:
            self._merge(fragment, ())
        pushed = self._here[fragment].pop(worker)
        kept = {bucket: self._keep_bucket(bucket, pushed[bucket]) for bucket in self._fragments[fragment]}
        self._kept[fragment][worker] = kept

    def _close_late(self, fragment: int, version: int) -> None:
        """The time for joining the round after ``version`` is over."""
        with self._lock:
            if self._versions[fragment] == version and self._here[fragment]:
                self._decide(fragment)


class _Decisions:
    """What server 0 tells the others: a decision, and a byte for each worker, whether it is about that one."""

    def __init__(self, shard: Shard, fragments: int) -> None:
        self._shard, self._fragments, self._workers = shard, fragments, len(shard.workers)
        self._sent = 0
        self._consumer = self._consumer_of_0() if shard.index else None
        self._producers = [] if shard.index else [self._producer(s) for s in range(1, shard.plan.servers)]

    def _consumer_of_0(self) -> Consumer:
        channel, region, theirs, places = self._memory(0)
        memory = memoryview(region)
        slots = [memory[at : at + nbytes] for at, nbytes in places]
        return Consumer(Word(region, 0, channel), slots=slots, credit=(channel, theirs.view(0, 8)))

    def _producer(self, other: int) -> Producer:
        channel, region, theirs, places = self._memory(other)
        source = [] if channel.device.capabilities.maps else [region.view(at, nbytes) for at, nbytes in places]
        views = [theirs.view(at, nbytes) for at, nbytes in places]
        credit, label = Word(region, 0, channel), f"decisions to server {other}"
        return Producer(channel, theirs.view(0, 8), slots=views, source=source, credit=credit, label=label)

    def _memory(self, other: int) -> tuple[Channel, Region, RemoteRegion, list[tuple[int, int]]]:
        """A channel to another server, our memory and its own, and where slots are; in front of them is a word."""
        shard, member = self._shard, self._shard.member
        name = member_name("server", other)
        channel = member.channel(name)
        nbytes = _HEAD.size + self._workers
        region = shard.keep(channel.device.allocate(_WORD + _DEPTH * round_up(nbytes, 8)))
        places = [(_WORD + at * round_up(nbytes, 8), nbytes) for at in range(_DEPTH)]
        key = f"{shard.name}/decisions/{shard.index}/{other}"
        member.client.publish(key, region.remote("write").pack(), to=[name])
        key = f"{shard.name}/decisions/{other}/{shard.index}"
        theirs = RemoteRegion.unpack(member.client.lookup(key, timeout=_PUBLISH_SECONDS))
        return channel, region, theirs, places

    def send(self, decision: _Decision) -> None:
        """Server 0: the others learn of it, in this order."""
        self._sent += 1
        flags = bytes(worker in decision.workers for worker in range(self._workers))
        for edge in self._producers:
            slot = self._shard.while_job_lives(partial(edge.slot, self._sent))
            slot[:] = _HEAD.pack(decision.fragment, decision.kind) + flags
            edge.send(self._sent)

    def end(self) -> None:
        """Server 0: all is decided. It may be gone when others learn of that, but not before they have the rest."""
        for edge in self._producers:
            self._shard.while_job_lives(partial(edge.slot, self._sent + _DEPTH))
        self.send(_Decision(_END, 0))
        for edge in self._producers:
            self._shard.while_job_lives(edge.flush)

    def receive(self, number: int) -> _Decision:
        """Others: the decision of that number, once it has come."""
        assert self._consumer is not None
        found = bytes(self._shard.receive(self._consumer, number))
        fragment, kind = _HEAD.unpack_from(found)
        if kind != _END:
            self._consumer.release(number)
        workers = tuple(worker for worker, there in enumerate(found[_HEAD.size :]) if there)
        if kind > _END or fragment >= self._fragments or (kind == _LATE and len(workers) != 1):
            raise ProtocolError(f"server 0 decided {kind} on fragment {fragment} and the workers {workers}")
        return _Decision(kind, fragment, workers)
