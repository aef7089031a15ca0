"""Every worker's rounds at its own pace: the modes `Async` and `SSP`.

A thread per worker waits for that worker's pushes and applies each as it comes. A lock per bucket puts them in order.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Callable, Iterator
from queue import SimpleQueue

import torch

from tensorwire.errors import WaitTimeout
from tensorwire.observe import counters, spans
from tensorwire.observe.spans import clock
from tensorwire.store.consensus import Finished, agreed
from tensorwire.store.modes import SSP, Sync
from tensorwire.store.ready_queue import ReadyQueue
from tensorwire.store.rules import Push, tensor_over
from tensorwire.store.server_state import take_state
from tensorwire.store.shard import Shard, WorkerLink
from tensorwire.store.step_header import STEPS, StepHeader, StepOperation

_PATIENCE = 60.0  # between looks at the job while others compute


class OwnClocks:
    """Applies each push by itself, and answers its worker with the version that it led to."""

    def __init__(self, shard: Shard) -> None:
        mode = shard.spec.mode
        assert not isinstance(mode, Sync)
        self.shard, self.rule = shard, shard.rule
        self._buckets = shard.plan.buckets[shard.index]
        self._locks = [threading.Lock() for _ in self._buckets]
        self._versions = [0] * len(self._buckets)
        self._rates = [i for i, (_, option, _) in enumerate(shard.spec.numeric) if option == "lr"]
        self._damping = mode.damping
        self._bound = mode.staleness if isinstance(mode, SSP) else None
        self._meeting = _Meeting(shard)
        self._values = [tensor_over(memoryview(shard.parameters), "uint8", b.shard, b.nbytes) for b in self._buckets]

    def run(self) -> None:
        """Returns when every worker has finished. Raises the first error of a worker's thread."""
        ends: SimpleQueue[BaseException | None] = SimpleQueue()
        for worker in self.shard.workers:
            name = f"{self.shard.name} {worker.name}"
            threading.Thread(target=self._attend, args=(worker, ends), name=name, daemon=True).start()
        for _ in self.shard.workers:
            error = ends.get()
            if error is not None:
                raise error

    @contextlib.contextmanager
    def at_rest(self) -> Iterator[None]:
        """Inside it no push is applied."""
        with contextlib.ExitStack() as held:
            for lock in self._locks:
                held.enter_context(lock)
            yield

    def _attend(self, worker: WorkerLink, ends: SimpleQueue[BaseException | None]) -> None:
        try:
            _Rounds(self, worker).run()
        except BaseException as error:
            ends.put(error)
        else:
            ends.put(None)


