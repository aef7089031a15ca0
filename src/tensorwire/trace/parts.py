"""The parts of a training step, from the spans that workers and servers recorded.

A worker's step lasts from the end of one ``step()`` to the end of the next; if only a graph communicates, it lasts as
long as its span of compute. All pushing is **exposed** communication, because it keeps the computing thread. Waiting
has three causes, by the others' spans at the time: a server applied the rule (**update**); else another worker was
still computing (**idle**; `edge_waits` decides for tensors of graphs); else bytes or signals were on their way
(**exposed**, too). The rest until ``step()`` is called is **compute**. Those four add up to the step, except for the
moments between spans. **Hidden** communication moved bytes beside compute: transfers, and copies by a thread of their
own.

Steps are found by time, not by number, so a process may train with several stores at once. All processes must share one
clock: `Record.clock` holds the correction.
"""

from __future__ import annotations

import statistics
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from tensorwire.errors import ArgumentError
from tensorwire.observe.edge_names import of_graph
from tensorwire.observe.spans import Clock, Span
from tensorwire.trace.edge_waits import Edges, WorkerSpans, overlapping
from tensorwire.trace.intervals import Interval, common, length, union, within, without

# What a step consists of, in the order people are shown it.
PARTS = ("compute", "update", "exposed", "idle", "hidden")
# Steps left out of the typical one: caches, allocators and clocks of the machine settle.
WARM_UP_STEPS = 3
AnySpan = Span | tuple[str, int, float, float] | tuple[str, int, float, float, str]


@dataclass(frozen=True, slots=True)
class Parts:
    """One worker's step in seconds. ``seconds`` lasts until its next step begins; four parts add up to it.

    ``hidden`` lies beside ``compute`` and is no part of the sum.
    """

    worker: int
    step: int
    seconds: float
    compute: float
    update: float
    exposed: float
    idle: float
    hidden: float = 0.0

    @property
    def accounted(self) -> float:
        """The sum of the parts: what of ``seconds`` they explain."""
        return self.compute + self.update + self.exposed + self.idle


@dataclass(frozen=True, slots=True)
class Step:
    """One worker's step from ``start`` to ``stop``: when each part of it was, by name."""

    worker: int
    step: int
    start: float
    stop: float
    when: dict[str, list[Interval]]

    def parts(self) -> Parts:
        """How long each part was."""
        seconds = {name: length(self.when[name]) for name in PARTS}
        return Parts(self.worker, self.step, self.stop - self.start, **seconds)


class ProcessTrace(msgspec.Struct, frozen=True):
    """One process's trace file."""

    process: str
    facts: dict[str, object]
    counters: dict[str, int]
    spans: list[Span]
    clock: Clock = Clock()
    machine: str = ""

    def on_one_clock(self) -> list[Span]:
        """The spans on the clock of the job's coordinator."""
        add = self.clock.offset
        return [s._replace(start=s.start + add, stop=s.stop + add) for s in self.spans] if add else self.spans


def read_trace(folder: str | Path, *, torn: bool = False) -> dict[str, ProcessTrace]:
    """The trace files of a folder by process: ``worker-0``, ``server-0``.

    Raises `ArgumentError` for other contents, and for none; with ``torn`` it takes what is there.
    """
    found = {}
    for path in sorted(Path(folder).glob("*.json")):
        try:
            record = msgspec.json.decode(path.read_bytes(), type=ProcessTrace)
        except (OSError, msgspec.DecodeError) as error:
            if torn:
                continue
            raise ArgumentError(f"{path} is not a trace: {error}") from None
        found[record.process] = record
    if not found and not torn:
        raise ArgumentError(f"{folder} holds no trace: was TENSORWIRE_TRACE set to it?")
    return found


def parts_of_trace(trace: Mapping[str, ProcessTrace]) -> list[Parts]:
    """The parts of every complete step of every worker, by worker and step."""
    return [step.parts() for step in steps_of_trace(trace)]


