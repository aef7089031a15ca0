"""Every worker's rounds at its own pace: all modes but `Sync`.

A thread per worker waits for that worker's pushes, and contributes each to the open round of its bucket. A round closes
when its quorum is there, in the thread of whoever completes it; or, if others are given some time to join, in a thread
for that. Then the contributions are merged, the rule is applied, and those who contributed are answered. A lock per
bucket puts all of it in order. Each bucket decides for itself who contributes, by the rules of `rounds`.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from queue import Empty, SimpleQueue

import numpy as np

from tensorwire.errors import PeerLost, ProtocolError
from tensorwire.observe import counters, spans
from tensorwire.observe.spans import clock
from tensorwire.store.deadlines import Deadlines
from tensorwire.store.fates import Sent
from tensorwire.store.grace import grace_of
from tensorwire.store.modes import SSP, Async, DiLoCo, Sync, quorum_of
from tensorwire.store.pushes import Push, source_of
from tensorwire.store.rounds import is_complete, is_due, is_late
from tensorwire.store.shard import Shard, WorkerLink
from tensorwire.store.step_header import STEPS, StepHeader, StepOperation
from tensorwire.store.versions.snapshots import Moments
from tensorwire.store.worker_clocks import WorkerClocks
from tensorwire.store.worker_threads import Ends, start_attended

_LOOK = 1.0  # seconds between looks at the job


@dataclass(frozen=True)
class _Contribution:
    """A worker's push, of its round ``step``, to a round of a bucket, of whose version ``based`` it came.

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

    @property
    def sent(self) -> Sent:
        """The same, for its fate."""
        return Sent(self.rounds.worker, self.rounds.incarnation, self.step)


@dataclass
class _Bucket:
    """The open round of a bucket, with what has come by worker. ``lock`` guards it, the bucket's values and answers."""

    pushes: dict[int, int]  # how many have come
    lock: threading.Lock = field(default_factory=threading.Lock)
    version: int = 0  # updates of the values
    closed: int = 0  # rounds; an update that nobody waited for was none
    here: dict[int, _Contribution] = field(default_factory=dict)
    kept: dict[int, _Contribution] = field(default_factory=dict)  # of those that were late