class _Rounds:
    """The rounds of one worker, in its thread."""

    def __init__(self, clocks: OwnClocks, worker: WorkerLink) -> None:
        self._clocks, self._worker = clocks, worker
        self._shard, self._rule = clocks.shard, clocks.rule
        self._queue = ReadyQueue(clocks._buckets, overlap=False)
        self._based = [0] * len(clocks._buckets)  # by bucket: the version that the worker has
        self._answers: list[torch.Tensor] = []
        self._step = 0

    def run(self) -> None:
        meeting, worker = self._clocks._meeting, self._worker
        for self._step in itertools.count(1):
            head = self._shard.head(worker, self._step)
            operation = head.operation
            if operation is StepOperation.FINISH:
                meeting.leave(worker.index)
                return
            if operation is StepOperation.UPDATE:
                late = self._update(head)
            else:
                if operation is not StepOperation.SKIP:
                    self._meet(operation)
                late = list(range(len(self._based)))
            meeting.tick(worker.index, operation in STEPS)
            if late and self._clocks._bound is not None:
                meeting.wait_for_slowest(worker.index, self._clocks._bound)
            for bucket in late:
                with self._clocks._locks[bucket]:
                    self._answer(bucket)
            if not self._based:
                worker.pulls[0].send(self._step)

    def _update(self, head: StepHeader) -> list[int]:
        """Applies a push, bucket by bucket. Returns the buckets whose answers have to wait for slower workers."""
        if self._rule.together:
            return self._update_together(head)
        clocks = self._clocks
        bound, late = clocks._bound, []
        for bucket in self._queue.of_round(self._is_there, self._poll):
            start = clock()
            self._shard.receive(self._worker.pushes[bucket], self._step)
            with clocks._locks[bucket]:
                self._rule.set_options(self._options(head, bucket), bucket)
                self._rule.reduce(bucket, [self._push(bucket)], 1, keep=True)
                self._rule.apply(bucket, self._step)
                self._applied(bucket)
                if bound is None or clocks._meeting.ahead(self._worker.index) < bound:
                    self._answer(bucket)
                else:
                    late.append(bucket)
            spans.add("update", self._step, start, clock())
        return late

    def _update_together(self, head: StepHeader) -> list[int]:
        """For a rule that takes all buckets at once."""
        clocks, buckets = self._clocks, range(len(self._based))
        for bucket in buckets:
            self._shard.receive(self._worker.pushes[bucket], self._step)
        if not self._based:
            return []
        start = clock()
        with clocks.at_rest():
            self._rule.set_options(self._options(head, 0), 0)
            for bucket in buckets:
                self._rule.reduce(bucket, [self._push(bucket)], 1, keep=True)
            self._rule.apply_all(self._step)
            for bucket in buckets:
                self._applied(bucket)
        spans.add("update", self._step, start, clock())
        return list(buckets)

    def _applied(self, bucket: int) -> None:
        versions, worker = self._clocks._versions, self._worker.index
        staleness = versions[bucket] - self._based[bucket]
        versions[bucket] += 1
        self._shard.fates.applied(bucket, worker, self._step, versions[bucket], staleness)

    def _options(self, head: StepHeader, bucket: int) -> tuple[float, ...]:
        """This worker's options, the learning rate damped by the staleness of its push."""
        staleness = self._clocks._versions[bucket] - self._based[bucket]
        if not self._clocks._damping or not staleness:
            return head.options
        options = list(head.options)
        for place in self._clocks._rates:
            options[place] /= 1 + self._clocks._damping * staleness
        return tuple(options)

    def _push(self, bucket: int) -> Push:
        return Push(self._worker.index, self._worker.slots[bucket], bytes(self._worker.present[bucket]))

    def _is_there(self, bucket: int) -> bool:
        return self._worker.pushes[bucket].ready(self._step)

    def _poll(self, bucket: int, seconds: float) -> None:
        try:
            self._worker.pushes[bucket].receive(self._step, seconds)
        except WaitTimeout:
            self._shard.member.check()

    def _meet(self, operation: StepOperation) -> None:
        """All workers do this in the same place of their programs; worker 0's values count."""
        meeting = self._clocks._meeting
        if not meeting.enter(self._worker.index, operation):
            return
        with self._clocks.at_rest():
            if operation is StepOperation.LOAD:
                take_state(self._shard.member, self._shard.name, self._step, self._rule)
            else:
                for bucket, push in enumerate(self._shard.workers[0].pushes):
                    self._rule.assign(bucket, self._shard.receive(push, self._step), self._step)
        meeting.end()

    def _answer(self, bucket: int) -> None:
        """The worker's copy of a bucket becomes the present version. The caller holds the bucket's lock."""
        pull = self._worker.pulls[bucket]
        memory = pull.slot(self._step)
        if not self._answers:
            buckets = self._clocks._buckets
            self._answers = [
                tensor_over(pull.memory, "uint8", 0, b.nbytes)
                for pull, b in zip(self._worker.pulls, buckets, strict=True)
            ]
        self._answers[bucket].copy_(self._clocks._values[bucket])
        counters.add(copies=1, copied_bytes=memory.nbytes)
        pull.send(self._step)
        self._based[bucket] = self._clocks._versions[bucket]


class _Meeting:
    """Where the workers' threads wait for each other: for the slowest worker, and to assign and load together."""

    def __init__(self, shard: Shard) -> None:
        self._shard = shard
        self._clocks: dict[int, int] = {worker.index: 0 for worker in shard.workers}  # of those that have not finished
        self._left: list[int] = []
        self._here: dict[int, StepOperation] = {}
        self._ended = 0
        self._changed = threading.Condition()

    def tick(self, worker: int, steps: bool) -> None:
        """A worker has taken a step, if ``steps``."""
        if steps:
            with self._changed:
                self._clocks[worker] += 1
                self._changed.notify_all()

    def leave(self, worker: int) -> None:
        """A worker has finished."""
        with self._changed:
            del self._clocks[worker]
            self._left.append(worker)
            self._changed.notify_all()

    def ahead(self, worker: int) -> int:
        """By how many whole steps a worker is ahead of the slowest of the others, before its present one counts."""
        slowest = min((c for w, c in self._clocks.items() if w != worker), default=None)
        return -1 if slowest is None else self._clocks[worker] - slowest

    def wait_for_slowest(self, worker: int, bound: int) -> None:
        """Returns when the slowest worker is at most ``bound`` steps behind."""
        self._wait(lambda: self._clocks[worker] - min(self._clocks.values()) <= bound)

    def enter(self, worker: int, operation: StepOperation) -> bool:
        """Waits for all others. True, for worker 0: do what is to be done, and then ``end()``. Others return after it.

        Raises `Finished` or `Disagreement`.
        """
        with self._changed:
            self._here[worker] = operation
            ended = self._ended
            self._changed.notify_all()
        self._wait(lambda: bool(self._left) or self._ended > ended or (worker == 0 and self._all_here()))
        if self._ended > ended:
            return False
        if self._left:
            raise Finished(
                self._left[0],
                f"finished, and worker {worker} sets parameters or state, which all workers have to do together",
            )
        agreed(self._here, [], self._clocks[0])
        return True

    def _all_here(self) -> bool:
        return self._here.keys() == self._clocks.keys()

    def end(self) -> None:
        """What all waited for is done."""
        with self._changed:
            self._here = {}
            self._ended += 1
            self._changed.notify_all()

    def _wait(self, reached: Callable[[], bool]) -> None:
        while True:
            with self._changed:
                if self._changed.wait_for(reached, _PATIENCE):
                    return
            self._shard.member.check()