def steps_of_trace(trace: Mapping[str, ProcessTrace]) -> list[Step]:
    """Every complete step of every worker, by worker and time."""
    spans = {name: record.on_one_clock() for name, record in trace.items()}
    workers = {int(name.removeprefix("worker-")): s for name, s in spans.items() if name.startswith("worker-")}
    return steps_of_spans(workers, (span for name, s in spans.items() if name.startswith("server-") for span in s))


def parts_of_spans(workers: Mapping[int, Sequence[AnySpan]], servers: Iterable[AnySpan]) -> list[Parts]:
    """The same from spans: ``workers`` by rank, ``servers`` all together."""
    return [step.parts() for step in steps_of_spans(workers, servers)]


def steps_of_spans(workers: Mapping[int, Sequence[AnySpan]], servers: Iterable[AnySpan]) -> list[Step]:
    """The steps from spans: ``workers`` by rank, ``servers`` all together."""
    updates: dict[int, list[Interval]] = {}
    returns: list[Span] = []
    for span in (Span(*s) for s in servers):
        if span.name == "update":
            updates.setdefault(span.step, []).append((span.start, span.stop))
        elif span.name == "transfer":
            returns.append(span)
    updates = {step: union(intervals) for step, intervals in updates.items()}
    timelines = {w: _Timeline([Span(*s) for s in spans], returns, w) for w, spans in sorted(workers.items())}
    edges = Edges({worker: timeline.worker_spans() for worker, timeline in timelines.items()})
    found = []
    for worker, timeline in timelines.items():
        peers = [other for w, other in timelines.items() if w != worker]
        found += [timeline.step(worker, at, updates, peers, edges) for at in range(len(timeline.windows))]
    return found


@dataclass(slots=True)
class _Window:
    """One step's time: it begins, ``step()`` is called, and it ends. ``turn``: which store's, of those in turn."""

    step: int
    turn: int
    start: float
    called: float
    stop: float
    computing: list[Interval] = field(default_factory=list)