class OwnClocks:
    """Applies pushes as they come, and answers their workers with the version that they led to."""

    def __init__(self, shard: Shard) -> None:
        mode = shard.spec.mode
        assert not isinstance(mode, Sync)
        self.shard, self.rule = shard, shard.rule
        buckets = shard.plan.buckets[shard.index]
        self.workers = WorkerClocks(shard.member, shard.workers)
        self.buckets = [_Bucket(dict.fromkeys(self.workers.members.active, 0)) for _ in buckets]
        self.values = [np.frombuffer(memoryview(shard.parameters), np.uint8, b.nbytes, b.shard) for b in buckets]
        self.bound = mode.staleness if isinstance(mode, SSP) else None
        self._most = mode.max_staleness if isinstance(mode, Async) else None
        self._damping = mode.damping if isinstance(mode, (Async, SSP)) else 0.0
        self._rates = [i for i, (_, option, _) in enumerate(shard.spec.numeric) if option == "lr"]
        count = mode.fragments if isinstance(mode, DiLoCo) else 1
        numbers = shard.plan.fragments(count)
        self.fragments = [[b.index for b in buckets if numbers[b.number] == f] for f in range(count)]
        self._ends: Ends = SimpleQueue()
        self._running = 0  # threads of workers
        self._counting = threading.Lock()
        self._quorum, self._grace = quorum_of(mode), grace_of(mode)
        self._deadlines = Deadlines(self._close_late) if self._grace is not None else None
        shard.keep_snapshots(Moments(self.at_rest, lambda bucket: self.buckets[bucket].version))

    def run(self) -> None:
        """Returns when every worker has finished. Raises the first error of a worker's thread."""
        for worker in self.shard.workers.values():
            self._start(worker.name, _Rounds(self, worker).run)
        if self._deadlines is not None:
            self._deadlines.start(f"{self.shard.name} grace", self._ends)
        try:
            while self._running or not self.workers.members.finished:
                with contextlib.suppress(Empty):
                    error = self._ends.get(timeout=_LOOK)
                    if error is not None:
                        raise error
                    with self._counting:
                        self._running -= 1
                self.shard.member.check()
        finally:
            if self._deadlines is not None:
                self._deadlines.stop()

    def _start(self, name: str, call: Callable[[], None]) -> None:
        with self._counting:
            self._running += 1
        start_attended(f"{self.shard.name} {name}", call, self._ends)

    def admit(self, rank: int, incarnation: int) -> None:
        """Lets a worker join, in a thread: it gets the present values, and takes part from its first push."""

        def join() -> None:
            try:
                worker = self.shard.link(rank, incarnation)
            except PeerLost as error:
                self.shard.member.await_loss(rank, error)
                return
            self.shard.replace(worker)
            _Rounds(self, worker).run()

        self._start(f"worker {rank}", join)

    def take_part(self, rank: int) -> None:
        """From now on rounds wait for a worker."""
        for state in self.buckets:
            with state.lock:
                state.pushes[rank] = state.closed
        self.workers.join(rank)
        self._close_where_due()

    @contextlib.contextmanager
    def at_rest(self, bucket: int | None = None) -> Iterator[None]:
        """Inside it no round of a bucket closes, or no round at all."""
        numbers = range(len(self.buckets))
        chosen = numbers if bucket is None else numbers[bucket : bucket + 1]
        with contextlib.ExitStack() as held:
            for each in chosen:
                held.enter_context(self.buckets[each].lock)
                self._merge_kept(each)  # values are to be saved, or set
            yield

    # ---- a round of a bucket; the caller holds the bucket's lock

    def contribute(self, bucket: int, contribution: _Contribution) -> None:
        """Adds to the open round of a bucket, and closes it if that is due; or keeps what comes late."""
        state, worker = self.buckets[bucket], contribution.worker
        state.pushes[worker] += 1
        if is_late(self._quorum, state.pushes[worker], state.closed):
            self._keep(bucket, contribution)
            return
        state.here[worker] = contribution
        if self._grace is not None:
            self._grace.contributed(bucket, worker)
        self._close_if_due(bucket)

    def _close_if_due(self, bucket: int) -> None:
        state, members = self.buckets[bucket], self.workers.members
        if not is_due(members, state.here.keys(), self._quorum, state.kept.keys()):
            return
        if self._grace is None or self._deadlines is None or is_complete(members, state.here.__contains__):
            self._close(bucket)
        else:
            self._deadlines.set(self._grace.deadline(bucket, list(state.here)), bucket, state.closed)

    def _close(self, bucket: int) -> None:
        start, state = clock(), self.buckets[bucket]
        here, state.here = [*state.kept.values(), *state.here.values()], {}
        state.kept = {}
        self._merge_and_answer(bucket, here)
        state.closed += 1
        if self._grace is not None:
            self._grace.updated(bucket, clock() - start)

    def _keep(self, bucket: int, late: _Contribution) -> None:
        """Answers a worker that is late. One push of it is kept at most: an earlier one is merged before."""
        state = self.buckets[bucket]
        if late.worker in state.kept:
            self._merge_kept(bucket)
        kept = late.rounds.kept(bucket, late.push)
        late.rounds.answer_if_due(bucket, late.step)
        state.kept[late.worker] = replace(late, push=kept, answered=True)

    def _merge_kept(self, bucket: int) -> None:
        """What workers pushed late does not wait for the next round."""
        state = self.buckets[bucket]
        if state.kept:
            kept, state.kept = list(state.kept.values()), {}
            self._merge_and_answer(bucket, kept)

    def _merge_and_answer(self, bucket: int, here: list[_Contribution]) -> None:
        """Merges, applies and answers."""
        start = clock()
        here.sort(key=lambda c: (c.worker, c.step))
        if not self._is_too_stale([bucket], here[0]):
            self._merge([bucket], here)
        for c in here:
            if not c.answered:
                c.rounds.answer_if_due(bucket, c.step)
        spans.add("update", here[0].step, start, clock())

    def _is_too_stale(self, buckets: Sequence[int], contribution: _Contribution) -> bool:
        """Whether a push knows too little of the others'; then it is discarded."""
        if self._most is None:
            return False
        staleness = self.buckets[buckets[0]].version - contribution.rounds.based[buckets[0]]
        if staleness <= self._most:
            return False
        for bucket in buckets:
            self.shard.fates.discarded(bucket, [contribution.sent], "too stale", staleness)
        return True

    def _merge(self, buckets: Sequence[int], here: Sequence[_Contribution]) -> None:
        rule, bucket = self.rule, buckets[0]
        total = sum(c.push.weight for c in here)
        staleness = [self.buckets[bucket].version - c.based for c in here]
        rule.set_options(self._options(here[0].head, staleness[0]), bucket)
        for each in buckets:
            pushes = [c.push if each == bucket else c.rounds.push(each, c.push.weight) for c in here]
            rule.reduce(each, pushes, total, keep=True)
        self.shard.reach(self.buckets[bucket].version + 1, "reduced")
        for each in range(len(self.buckets)) if rule.together else [bucket]:
            self.shard.before_write(each)
        if rule.together:
            rule.apply_all(0)
        else:
            rule.apply(bucket, 0)
        self.shard.reach(self.buckets[bucket].version + 1, "applied")
        for each in buckets:
            self.buckets[each].version += 1
            weights = [c.push.weight / total for c in here]
            self.shard.fates.closed(
                each,
                self.buckets[each].version,
                [c.sent for c in here],
                weights,
                staleness,
                alone=self._quorum == 1 and self._grace is None,
            )

    def merge_together(self, contribution: _Contribution) -> None:
        """For a rule that takes all buckets at once: one worker's pushes to all of them. The caller holds all locks."""
        buckets = range(len(self.buckets))
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

    # ---- for threads that hold no lock

    def leave(self, worker: int) -> None:
        """A worker has finished: no round waits for it."""
        self.workers.leave(worker)
        self._close_where_due()

    def lose(self, worker: int) -> None:
        """A worker is lost: no round waits for it, and what came from it counts. Raises `Disagreement` where all have
        to do something together."""
        self.workers.lose(worker)
        self._close_where_due()

    def _close_where_due(self) -> None:
        for bucket, state in enumerate(self.buckets):
            with state.lock:
                self._close_if_due(bucket)

    def _close_late(self, bucket: int, closed: int) -> None:
        """The time for joining the round after so many ``closed`` ones is over."""
        state = self.buckets[bucket]
        with state.lock:
            if state.closed == closed and state.here:
                self._close(bucket)

    def meet(self, operation: StepOperation, step: int) -> None:
        """All workers set values or state together: those of their leader. Then they have pushed equally often."""
        shard, leader = self.shard, self.workers.members.leader
        with self.at_rest():
            for state in self.buckets:
                state.pushes = dict.fromkeys(state.pushes, state.closed)
            if operation is StepOperation.LOAD:
                shard.load(step, leader)
                return
            for bucket, push in enumerate(shard.workers[leader].pushes):
                shard.before_write(bucket)
                self.rule.assign(bucket, shard.receive(push, step), 0)


