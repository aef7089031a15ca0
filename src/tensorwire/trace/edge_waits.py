"""Why a worker of a graph waits for another worker's tensor, derived from the spans of that worker.

Until the producer sends the tensor, the wait is **idle** time if the producer computes, or waits for a third worker
that does. Afterwards the tensor is in flight, which is **exposed** communication. So is waiting for a producer that
itself waits for a tensor in flight, or sends something else.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from tensorwire.observe.spans import Span
from tensorwire.trace.intervals import Interval, union, within


@dataclass(frozen=True)
class WorkerSpans:
    """One worker's ``pushes`` and ``waits`` for edges, sorted by time, and when it was ``computing``, merged."""

    pushes: Sequence[Span]
    waits: Sequence[Span]
    computing: Sequence[Interval]


class Edges:
    """The workers of a job's graphs, by number, on one clock."""

    def __init__(self, workers: Mapping[int, WorkerSpans]) -> None:
        self._workers = workers
        self._pushed: dict[tuple[str, int], tuple[float, int]] = {}  # when, and by whom
        for number, worker in workers.items():
            for push in worker.pushes:
                key, pushed = (push.what, push.step), (push.start, number)
                self._pushed[key] = min(pushed, self._pushed.get(key, pushed))

    def idle(self, number: int, wait: Span) -> list[Interval]:
        """The moments of ``wait`` in which worker ``number`` waited for a computation."""
        return union(self._idle(number, wait, len(self._workers)))

    def _idle(self, number: int, wait: Span, depth: int) -> Iterable[Interval]:
        pushed = self._pushed.get((wait.what, wait.step))
        if pushed is None:  # it waits for any of the others to release memory
            others = [worker.computing for other, worker in self._workers.items() if other != number]
            return [part for computing in others for part in within(computing, wait.start, wait.stop)]
        sent, maker = pushed
        stop = min(wait.stop, sent)
        if stop <= wait.start or not depth:  # clocks of several machines may differ so much that workers wait in a ring
            return []
        worker = self._workers[maker]
        found = within(worker.computing, wait.start, stop)
        for other in overlapping(worker.waits, wait.start, stop):
            found += self._idle(maker, other, depth - 1)
        return found


def overlapping(spans: Sequence[Span], start: float, stop: float) -> list[Span]:
    """What of ``spans``, which follow each other, lies between two moments."""
    found = []
    for at in range(bisect_right(spans, start, key=lambda span: span.stop), len(spans)):
        span = spans[at]
        if span.start >= stop:
            break
        found.append(span._replace(start=max(span.start, start), stop=min(span.stop, stop)))
    return found
