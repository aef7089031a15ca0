"""All workers of a store round by round together: the mode `Sync`."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from collections.abc import Set as AbstractSet

from tensorwire.errors import PeerLost, WaitTimeout
from tensorwire.observe import spans
from tensorwire.observe.spans import clock
from tensorwire.store.consensus import agreed, check_alike
from tensorwire.store.ready_queue import ReadyQueue
from tensorwire.store.rounds import Members, divisor, is_complete
from tensorwire.store.sameness import Sameness
from tensorwire.store.shard import Shard, WorkerLink
from tensorwire.store.step_header import LEFT_OUT, NORM, STEPS, StepHeader, StepOperation, clipping


class Lockstep:
    """Waits for the workers' rounds, applies the rule to what all of them pushed, publishes the new version."""

    def __init__(self, shard: Shard) -> None:
        self.shard = shard
        self.workers, self.rule, self.fates = shard.workers, shard.rule, shard.fates
        self._buckets = shard.plan.buckets[shard.index]
        self._ready_queue = ReadyQueue(self._buckets, overlap=shard.spec.overlap)
        self._members = Members(frozenset(self.workers))
        self._here: frozenset[int] = frozenset()  # whose heads the round has: they take part, and may be lost since
        self._sameness = Sameness(len(self.workers) if shard.index == 0 else 1)
        self.step = 0  # rounds begun
        self.updates = 0  # rounds that were steps of the training
        self._contributors = [self._here] * len(self._buckets)  # of the round
        shard.keep_snapshots()

    def run(self) -> None:
        """Round after round, until every worker has finished."""
        while True:
            self.step += 1
            heads = self._take_part()
            self._here = frozenset(heads)
            if not (heads or self._members.idle):
                if self._members.finished:
                    return
                raise self.shard.end()
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
            elif head.operation is StepOperation.FINISH and self.shard.member.membership.survives:
                self._members = self._members.finish(rank)
                del heads[rank]
        return heads

    def _lose(self, rank: int, error: PeerLost) -> None:
        """A channel ended with ``error``: the worker is out of the job, or that ends."""
        self.shard.await_loss(rank, error)
        self._members = self._members.lose(rank)

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
        kept: list[int] = []
        for bucket in self._arriving():
            ready = clock()
            # From here on it is settled: a push that has come counts, though its worker may be lost since.
            self._contributors[bucket] = came = self._came(bucket)
            pushes = [w.push(bucket, self._present(w, bucket, came)) for w in self.workers.values()]
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
        if total == LEFT_OUT:
            for bucket in buckets:
                self.fates.discarded(bucket, sorted(self._contributors[bucket]), self.step, "the norm is not finite")
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
        self.fates.merged(bucket, sorted(came), self.step, self.updates + 1, 1 / self._divisor(came))

    def _discard(self, heads: Mapping[int, StepHeader]) -> None:
        """One worker has found an inf: what the others push is not looked at."""
        pushing = [w for w, head in heads.items() if head.operation is StepOperation.UPDATE]
        for bucket in range(len(self._buckets)) if pushing else ():
            self.fates.discarded(bucket, pushing, self.step, "another worker skipped the step")

    def _present(self, worker: WorkerLink, bucket: int, contributors: AbstractSet[int]) -> bytes:
        """A byte a piece; those who do not contribute have no gradients."""
        present = worker.present[bucket]
        return bytes(present) if worker.index in contributors else bytes(len(present))

    def _arriving(self) -> Iterator[int]:
        """The buckets, as all workers' gradients for them have come."""
        yield from self._ready_queue.of_round(self._is_there, self._poll)

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

        All have the same sum, so that of the first who is there will do.
        """
        self._send_norm(sum(self.rule.norm2(b) for b in range(len(self._buckets))), sorted(self._here))
        for rank in sorted(self._here & self._members.active):
            try:
                (total,) = NORM.unpack(self.shard.receive(self.workers[rank].norm, self.step))
                return float(total)
            except PeerLost as error:
                self._lose(rank, error)
        raise self.shard.end()

    def _send_norm(self, part: float, ranks: Iterable[int]) -> None:
        def send(worker: WorkerLink) -> None:
            worker.norm_back.slot(self.step)[:] = NORM.pack(part)
            worker.norm_back.send(self.step)

        for rank in ranks:
            self._tell(rank, send)

    def _tell(self, rank: int, send: Callable[[WorkerLink], object]) -> None:
        """Sends a worker something, if it is there."""
        if rank in self._members.active | self._members.idle:
            try:
                send(self.workers[rank])
            except PeerLost as error:
                self._lose(rank, error)

    def _publish(self, bucket: int) -> None:
        def send(worker: WorkerLink) -> None:
            pull = worker.pulls[bucket]
            if not pull.mapped:
                pull.slot(self.step)  # the last version's bytes have left
            pull.send(self.step)

        for rank in self.workers:
            self._tell(rank, send)
            self.shard.reach(self.updates + 1, "published_some")