class _Rounds:
    """The rounds of one worker, in its thread."""

    def __init__(self, clocks: OwnClocks, worker: WorkerLink) -> None:
        self._clocks, self._worker = clocks, worker
        self._shard, self._rule = clocks.shard, clocks.rule
        self.based = [0] * len(clocks.buckets)  # by bucket: the version that the worker has
        self._late: list[int] = []  # answers that have to wait for slower workers
        pulls = worker.pulls[: len(clocks.buckets)]
        self._answers = [np.frombuffer(pull.memory, np.uint8, pull.nbytes) for pull in pulls]
        self._slots = [np.frombuffer(slot, np.uint8) for slot in worker.slots]
        self._kept: dict[int, memoryview] = {}  # by bucket: what it pushed late
        self.worker, self.incarnation = worker.index, worker.incarnation
        self._step = 0

    def run(self) -> None:
        """Until the worker has finished, or is lost."""
        try:
            self._run()
        except PeerLost as error:
            self._shard.member.await_loss(self.worker, error)
            self._shard.fates.gave_up(self.worker, self.incarnation)
            self._clocks.lose(self.worker)

    def _run(self) -> None:
        clocks, worker = self._clocks, self._worker
        for self._step in itertools.count(1):
            head = self._shard.head(worker, self._step)
            operation = head.operation
            if operation is StepOperation.FINISH:  # it does not wait for anything, and may be gone
                clocks.leave(worker.index)
                return
            worker.together.send(self._step)  # the head has been read
            if not clocks.workers.has(worker.index) and operation is not StepOperation.JOIN:
                clocks.take_part(worker.index)
            if operation is StepOperation.JOIN:
                worker.updates.send(clocks.workers.slowest() + 1)
            if operation is StepOperation.UPDATE:
                self._update(head)
            else:
                if operation not in (StepOperation.SKIP, StepOperation.JOIN):
                    self._meet(operation)
                self._late = list(range(len(self.based)))
            clocks.workers.tick(worker.index, operation in STEPS)
            if self._late and clocks.bound is not None and operation is not StepOperation.JOIN:
                clocks.workers.wait_for_slowest(worker.index, clocks.bound)
            for bucket in self._late:
                with clocks.buckets[bucket].lock:
                    self._answer(bucket, self._step, first=operation is not StepOperation.UPDATE)
            self._late = []
            if not self.based:
                worker.pulls[0].send(self._step)
            if operation not in (StepOperation.UPDATE, StepOperation.SKIP, StepOperation.JOIN):
                self._await_answers(operation)

    def _update(self, head: StepHeader) -> None:
        """Contributes to the rounds of all buckets, or of those of the head's fragment."""
        clocks = self._clocks
        if head.fragment >= len(clocks.fragments):
            raise ProtocolError(f"{self._worker.name} sent fragment {head.fragment} of {len(clocks.fragments)}")
        buckets = clocks.fragments[head.fragment]
        came: list[int] = []
        lost: PeerLost | None = None
        for bucket in buckets:
            try:
                self._shard.receive(self._worker.pushes[bucket], self._step)
            except PeerLost as error:  # what came counts
                lost = error
                continue
            came.append(bucket)
            if self._rule.together:
                continue
            push = self.push(bucket, head.weight)
            with clocks.buckets[bucket].lock:
                clocks.contribute(bucket, _Contribution(self, self._step, head, push, self.based[bucket]))
        if lost is not None:
            for bucket in came if self._rule.together else ():
                sent = Sent(self.worker, self.incarnation, self._step)
                self._shard.fates.discarded(bucket, [sent], "its worker was lost in the middle")
            raise lost
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
        source = source_of(self.worker, self.incarnation, kept=True)
        return push._replace(worker=source, slot=self._kept[bucket])

    def _meet(self, operation: StepOperation) -> None:
        """All workers do this in the same place of their programs."""
        workers = self._clocks.workers
        if workers.enter(self._worker.index, operation):
            self._clocks.meet(operation, self._step)
            workers.end()

    def _await_answers(self, operation: StepOperation) -> None:
        """Returns when all have been answered after `_meet`: until then no push changes what a slower worker gets."""
        workers = self._clocks.workers
        if workers.enter(self._worker.index, operation):
            workers.end()

    def answer_if_due(self, bucket: int, step: int) -> None:
        """Answers, unless the worker would be too far ahead of others. The caller holds the bucket's lock."""
        bound, workers = self._clocks.bound, self._clocks.workers
        if bound is None or workers.may_read(self._worker.index, bound):
            self._answer(bucket, step)
        else:
            self._late.append(bucket)

    def _answer(self, bucket: int, step: int, *, first: bool = False) -> None:
        """Sends the worker the present version of a bucket, or what the rule has put into its slot.

        The caller holds the bucket's lock. ``first``: the version itself, whatever the rule.
        """
        with contextlib.suppress(PeerLost):  # this worker's thread will hear of it, too
            self._send(bucket, step, first=first)
        self.based[bucket] = self._clocks.buckets[bucket].version

    def _send(self, bucket: int, step: int, *, first: bool) -> None:
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
        self._shard.reach(self._clocks.buckets[bucket].version, "published_some")
