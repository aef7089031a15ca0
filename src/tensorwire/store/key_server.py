"""A server of a store of keys: each key has rounds of its own, which workers open and look at by requests.

`Sync`: a key's round closes when all workers that have not finished have pushed it; a pull after a push gets what that
round led to. Other modes apply each push by itself. With `SSP`, a pull waits until the slowest worker has pushed the
key often enough. No request keeps its thread from the next one, once the first values are there.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from tensorwire._native import gather
from tensorwire.control import Member
from tensorwire.edge import Producer
from tensorwire.errors import PeerLost, ProtocolError
from tensorwire.observe import counters
from tensorwire.store.admission import check_memory
from tensorwire.store.bucket_code import decoders
from tensorwire.store.consensus import Disagreement
from tensorwire.store.fates import Sent
from tensorwire.store.key_layout import answer_word, telling, values_at
from tensorwire.store.key_rules import make_key_rule, outgrows_caches
from tensorwire.store.pushes import WRITER, Push, source_of
from tensorwire.store.request_link import WORKER_0, Request, RequestOperation
from tensorwire.store.request_store import RequestPeer, RequestStore
from tensorwire.store.rounds import Members, is_due, may_read, slowest
from tensorwire.store.server_state import take_state
from tensorwire.store.sharding import PAGE, Bucket
from tensorwire.store.store_layout import StoreSpec

_PATIENCE = 60.0  # between looks at the job while worker 0 sets the first values
_NOT_OF_KEYS = (RequestOperation.CHANGES, RequestOperation.IDLE, RequestOperation.CUT)


class _Contribution(NamedTuple):
    """A push to a round. ``wants``: whether the values are to be sent when it closes."""

    peer: _Peer
    options: bytes
    wants: bool


@dataclass
class _Bucket:
    """A bucket's open round, and those who wait. ``lock`` guards it."""

    lock: threading.Lock
    clocks: dict[int, int]  # by worker: pushes so far
    new: set[int] = field(default_factory=set)  # workers that joined, and have not pushed it yet: nobody waits for them
    version: int = 0
    here: list[_Contribution] = field(default_factory=list)  # the round's pushes
    waiting: list[tuple[_Peer, int]] = field(default_factory=list)  # who waits for values, with its clock


