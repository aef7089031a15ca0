"""Every worker's rounds at its own pace: all modes but `Sync`.

A thread per worker waits for that worker's pushes, and contributes each to the open round of its bucket. A round closes
when its quorum is there, in the thread of whoever completes it; or, if others are given some time to join, in a thread
for that. Then the contributions are merged, the rule is applied, and those who contributed are answered. A lock per
bucket puts all of it in order. Where some workers of all are a quorum, `QuorumRounds` says who contributes.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from queue import SimpleQueue

import numpy as np

from tensorwire.errors import ProtocolError
from tensorwire.observe import counters, spans
from tensorwire.observe.spans import clock
from tensorwire.store.deadlines import Deadlines
from tensorwire.store.grace import grace_of
from tensorwire.store.modes import SSP, Async, DiLoCo, Sync, quorum_of
from tensorwire.store.pushes import Push
from tensorwire.store.quorum_rounds import QuorumRounds
from tensorwire.store.server_state import take_state
from tensorwire.store.shard import Shard, WorkerLink
from tensorwire.store.step_header import STEPS, StepHeader, StepOperation
from tensorwire.store.worker_clocks import WorkerClocks
from tensorwire.store.worker_threads import Ends, attend


@dataclass(frozen=True)
class _Contribution:
    """A worker's push, of its round ``step``, to the open round of a bucket, of whose version ``based`` it came.

    ``answered``: the worker was late, and waits for no answer.
    """

    rounds: _Rounds
    step: int
    head: StepHeader
    push: Push
    based: int
    answered: bool = False

    @property
    def worker(self) -> int:
        """Who pushed."""
        return self.rounds.worker


class OwnClocks:
    """Applies pushes as they come, and answers their workers with the version that they led to."""

    def __init__(self, shard: Shard) -> None:
        mode = shard.spec.mode
        assert not isinstance(mode, Sync)
        self.mode, self.shard, self.rule = mode, shard, shard.rule
        buckets = shard.plan.buckets[shard.index]
        self.locks = [threading.Lock() for _ in buckets]
        self.versions = [0] * len(buckets)
        self.values = [np.frombuffer(memoryview(shard.parameters), np.uint8, b.nbytes, b.shard) for b in buckets]
        self.workers = WorkerClocks(shard.member, len(shard.workers))
        self.bound = mode.staleness if isinstance(mode, SSP) else None
        self._most = mode.max_staleness if isinstance(mode, Async) else None
        self._damping = mode.damping if isinstance(mode, (Async, SSP)) else 0.0
        self._rates = [i for i, (_, option, _) in enumerate(shard.spec.numeric) if option == "lr"]
        self._open: list[list[_Contribution]] = [[] for _ in buckets]  # the contributions to each bucket's round
        count = mode.fragments if isinstance(mode, DiLoCo) else 1
        numbers = shard.plan.fragments(count)
        self.fragments = [[b.index for b in buckets if numbers[b.number] == f] for f in range(count)]
        everyone, quorum, grace = len(shard.workers), quorum_of(mode, len(shard.workers)), grace_of(mode)
        some = 1 < quorum < everyone
        self.quorum_rounds = (
            QuorumRounds(shard, quorum, self.fragments, grace, self._close_with, self._keep) if some else None
        )
        self._grace = None if some else grace
        self._deadlines = Deadlines(self._close_late) if self._grace is not None else None

    def run(self) -> None:
        """Returns when every worker has finished. Raises the first error of a worker's thread."""
        ends: Ends = SimpleQueue()
        calls = {f"{self.shard.name} {w.name}": _Rounds(self, w).run for w in self.shard.workers}
        rounds, finished = self.quorum_rounds, False
        if rounds is not None and self.shard.index:
            calls[f"{self.shard.name} decisions"] = rounds.follow
        if self._deadlines is not None:
            self._deadlines.start(f"{self.shard.name} grace", ends)
        if rounds is not None:
            rounds.start(ends)
        try:
            attend(calls, ends)
            finished = True
        finally:
            if self._deadlines is not None:
                self._deadlines.stop()
            if rounds is not None:
                rounds.stop(finished=finished)

    @contextlib.contextmanager
    def at_rest(self, bucket: int | None = None) -> Iterator[None]:
        """Inside it no round of a bucket closes, or no round at all."""
        if self.quorum_rounds is not None and not bucket:  # what comes late meanwhile counts in an update, as ever
            self.quorum_rounds.merge_late()
        with contextlib.ExitStack() as held:
            for lock in self.locks if bucket is None else self.locks[bucket : bucket + 1]:
                held.enter_context(lock)
            yield

    # ---- a round of a bucket

    def contribute(self, bucket: int, contribution: _Contribution) -> None:
        """Adds to the open round of a bucket, and closes it if that is due. The caller holds the bucket's lock."""
        self._open[bucket].append(contribution)
        if self._grace is not None:
            self._grace.contributed(bucket, contribution.worker)
        self._close_if_due(bucket)

    def leave(self, worker: int) -> None:
        """A worker has finished: no round waits for it."""
        self.workers.leave(worker)
        if self.quorum_rounds is not None:
            self.quorum_rounds.leave(worker)
            return
        for bucket, lock in enumerate(self.locks):
            with lock:
                self._close_if_due(bucket)

    def _close_if_due(self, bucket: int) -> None:
        here, active = self._open[bucket], self.workers.active
        missing = len(active - {c.worker for c in here})
        if not here or missing > len(active) - quorum_of(self.mode, len(active)):
            return
        if self._grace is None or self._deadlines is None or not missing:
            self._close(bucket)
        else:
            at = self._grace.deadline(bucket, [c.worker for c in here])
            self._deadlines.set(at, bucket, self.versions[bucket])

    def _close_late(self, bucket: int, version: int) -> None:
        """The time for joining the round after ``version`` is over."""
        with self.locks[bucket]:
            if self.versions[bucket] == version and self._open[bucket]:
                self._close(bucket)

    def _close(self, bucket: int) -> None:
        """Closes the open round of a bucket. The caller holds the bucket's lock."""
        start = clock()
        here, self._open[bucket] = self._open[bucket], []
        self._merge_and_answer(bucket, here)
        if self._grace is not None:
            self._grace.updated(bucket, clock() - start)

    def _close_with(self, bucket: int, here: list[_Contribution]) -> None:
        """Closes a round of a bucket with these contributions."""
        with self.locks[bucket]:
            self._merge_and_answer(bucket, here)

    def _keep(self, bucket: int, late: _Contribution) -> _Contribution:
        """Answers a worker that is late. What it pushed, in memory that its next push does not change."""
        with self.locks[bucket]:
            kept = late.rounds.kept(bucket, late.push)
            late.rounds.answer_if_due(bucket, late.step)
        return replace(late, push=kept, answered=True)

    def _merge_and_answer(self, bucket: int, here: list[_Contribution]) -> None:
        """Merges, applies and answers. The caller holds the bucket's lock."""
        start = clock()
        here.sort(key=lambda c: (c.worker, c.step))
        if not self._is_too_stale([bucket], here[0]):
            self._merge([bucket], here)
        for c in here:
            if not c.answered:
                c.rounds.answer_if_due(bucket, c.step)
        spans.add("update", here[0].step, start, clock())

    def _is_too_stale(self, buckets: Sequence[int], contribution: _Contribution) -> bool:
        """Whether a push knows too little of the others'; then it is discarded. The caller holds the buckets' locks."""
        if self._most is None:
            return False
        staleness = self.versions[buckets[0]] - contribution.rounds.based[buckets[0]]
        if staleness <= self._most:
            return False
        for bucket in buckets:
            self.shard.fates.discarded(bucket, [contribution.worker], contribution.step, "too stale", staleness)
        return True

    def _merge(self, buckets: Sequence[int], here: Sequence[_Contribution]) -> None:
        rule, bucket = self.rule, buckets[0]
        total = sum(c.push.weight for c in here)
        staleness = [self.versions[bucket] - c.based for c in here]
        rule.set_options(self._options(here[0].head, staleness[0]), bucket)
        for each in buckets:
            pushes = [c.push if each == bucket else c.rounds.push(each, c.push.weight) for c in here]
            rule.reduce(each, pushes, total, keep=True)
        if rule.together:
            rule.apply_all(0)
        else:
            rule.apply(bucket, 0)
        for each in buckets:
            self.versions[each] += 1
            weights = [c.push.weight / total for c in here]
            alone = quorum_of(self.mode, 2) == 1 and self._deadlines is None
            self.shard.fates.closed(
                each, self.versions[each], [(c.worker, c.step) for c in here], weights, staleness, alone=alone
            )

    def merge_together(self, contribution: _Contribution) -> None:
        """For a rule that takes all buckets at once: one worker's pushes to all of them. The caller holds all locks."""
        buckets = range(len(self.versions))
        if not self._is_too_stale(buckets, contribution):
            self._merge(buckets, [contribution])

    def _options(self, head: StepHeader, staleness: int) -> tuple[float, ...]:
        """A worker's options, the learning rate damped by the staleness of its push."""
        if not self._damping or not staleness:
            return head.options
        options = list(head.options)
        for place in self._rates:
            options[place] /= 1 + self._damping * staleness
        return tuple(options)


