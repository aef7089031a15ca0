"""All workers of a store round by round together: the mode `Sync`."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from functools import partial

from tensorwire.errors import PeerLost, WaitTimeout
from tensorwire.observe import spans
from tensorwire.observe.spans import clock
from tensorwire.store.consensus import agreed, check_alike
from tensorwire.store.fates import Sent
from tensorwire.store.ready_queue import ReadyQueue
from tensorwire.store.rounds import Members, divisor, is_complete
from tensorwire.store.sameness import Sameness
from tensorwire.store.shard import Shard, WorkerLink
from tensorwire.store.step_header import LEFT_OUT, NORM, STEPS, StepHeader, StepOperation, clipping

_LOOK = 1.0  # seconds between looks at the job while no worker is there


class Lockstep:
    """Waits for the workers' rounds, applies the rule to what all of them pushed, publishes the new version."""

    def __init__(self, shard: Shard) -> None:
        self.shard = shard
        self.rule, self.fates = shard.rule, shard.fates
        self._buckets = shard.plan.buckets[shard.index]
        self._ready_queue = ReadyQueue(self._buckets, overlap=shard.spec.overlap)
        self._members = Members(frozenset(shard.workers), least=shard.member.membership.least)
        self._changed = threading.Condition()  # guards what follows, and the beginning of a round
        self._new: list[WorkerLink] = []  # they want the present values
        self._first: dict[int, int] = {}  # by rank: the round from which a new one takes part
        self._coming: frozenset[int] = frozenset()  # who will take part: also those of whom there is nothing yet
        self._watching: frozenset[int] = frozenset()  # new ones, who get each version
        self._short = False  # no round begins, because there are too few
        self._here: frozenset[int] = frozenset()  # whose heads the round has: they take part, and may be lost since
        self._sameness = Sameness(len(shard.workers) if shard.index == 0 else 1)
        self.step = 0  # rounds begun
        self.updates = 0  # rounds that were steps of the training
        self._contributors = [self._here] * len(self._buckets)  # of the round
        shard.keep_snapshots()

    @property
    def workers(self) -> dict[int, WorkerLink]:
        """By rank, also of those that were lost."""
        return self.shard.workers

    def run(self) -> None:
        """Round after round, until every worker has finished."""
        while True:
            if not self._begin_round():
                return
            heads = self._take_part()
            self._here = frozenset(heads)
            operation = self._agree(heads) if heads else StepOperation.IDLE
            if operation is StepOperation.FINISH:
                return
            self.shard.before_round(self.step)
            if operation is StepOperation.UPDATE:
                if self.shard.spec.alike:
                    check_alike({w: head.options for w, head in heads.items()}, self.updates)
                self._update(heads[min(heads)])
            elif operation is StepOperation.ASSIGN:
                self._assign()
            else:
                self._stay(operation)
                if operation is StepOperation.SKIP:
                    self._discard(heads)
                    self._send_norm(LEFT_OUT, [w for w, head in heads.items() if head.max_norm])
            if not self._buckets:
                self._publish(0)
            self.updates += operation in STEPS
            self.shard.completed(self.step)

    # ---- who takes part

    def admit(self, rank: int, incarnation: int) -> None:
        """Lets a worker join; in a thread for that. Returns when it is settled in which round it takes part first.

        Between two rounds it gets the present values, and then those of each round. When it is ready it says from which
        round on it wants to take part, and is told at once from which one it will.
        """
        with self._changed:
            self._coming |= {rank}
        try:
            worker = self.shard.link(rank, incarnation)
            with self._changed:
                self._new.append(worker)
                self._changed.notify_all()
            asked = self.shard.wait_for(worker.join, 1)
            with self._changed:
                first = self._first[rank] = self.step + 1 if self._short else max(asked, self.step + 1)
                self._changed.notify_all()
            worker.first.send(first)
        except PeerLost as error:
            self.shard.member.await_loss(rank, error)
            with self._changed:
                self._coming -= {rank}
                self._changed.notify_all()

    def _begin_round(self) -> bool:
        """Between two rounds, who is new gets values, and who has said so takes part; it waits while there are too few.

        False: all have finished.
        """
        with self._changed:
            while True:
                joined = self._let_in()
                if self._members.active or self._members.idle:
                    if self._members.enough or self._first:
                        break
                elif self._members.finished and not self._coming:
                    return False
                elif self._first:
                    break  # rounds go on without anybody until the first of those takes part
                self.shard.member.check()
                self._short = True
                self._changed.wait(_LOOK)
            self._short = False
            self.step += 1
        for rank in joined:
            self._tell(rank, lambda worker: worker.updates.send(self.updates + 1))
        return True

    def _let_in(self) -> list[int]:
        """Those who take part from the next round on. The caller holds the lock."""
        new, self._new = self._new, []
        for worker in new:
            self.shard.replace(worker)
            self._watching |= {worker.index}
            for bucket in range(max(1, len(self._buckets))) if self.step else ():
                self._tell(worker.index, partial(self._send_version, bucket, self.step))
        joined = sorted(rank for rank, first in self._first.items() if first <= self.step + 1)
        for rank in joined:
            del self._first[rank]
            self._watching -= {rank}
            self._coming -= {rank}
            self._members = self._members.join(rank)
        return joined

    def _take_part(self) -> dict[int, StepHeader]:
        """The heads of the workers that take part in this round: those that are not idle."""
        heads: dict[int, StepHeader] = {}
        for rank in sorted(self._members.active):
            try:
                heads[rank] = self.shard.head(self.workers[rank], self.step)
            except PeerLost as error:
                self._lose(rank, error)
        for rank, head in list(heads.items()):
            if head.operation is StepOperation.IDLE:
                self._members = self._members.rest(rank)
                del heads[rank]
            elif head.operation is StepOperation.ABSENT:
                del heads[rank]
            elif head.operation is StepOperation.FINISH and self.shard.member.membership.survives:
                self._members = self._members.finish(rank)
                del heads[rank]
        return heads

    def _lose(self, rank: int, error: PeerLost) -> None:
        """A channel ended with ``error``: the worker is out of the job, or that ends."""
        self.shard.member.await_loss(rank, error)
        self._members = self._members.lose(rank)
        self.fates.gave_up(rank, self.workers[rank].incarnation)
        with self._changed:
            self._watching -= {rank}
            self._coming -= {rank}
            self._first.pop(rank, None)

    def _agree(self, heads: Mapping[int, StepHeader]) -> StepOperation:
        return agreed({w: head.operation for w, head in heads.items()}, sorted(self._members.idle), self.updates)

    def _stay(self, operation: StepOperation) -> None:
        """A round that leaves parameters as they are: state is loaded, a step skipped, or all are idle and go on."""
        if operation is StepOperation.LOAD:
            self.shard.load(self.step, min(self._here))
        for bucket in range(len(self._buckets)):
            self._carry(bucket)
        if operation is StepOperation.IDLE:
            self._members = self._members.resume()
            for rank in sorted(self._members.active):
                self._tell(rank, lambda worker: worker.together.send(self.step))

    def _carry(self, bucket: int) -> None:
        """A bucket keeps its values in this round."""
        self.shard.before_write(bucket, self.step)
        self.rule.carry(bucket, self.step)
        self._publish(bucket)

    def _assign(self) -> None:
        for bucket, push in enumerate(self.workers[min(self._here)].pushes):
            self.shard.before_write(bucket, self.step)
            self.rule.assign(bucket, self.shard.receive(push, self.step), self.step)
            self._publish(bucket)

    def _update(self, head: StepHeader) -> None:
        self.rule.set_options(head.options)
        later = head.max_norm > 0 or self.rule.together
        taking = [w for w in self.workers.values() if w.index in self._here | self._members.idle]
        kept: list[int] = []
        for bucket in self._arriving():
            ready = clock()
            # From here on it is settled: a push that has come counts, though its worker may be lost since.
            self._contributors[bucket] = came = self._came(bucket)
            pushes = [w.push(bucket, self._present(w, bucket, came)) for w in taking]
            if self._sameness.watching:
                self._sameness.compare([p.slot for p in pushes], [p.present for p in pushes])
            self.rule.reduce(bucket, pushes, self._divisor(came), keep=later)
            self.shard.reach(self.updates + 1, "reduced")
            if later:
                spans.add("update", self.step, ready, clock())
                kept.append(bucket)
                continue
            self._apply(bucket, ready)
        if later:
            self._update_kept(kept, head.max_norm)
        if self._sameness.watching and self._sameness.end_round():
            self._sameness.warn()

    def _update_kept(self, buckets: list[int], max_norm: float) -> None:
        """All gradients are there, and the norm of all is known: one update."""
        total = self._norm2() if max_norm else 0.0
        if total == LEFT_OUT or math.isnan(total):
            why = "no worker was left to say the norm" if math.isnan(total) else "the norm is not finite"
            for bucket in buckets:
                self.fates.discarded(bucket, self._sent(self._contributors[bucket]), why)
                self._carry(bucket)
            return
        scale = clipping(math.sqrt(total), max_norm) if max_norm else 1.0
        if not self.rule.together:
            for bucket in buckets:
                self._apply(bucket, clock(), scale)
            return
        start = clock()
        for bucket in range(len(self._buckets)):
            self.shard.before_write(bucket, self.step)
        self.rule.apply_all(self.step, scale)
        spans.add("update", self.step, start, clock())
        for bucket in buckets:
            self._merged(bucket)
            self._publish(bucket)

    def _apply(self, bucket: int, start: float, scale: float = 1.0) -> None:
        self.shard.before_write(bucket, self.step)
        self.rule.apply(bucket, self.step, scale)
        spans.add("update", self.step, start, clock())
        self._merged(bucket)
        self._publish(bucket)

    def _divisor(self, contributors: AbstractSet[int]) -> int:
        return max(1, divisor(self._members, contributors, self.shard.spec.reduce))

    def _merged(self, bucket: int) -> None:
        self.shard.reach(self.updates + 1, "applied")
        came = self._contributors[bucket]
        self.fates.merged(bucket, self._sent(came), self.updates + 1, 1 / self._divisor(came))

    def _sent(self, ranks: Iterable[int]) -> list[Sent]:
        return [Sent(rank, self.workers[rank].incarnation, self.step) for rank in sorted(ranks)]

    def _discard(self, heads: Mapping[int, StepHeader]) -> None:
        """One worker has found an inf: what the others push is not looked at."""
        pushing = [w for w, head in heads.items() if head.operation is StepOperation.UPDATE]
        for bucket in range(len(self._buckets)) if pushing else ():
            self.fates.discarded(bucket, self._sent(pushing), "another worker skipped the step")

    def _present(self, worker: WorkerLink, bucket: int, contributors: AbstractSet[int]) -> bytes:
        """A byte a piece; those who do not contribute have no gradients."""
        present = worker.present[bucket]
        return bytes(present) if worker.index in contributors else bytes(len(present))

    def _arriving(self) -> Iterator[int]:
        """The buckets, as all workers' gradients for them have come."""
        return self._ready_queue.of_round(self._is_there, self._poll)

    def _is_there(self, bucket: int) -> bool:
        return is_complete(self._members, lambda rank: rank not in self._here or self._has_pushed(rank, bucket))

    def _has_pushed(self, rank: int, bucket: int) -> bool:
        return self.workers[rank].pushes[bucket].ready(self.step)

    def _came(self, bucket: int) -> frozenset[int]:
        """Whose gradients of a bucket have come in this round."""
        return frozenset(rank for rank in self._here if self._has_pushed(rank, bucket))

    def _poll(self, bucket: int, seconds: float) -> None:
        """Waits for all workers' gradients of a bucket, but no longer."""
        try:
            for rank in sorted(self._here & self._members.active):
                try:
                    self.workers[rank].pushes[bucket].receive(self.step, seconds)
                except PeerLost as error:
                    self._lose(rank, error)
        except WaitTimeout:
            self.shard.member.check()

    def _norm2(self) -> float:
        """The sum of squares over all servers: workers add up the parts, and tell the sum, or to leave the step out.

        All have the same sum, so that of the first who is there will do; NaN: there is nobody any more.
        """
        self._send_norm(sum(self.rule.norm2(b) for b in range(len(self._buckets))), sorted(self._here))
        for rank in sorted(self._here & self._members.active):
            try:
                (total,) = NORM.unpack(self.shard.receive(self.workers[rank].norm, self.step))
                return float(total)
            except PeerLost as error:
                self._lose(rank, error)
        return math.nan

    def _send_norm(self, part: float, ranks: Iterable[int]) -> None:
        def send(worker: WorkerLink) -> None:
            worker.norm_back.slot(self.step)[:] = NORM.pack(part)
            worker.norm_back.send(self.step)

        for rank in ranks:
            self._tell(rank, send)

    def _tell(self, rank: int, send: Callable[[WorkerLink], object]) -> None:
        """Sends a worker something, if it is there."""
        members = self._members
        if rank in members.active or rank in members.idle or rank in self._watching:
            try:
                send(self.workers[rank])
            except PeerLost as error:
                self._lose(rank, error)

    def _send_version(self, bucket: int, round: int, worker: WorkerLink) -> None:
        pull = worker.pulls[bucket]
        if not pull.mapped:
            pull.slot(round)  # the last version's bytes have left
        pull.send(round)

    def _publish(self, bucket: int) -> None:
        send = partial(self._send_version, bucket, self.step)
        for rank in self.workers:
            self._tell(rank, send)
            self.shard.reach(self.updates + 1, "published_some")