class KeyServer(RequestStore):
    """Serves its shard of the store of keys ``name`` to all workers until they finish."""

    def __init__(self, member: Member, name: str, spec: StoreSpec, servers: int) -> None:
        super().__init__(member, name, spec)
        ranks = sorted(self.first)
        self.plan = spec.plan(servers)
        check_memory(self.plan.registered_bytes(self.index, len(ranks)), member.name)
        self._telling = telling(spec.mode)
        # Nobody else looks at the values, so that they need no memory file; they begin at a page as elsewhere.
        room = np.zeros(self.plan.shard_bytes[self.index] + PAGE, np.uint8)
        memory = room[-room.ctypes.data % PAGE :][: self.plan.shard_bytes[self.index]].data
        buckets = self.plan.buckets[self.index]
        self.values = [np.frombuffer(memory, np.uint8, b.nbytes, b.shard) for b in buckets]
        self.large = [outgrows_caches(self.plan, b) for b in buckets]
        self.peers: dict[int, _Peer] = {rank: self._make_peer(rank, n) for rank, n in self.first.items()}
        for peer in self.peers.values():
            peer.open()
        self.rule = make_key_rule(spec, self.plan, self.index, memory)
        self._buckets = [_Bucket(threading.Lock(), dict.fromkeys(ranks, 0)) for _ in buckets]
        self._ready = threading.Event()
        self._options = bytes(self.option_bytes)  # those of the last push of a worker

    def handle(self, worker: int, request: Request) -> bool:
        """As `RequestStore`."""
        peer = self.peers[worker]
        if request.operation is RequestOperation.FINISH:
            self._leave(peer)
            return False
        self._check(peer, request)
        self._options = request.options
        operation = request.operation
        if operation in WORKER_0:
            self._set(peer, request)
            return False
        if not self._ready.is_set():
            self._wait_until_ready()
        if operation is RequestOperation.PULL:
            for index in request.numbers:
                with self._buckets[index].lock:
                    self._answer_in_turn(peer, index)
        elif self.together:
            self._contribute(peer, request)
        else:
            self._apply(peer, request)
        return operation in self._telling

    def _check(self, peer: _Peer, request: Request) -> None:
        """Raises `ProtocolError` for what no worker asks."""
        most, strange = len(self._buckets), request.operation in _NOT_OF_KEYS
        if strange or len(request.options) != self.option_bytes or max(request.numbers, default=-1) >= most:
            raise ProtocolError(f"{peer.name} sent a request that does not fit {self.name} of {most} buckets")

    def _set(self, peer: _Peer, request: Request) -> None:
        """What worker 0 alone does, while others wait for it."""
        self.check_worker_0(peer, request.operation)
        if request.operation is RequestOperation.READY:
            self._ready.set()
        elif request.operation is RequestOperation.LOAD:
            with self.at_rest():
                take_state(self.member, self.name, self.index, request.number, self.rule)
        else:
            for index in request.numbers:
                with self._buckets[index].lock:
                    self.before_write((index,))
                    self.rule.assign(index, peer.slots[index], 0)
                    if self.together:
                        peer.answer(index)

    def _wait_until_ready(self) -> None:
        while not self._ready.wait(_PATIENCE):
            self.member.check()

    # ---- each push by itself

    def _apply(self, peer: _Peer, request: Request) -> None:
        wants = request.operation is RequestOperation.PUSHPULL
        for index in request.numbers:
            bucket = self._buckets[index]
            peer.decode(index)
            with bucket.lock:
                self.before_write((index,))
                self.rule.update(index, (peer.pushes[index],), request.options)
                bucket.version += 1
                self._count(peer, bucket)
                if self.fates.wanted:
                    self._log(index, [peer])
                if wants:
                    self._answer_in_turn(peer, index)
                if bucket.waiting:
                    self._answer_waiting(index)
        counters.add(applied=len(request.numbers))

    def apply_of_writer(self, index: int, slot: memoryview) -> None:
        """Applies a writer's push, with the options that the last request of a worker had."""
        bucket = self._buckets[index]
        with bucket.lock:
            self.before_write((index,))
            self.rule.update(index, (Push(WRITER, slot, b"\1"),), self._options)
            bucket.version += 1
        counters.add(applied=1)

    # ---- rounds of all workers

    def _contribute(self, peer: _Peer, request: Request) -> None:
        wants = request.operation is RequestOperation.PUSHPULL
        for index in request.numbers:
            bucket = self._buckets[index]
            peer.decode(index)
            with bucket.lock:
                if any(other.peer is peer for other in bucket.here):
                    raise ProtocolError(f"{peer.name} pushed bucket {index} twice in one round")
                self._count(peer, bucket)
                bucket.here.append(_Contribution(peer, request.options, wants))
                self._close_if_due(index)

    def _close_if_due(self, index: int) -> None:
        """Merges, applies and answers, if all that have not finished are there. The caller holds the bucket's lock."""
        bucket = self._buckets[index]
        if not is_due(self.members.without(bucket.new), {each.peer.index for each in bucket.here}):
            return
        here, bucket.here = sorted(bucket.here, key=lambda each: each.peer.index), []
        peers = [each.peer for each in here]
        self.before_write((index,))
        self.rule.update(index, [peer.pushes[index] for peer in peers], here[0].options)
        bucket.version += 1
        counters.add(merged=len(peers))
        if self.fates.wanted:
            self._log(index, peers)
        for each in here:
            each.peer.answer(index, wants=each.wants)
        self._answer_waiting(index)

    # ---- answers; the caller holds the bucket's lock

    def _answer_in_turn(self, peer: _Peer, index: int) -> None:
        """Sends a worker the values of a bucket: at once, or when what they have to contain has come."""
        bucket = self._buckets[index]
        clock = bucket.clocks[peer.index]
        if self._may_read(peer, index, clock):
            peer.answer(index, wants=True)
        else:
            bucket.waiting.append((peer, clock))

    def _may_read(self, peer: _Peer, index: int, clock: int) -> bool:
        """Whether a worker may have the values that its ``clock`` pushes led to."""
        bucket = self._buckets[index]
        if self.bound is not None:
            return may_read(self.members.without(bucket.new), bucket.clocks, peer.index, clock, self.bound)
        return not any(other.peer is peer for other in bucket.here)

    def _answer_waiting(self, index: int) -> None:
        bucket = self._buckets[index]
        waiting, bucket.waiting = bucket.waiting, []
        for peer, clock in waiting:
            if self._may_read(peer, index, clock):
                peer.answer(index, wants=True)
            else:
                bucket.waiting.append((peer, clock))

    def _log(self, index: int, peers: Sequence[_Peer]) -> None:
        bucket, count = self._buckets[index], len(peers)
        pushes = [Sent(peer.index, peer.incarnation, bucket.clocks[peer.index]) for peer in peers]
        fate = "merged" if self.together else "applied"
        self.fates.log(index, bucket.version, pushes, fate, [1 / count] * count, [0] * count)

    def _leave(self, peer: _Peer) -> None:
        """A worker has finished: no round waits for it, and it gets no answers, but what it pushed counts."""
        self._go_on(peer, self.members.finish)

    def lose(self, worker: int) -> None:
        """As `RequestStore`."""
        if worker == 0 and not self._ready.is_set():
            raise Disagreement(worker, f"was lost before the keys of {self.name} had their first values")
        self._go_on(self.peers[worker], self.members.lose)

    def _make_peer(self, worker: int, incarnation: int) -> _Peer:
        return _Peer(self, worker, incarnation)

    def _let_in(self, peer: RequestPeer) -> None:
        assert isinstance(peer, _Peer)
        with self.at_rest():
            before = self.peers.get(peer.index)
            if before is not None:
                self.rule.let_go(before.index, before.incarnation)
            self.peers = dict(sorted({**self.peers, peer.index: peer}.items()))
            for bucket in self._buckets:
                bucket.new.add(peer.index)
            self.members = self.members.join(peer.index)

    def _count(self, peer: _Peer, bucket: _Bucket) -> None:
        """A worker has pushed. One that joined takes part from then on, as far as the slowest of the others."""
        if peer.index in bucket.new:
            others = self.members.without(bucket.new)
            bucket.clocks[peer.index] = slowest(others, bucket.clocks, bucket.version)
            bucket.new.discard(peer.index)
        bucket.clocks[peer.index] += 1

    def _go_on(self, peer: _Peer, without: Callable[[int], Members]) -> None:
        with self.at_rest():
            self.members = without(peer.index)
            peer.left = True
            for index in range(len(self._buckets)):
                self._close_if_due(index)
                self._answer_waiting(index)

    # ---- the rest

    @contextlib.contextmanager
    def at_rest(self, bucket: int | None = None) -> Iterator[None]:
        """Inside it no round of a bucket closes, or no round at all."""
        with contextlib.ExitStack() as held:
            for each in self._buckets if bucket is None else self._buckets[bucket : bucket + 1]:
                held.enter_context(each.lock)
            yield

    def bytes_of(self, bucket: Bucket) -> npt.NDArray[np.uint8]:
        """As `RequestStore`."""
        return self.values[bucket.index]

    def updates(self, bucket: int) -> int:
        """As `RequestStore`."""
        return self._buckets[bucket].version