class _Rounds:
    """The rounds of one worker, in its thread."""

    def __init__(self, clocks: OwnClocks, worker: WorkerLink) -> None:
        self._clocks, self._worker = clocks, worker
        self._shard, self._rule = clocks.shard, clocks.rule
        self.based = [0] * len(clocks.locks)  # by bucket: the version that the worker has
        self._late: list[int] = []  # answers that have to wait for slower workers
        pulls = worker.pulls[: len(clocks.locks)]
        self._answers = [np.frombuffer(pull.memory, np.uint8, pull.nbytes) for pull in pulls]
        self._slots = [np.frombuffer(slot, np.uint8) for slot in worker.slots]
        self._kept: dict[int, memoryview] = {}  # by bucket: what it pushed late
        self.worker = worker.index
        self._step = 0

    def run(self) -> None:
        clocks, worker = self._clocks, self._worker
        for self._step in itertools.count(1):
            head = self._shard.head(worker, self._step)
            operation = head.operation
            if operation is StepOperation.FINISH:  # it does not wait for anything, and may be gone
                clocks.leave(worker.index)
                return
            worker.together.send(self._step)  # the head has been read
            if operation is StepOperation.UPDATE:
                self._update(head)
            else:
                if operation is not StepOperation.SKIP:
                    self._meet(operation)
                self._late = list(range(len(self.based)))
            clocks.workers.tick(worker.index, operation in STEPS)
            if self._late and clocks.bound is not None:
                clocks.workers.wait_for_slowest(worker.index, clocks.bound)
            for bucket in self._late:
                with clocks.locks[bucket]:
                    self._answer(bucket, self._step, first=operation is not StepOperation.UPDATE)
            self._late = []
            if not self.based:
                worker.pulls[0].send(self._step)
            if operation not in (StepOperation.UPDATE, StepOperation.SKIP):
                self._await_answers(operation)

    def _update(self, head: StepHeader) -> None:
        """Contributes to the rounds of all buckets, or of those of the head's fragment."""
        clocks = self._clocks
        if head.fragment >= len(clocks.fragments):
            raise ProtocolError(f"{self._worker.name} sent fragment {head.fragment} of {len(clocks.fragments)}")
        buckets = clocks.fragments[head.fragment]
        here: dict[int, _Contribution] = {}
        for bucket in buckets:
            self._shard.receive(self._worker.pushes[bucket], self._step)
            if self._rule.together:
                continue
            here[bucket] = _Contribution(self, self._step, head, self.push(bucket, head.weight), self.based[bucket])
            if clocks.quorum_rounds is None:
                with clocks.locks[bucket]:
                    clocks.contribute(bucket, here[bucket])
        if clocks.quorum_rounds is not None:
            clocks.quorum_rounds.contribute(head.fragment, self._worker.index, here)
        if self._rule.together and buckets:
            start = clock()
            with clocks.at_rest():
                clocks.merge_together(_Contribution(self, self._step, head, self.push(0, head.weight), self.based[0]))
            spans.add("update", self._step, start, clock())
            self._late = list(buckets)

    def push(self, bucket: int, weight: float) -> Push:
        """What the worker has pushed to a bucket in this round; asked for once a round."""
        return self._worker.push(bucket, bytes(self._worker.present[bucket]), weight)

    def kept(self, bucket: int, push: Push) -> Push:
        """A copy of a push, of which one a bucket is in use at most.

        Rules know slots by the number of their worker, and so this has a number of its own.
        """
        if bucket not in self._kept:
            self._kept[bucket] = memoryview(bytearray(len(push.slot)))
        self._kept[bucket][:] = push.slot
        counters.add(copies=1, copied_bytes=len(push.slot))
        return push._replace(worker=push.worker + len(self._shard.workers), slot=self._kept[bucket])

    def _meet(self, operation: StepOperation) -> None:
        """All workers do this in the same place of their programs; worker 0's values count."""
        workers = self._clocks.workers
        if not workers.enter(self._worker.index, operation):
            return
        if self._clocks.quorum_rounds is not None:
            self._clocks.quorum_rounds.meet()
        with self._clocks.at_rest():
            if operation is StepOperation.LOAD:
                take_state(self._shard.member, self._shard.name, self._step, self._rule)
            else:
                for bucket, push in enumerate(self._shard.workers[0].pushes):
                    self._rule.assign(bucket, self._shard.receive(push, self._step), 0)
        workers.end()

    def _await_answers(self, operation: StepOperation) -> None:
        """Returns when all have been answered after `_meet`: until then no push changes what a slower worker gets."""
        workers = self._clocks.workers
        if workers.enter(self._worker.index, operation):
            workers.end()

    def answer_if_due(self, bucket: int, step: int) -> None:
        """Answers, unless the worker would be too far ahead of others. The caller holds the bucket's lock."""
        bound, workers = self._clocks.bound, self._clocks.workers
        if bound is None or workers.ahead(self._worker.index) < bound:
            self._answer(bucket, step)
        else:
            self._late.append(bucket)

    def _answer(self, bucket: int, step: int, *, first: bool = False) -> None:
        """Sends the worker the present version of a bucket, or what the rule has put into its slot.

        The caller holds the bucket's lock. ``first``: the version itself, whatever the rule.
        """
        pull = self._worker.pulls[bucket]
        memory = pull.slot(step)
        source = self._slots[bucket] if self._rule.answers_in_slot and not first else self._clocks.values[bucket]
        if source.ctypes.data != self._answers[bucket].ctypes.data:
            np.copyto(self._answers[bucket], source)
            counters.add(copies=1, copied_bytes=memory.nbytes)
        decoder = self._worker.decoders[bucket]
        if decoder is not None:
            decoder.answered(memory, first=first)
        pull.send(step)
        self.based[bucket] = self._clocks.versions[bucket]
