"""Rounds of a fragment that some workers of all close: the same ones for all of its buckets, on every server.

Otherwise one worker could wait for an answer about a bucket, and another for one about another bucket, and nobody would
push. So server 0 decides who contributes to a round, once its quorum has pushed there, and tells the other servers,
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
from typing import Generic, TypeVar

from tensorwire.device import RemoteRegion
from tensorwire.edge import Consumer, Producer, Word
from tensorwire.errors import ProtocolError
from tensorwire.sizes import round_up
from tensorwire.store.deadlines import Deadlines
from tensorwire.store.grace import Grace
from tensorwire.store.shard import Shard
from tensorwire.store.worker_threads import Ends

_WORD = 64
_FRAGMENT = struct.Struct("<Q")
_END = (1 << 64) - 1  # in place of a fragment: all workers have finished
_DEPTH = 16  # decisions that server 0 may be ahead of another one
_PUBLISH_SECONDS = 600.0

T = TypeVar("T")
_Edge = Producer | Consumer
Close = Callable[[int, list[T]], None]  # closes a bucket's round with these contributions


class QuorumRounds(Generic[T]):
    """The rounds of all fragments on one server.

    Args:
        shard: The server's part of the store.
        quorum: How many workers close a round; one that has finished counts as one that has pushed.
        fragments: The buckets of each fragment on this server.
        grace: How long others may join after that; None: they may not.
        close: Closes a bucket's round.
    """

    def __init__(
        self, shard: Shard, quorum: int, fragments: Sequence[Sequence[int]], grace: Grace | None, close: Close[T]
    ) -> None:
        self._shard, self._quorum, self._fragments = shard, quorum, fragments
        self._grace, self._close_bucket = grace, close
        self._lock = threading.Lock()
        self._here: list[dict[int, Mapping[int, T]]] = [{} for _ in fragments]  # by worker and bucket: not merged yet
        self._active = len(shard.workers)
        self._versions = [0] * len(fragments)
        self._deadlines = Deadlines(self._close_late) if grace is not None else None
        self._decisions = _Decisions(shard, len(fragments))
        self._decided: list[deque[Collection[int]]] = [deque() for _ in fragments]  # on other servers than 0

    def start(self, ends: Ends) -> None:
        """Starts the thread of the grace, if there is any."""
        if self._deadlines is not None:
            self._deadlines.start(f"{self._shard.name} grace", ends)

    def stop(self, *, finished: bool) -> None:
        """The store ends. ``finished``: because all workers have finished."""
        if self._deadlines is not None:
            self._deadlines.stop()
        if finished and not self._shard.index:
            self._decisions.send(_END, ())

    def contribute(self, fragment: int, worker: int, pushed: Mapping[int, T]) -> None:
        """A worker has pushed a fragment: what it contributes to each of its buckets here."""
        with self._lock:
            self._here[fragment][worker] = pushed
            if self._grace is not None:
                self._grace.contributed(fragment, worker)
            self._advance(fragment)

    def leave(self) -> None:
        """A worker has finished: no round waits for it."""
        with self._lock:
            self._active -= 1
            for fragment in range(len(self._fragments)):
                self._advance(fragment)

    def follow(self) -> None:
        """On other servers than 0: takes what server 0 decides, until all workers have finished."""
        for number in itertools.count(1):
            fragment, workers = self._decisions.receive(number)
            if fragment == _END:
                return
            with self._lock:
                self._decided[fragment].append(workers)
                self._advance(fragment)

    # ---- the caller holds the lock

    def _advance(self, fragment: int) -> None:
        """Closes what is due."""
        if self._shard.index:
            decided = self._decided[fragment]
            while decided and set(decided[0]) <= self._here[fragment].keys():
                self._close(fragment, decided.popleft())
            return
        here, missing = self._here[fragment], len(self._shard.workers) - self._active
        if not here or len(here) + missing < self._quorum:
            return
        if self._grace is None or self._deadlines is None or len(here) >= self._active:
            self._decide(fragment)
        else:
            self._deadlines.set(self._grace.deadline(fragment, list(here)), fragment, self._versions[fragment])

    def _decide(self, fragment: int) -> None:
        """All who are here contribute."""
        workers = sorted(self._here[fragment])
        self._decisions.send(fragment, workers)
        self._close(fragment, workers)

    def _close(self, fragment: int, workers: Collection[int]) -> None:
        start = time.monotonic()
        pushed = [self._here[fragment].pop(worker) for worker in workers]
        for bucket in self._fragments[fragment]:
            self._close_bucket(bucket, [each[bucket] for each in pushed])
        self._versions[fragment] += 1
        if self._grace is not None:
            self._grace.updated(fragment, time.monotonic() - start)

    def _close_late(self, fragment: int, version: int) -> None:
        """The time for joining the round after ``version`` is over."""
        with self._lock:
            if self._versions[fragment] == version and self._here[fragment]:
                self._decide(fragment)


class _Decisions:
    """What server 0 tells the others: a fragment, and a byte for each worker, whether it contributes."""

    def __init__(self, shard: Shard, fragments: int) -> None:
        self._shard, self._fragments, self._workers = shard, fragments, len(shard.workers)
        self._sent = 0
        self._edges = [self._edge(0)] if shard.index else [self._edge(s) for s in range(1, shard.plan.servers)]

    def _edge(self, other: int) -> _Edge:
        """That to or from another server: its slots, and in front of them the arrival word, or the credit."""
        shard, member = self._shard, self._shard.member
        channel = member.channel("server", other)
        nbytes = _FRAGMENT.size + self._workers
        region = shard.keep(channel.device.allocate(_WORD + _DEPTH * round_up(nbytes, 8)))
        places = [_WORD + at * round_up(nbytes, 8) for at in range(_DEPTH)]
        key = f"{shard.name}/decisions/{shard.index}/{other}"
        member.client.publish(key, region.remote("write").pack(), to=[f"server {other}"])
        key = f"{shard.name}/decisions/{other}/{shard.index}"
        theirs = RemoteRegion.unpack(member.client.lookup(key, timeout=_PUBLISH_SECONDS))
        word = Word(region, 0, channel)
        if shard.index:
            memory = memoryview(region)
            slots = [memory[at : at + nbytes] for at in places]
            return Consumer(word, slots=slots, credit=(channel, theirs.view(0, 8)))
        source = [] if channel.device.capabilities.maps else [region.view(at, nbytes) for at in places]
        views = [theirs.view(at, nbytes) for at in places]
        return Producer(channel, theirs.view(0, 8), slots=views, source=source, credit=word, label=f"server {other}")

    def send(self, fragment: int, workers: Collection[int]) -> None:
        """Server 0: the others learn of it, in this order."""
        self._sent += 1
        flags = bytes(worker in workers for worker in range(self._workers))
        for edge in self._edges:
            assert isinstance(edge, Producer)
            self._shard.while_job_lives(partial(edge.slot, self._sent))[:] = _FRAGMENT.pack(fragment) + flags
            edge.send(self._sent)

    def receive(self, number: int) -> tuple[int, list[int]]:
        """Others: the decision of that number, once it has come."""
        (edge,) = self._edges
        assert isinstance(edge, Consumer)
        found = bytes(self._shard.receive(edge, number))
        edge.release(number)
        (fragment,) = _FRAGMENT.unpack_from(found)
        workers = [worker for worker, there in enumerate(found[_FRAGMENT.size :]) if there]
        if fragment != _END and not (workers and fragment < self._fragments):
            raise ProtocolError(f"server 0 decided on fragment {fragment} and the workers {workers}")
        return fragment, workers