class _Peer(RequestPeer):
    """What this server shares with one worker."""

    def __init__(self, server: KeyServer, index: int, incarnation: int) -> None:
        plan = server.plan
        buckets = plan.buckets[server.index]
        room = max(PAGE, plan.shard_bytes[server.index])
        super().__init__(server.member, server.name, index, incarnation, room, room)
        self._server = server
        self.left = False  # its memory may be gone
        memory = memoryview(self.inbox)
        self.slots = [memory[b.shard : b.shard + b.nbytes] for b in buckets]
        self._decoders = decoders(server.spec, buckets)
        decoded = zip(self.slots, self._decoders, strict=True)
        source = source_of(index, incarnation)
        self.pushes = [Push(source, slot if d is None else d.memory, b"\1") for slot, d in decoded]
        self._answered = [0] * len(buckets)
        self._pulls: list[Producer] = []
        self._words: list[Producer] = []
        self._targets: list[np.ndarray[Any, Any]] = []

    def open(self) -> None:
        """Makes the way back, once the worker has said where its memory is."""
        server = self._server
        plan = server.plan
        super().open()
        target = self.theirs
        for b in plan.buckets[server.index]:
            word = target.view(answer_word(plan, server.index, b.index), 8)
            source = [] if self.source is None else [self.source.view(b.shard, b.nbytes)]
            pull = Producer(
                self.channel,
                word,
                slots=[target.view(values_at(plan) + b.space, b.nbytes)],
                source=source,
                label=f"{self.name}, bucket {b.index}",
            )
            self._pulls.append(pull)
            self._words.append(Producer(self.channel, word))
            self._targets.append(np.frombuffer(pull.memory, np.uint8))

    def decode(self, bucket: int) -> None:
        """What the worker has pushed to a bucket is there; once a request."""
        decoder = self._decoders[bucket]
        if decoder is not None:
            decoder.decode(self.slots[bucket])

    def answer(self, bucket: int, *, wants: bool = False) -> None:
        """Answers the next request for a bucket, by its values if these are wanted. The caller holds its lock."""
        if self.left:
            return
        with contextlib.suppress(PeerLost):  # that worker's thread will hear of it, too
            self._answer(bucket, wants=wants)

    def _answer(self, bucket: int, *, wants: bool) -> None:
        self._answered[bucket] = number = self._answered[bucket] + 1
        if not wants:
            self._words[bucket].send(number)
            return
        pull = self._pulls[bucket]
        if self.source is not None:
            pull.slot(number)  # what was sent last has left
        gather(self._targets[bucket], self._server.values[bucket], self._server.large[bucket])
        counters.copied(pull.nbytes)
        pull.send(number)