class _Timeline:
    """One worker's spans, ready to be looked up by time."""

    def __init__(self, spans: Sequence[Span], returns: Sequence[Span], worker: int) -> None:
        self._waits = sorted((s for s in spans if s.name == "wait"), key=lambda s: s.start)
        pushes = [s for s in spans if s.name == "push"]
        crossed = [span for span in (*pushes, *self._waits) if of_graph(span)]
        self._crossed = sorted(crossed, key=lambda s: s.start)
        # In a graph, a push may wait for memory.
        inside = [(s.start, s.stop) for s in crossed if s.name == "wait"]
        self._pushing = without(((s.start, s.stop) for s in pushes), inside)
        mine = [s for s in returns if not s.what or s.what.split(",")[0] == f"worker {worker}"]
        self._moving = union((s.start, s.stop) for s in [*spans, *mine] if s.name in ("copy", "transfer"))
        self._busy = union([*self._pushing, *((w.start, w.stop) for w in self._waits)])
        self.windows = self._cut(sorted((s for s in spans if s.name == "compute"), key=lambda s: s.stop))
        self._computing: dict[tuple[int, int], list[Interval]] = {}
        for window in self.windows:
            window.computing = without([(window.start, window.called)], within(self._busy, window.start, window.called))
            self._computing[window.step, window.turn] = window.computing

    def _cut(self, computes: Sequence[Span]) -> list[_Window]:
        """A step begins where the one before has ended, whichever store's that was."""
        ends = sorted(c.start for c in computes)
        turns: dict[int, int] = {}
        windows: list[_Window] = []
        for at, c in enumerate(computes):
            stop = self._end(c, computes[at + 1].stop if at + 1 < len(computes) else float("inf"), ends)
            if stop is not None:  # else the job ended in the middle of it
                turn = turns[c.step] = turns.get(c.step, -1) + 1
                start = max(c.start, windows[-1].stop) if windows else c.start
                windows.append(_Window(c.step, turn, start, c.stop, stop))
        return windows

    def _end(self, compute: Span, next_called: float, ends: Sequence[float]) -> float | None:
        """Where compute begins anew; a store's last step has ended when the last push or wait has.

        A step that communicates in a graph alone has ended before: with its compute.
        """
        called = compute.stop
        at = bisect_right(ends, called)
        begins = ends[at] if at < len(ends) and ends[at] <= next_called else None
        busy = within(self._busy, called, next_called if begins is None else begins)
        if not busy and overlapping(self._crossed, compute.start, called):
            return called
        if begins is not None:
            return begins
        return busy[-1][1] if busy else None

    def worker_spans(self) -> WorkerSpans:
        """What another worker awaits when it waits for a tensor of this one."""
        computing = union(i for w in self.windows for i in w.computing)
        pushes, waits = ([s for s in self._crossed if s.name == name] for name in ("push", "wait"))
        return WorkerSpans(pushes, waits, computing)

    def computed(self, windows: Iterable[_Window]) -> list[Interval]:
        """When this worker computed for the same steps as another one did in ``windows``."""
        return [i for w in windows for i in self._computing.get((w.step, w.turn), [])]

    def step(
        self,
        worker: int,
        at: int,
        updates: Mapping[int, list[Interval]],
        peers: Sequence[_Timeline],
        edges: Edges,
    ) -> Step:
        """What the time of a window went to."""
        window = self.windows[at]
        pushing = within(self._pushing, window.start, window.stop)
        updating: list[Interval] = []
        idle: list[Interval] = []
        exposed = list(pushing)
        for wait in overlapping(self._waits, window.start, window.stop):
            waiting = without([(wait.start, wait.stop)], pushing)
            if of_graph(wait):
                update, idling = [], common(waiting, edges.idle(worker, wait))
            else:
                update = common(waiting, within(updates.get(wait.step, []), wait.start, wait.stop))
                # Before step() is called, with overlap, one waits for the steps before.
                awaited = self.windows[max(0, at - 2) : at + (wait.start >= window.called)]
                idling = common(without(waiting, update), [i for peer in peers for i in peer.computed(awaited)])
            updating += update
            idle += idling
            exposed += without(waiting, [*update, *idling])
        when = {
            "compute": window.computing,
            "update": updating,
            "exposed": union(exposed),
            "idle": idle,
            "hidden": common(window.computing, within(self._moving, window.start, window.called)),
        }
        return Step(worker, window.step, window.start, window.stop, when)


def typical(parts: Iterable[Parts], *, skip: int = WARM_UP_STEPS) -> Parts:
    """The typical step of a training: the mean over the middle half, by length, of all workers' steps.

    Medians of each part would not add up to a step: where two workers take turns in waiting, the median wait is
    nothing. Each worker's first ``skip`` steps are left out. In the result ``worker`` is -1 and ``step`` the number of
    steps it stands for. Raises `ArgumentError` if none is left.
    """
    kept = settled(parts, skip=skip)
    kept.sort(key=lambda p: p.seconds)
    quarter = len(kept) // 4
    return _mean(kept[quarter : len(kept) - quarter], len(kept), skip)


def average(parts: Iterable[Parts], *, skip: int = WARM_UP_STEPS) -> Parts:
    """As `typical`, but the mean over all steps: for workers that communicate in some of their steps only."""
    kept = settled(parts, skip=skip)
    return _mean(kept, len(kept), skip)


def _mean(parts: Sequence[Parts], count: int, skip: int) -> Parts:
    if not parts:
        raise ArgumentError(f"the trace holds no step after the first {skip}")
    return Parts(-1, count, *(statistics.fmean(getattr(p, name) for p in parts) for name in ("seconds", *PARTS)))


def settled(parts: Iterable[Parts], *, skip: int = WARM_UP_STEPS) -> list[Parts]:
    """All but each worker's first ``skip`` steps."""
    kept: list[Parts] = []
    seen: dict[int, int] = {}
    for part in sorted(parts, key=lambda p: (p.worker, p.step)):
        seen[part.worker] = seen.get(part.worker, 0) + 1
        if seen[part.worker] > skip:
            kept.append(part)
    return kept
