"""The parts of a training step, from the spans that workers and servers recorded.

A step of a synchronous worker is compute, then pushing, then waiting. Waiting has three causes, told apart by what the
others did in those moments: a server applied the rule (**update**), else another worker was still computing (**idle**),
else bytes or signals were on their way (**exposed** communication, to which all pushing belongs). Communication that
is hidden behind compute is in no part. All processes share one clock, so this works on one machine; the trace must be
that of one store.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from tensorwire.errors import ArgumentError

Interval = tuple[float, float]
Span = tuple[str, int, float, float]
# Steps left out of the typical one: caches, allocators and clocks of the machine settle.
WARM_UP_STEPS = 3


@dataclass(frozen=True, slots=True)
class Parts:
    """One worker's step in seconds. ``seconds`` lasts until its next step begins; the four parts add up to it."""

    worker: int
    step: int
    seconds: float
    compute: float
    update: float
    exposed: float
    idle: float

    @property
    def accounted(self) -> float:
        """The sum of the parts: what of ``seconds`` they explain."""
        return self.compute + self.update + self.exposed + self.idle


class Record(msgspec.Struct, frozen=True):
    """One process's trace file."""

    process: str
    facts: dict[str, object]
    counters: dict[str, int]
    spans: list[Span]


def read_trace(folder: str | Path) -> dict[str, Record]:
    """The trace files of a folder by process: ``worker-0``, ``server-0``. Raises `ArgumentError` for other contents."""
    found = {}
    for path in sorted(Path(folder).glob("*.json")):
        try:
            record = msgspec.json.decode(path.read_bytes(), type=Record)
        except (OSError, msgspec.DecodeError) as error:
            raise ArgumentError(f"{path} is not a trace: {error}") from None
        found[record.process] = record
    if not found:
        raise ArgumentError(f"{folder} holds no trace: was TENSORWIRE_TRACE set to it?")
    return found


def parts_of_trace(trace: Mapping[str, Record]) -> list[Parts]:
    """The parts of every complete step of every worker, by worker and step."""
    workers = {int(name.removeprefix("worker-")): r.spans for name, r in trace.items() if name.startswith("worker-")}
    servers = [span for name, r in trace.items() if name.startswith("server-") for span in r.spans]
    return parts_of_spans(workers, servers)


def parts_of_spans(workers: Mapping[int, Sequence[Span]], servers: Iterable[Span]) -> list[Parts]:
    """The same from spans: ``workers`` by rank, ``servers`` all together."""
    updates: dict[int, list[Interval]] = {}
    for name, step, start, stop in servers:
        if name == "update":
            updates.setdefault(step, []).append((start, stop))
    by_step = {worker: _by_step(spans) for worker, spans in workers.items()}
    found = []
    for worker, steps in sorted(by_step.items()):
        for step, own in sorted(steps.items()):
            peers = [s[step]["compute"] for w, s in by_step.items() if w != worker and step in s]
            following = steps.get(step + 1)
            end = following["compute"][0] if following else own["wait"][1]
            found.append(_parts(worker, step, own, updates.get(step, []), peers, end))
    return found


def _by_step(spans: Sequence[Span]) -> dict[int, dict[str, Interval]]:
    """A worker's intervals by step and name; steps that lack one (the first assignment, cut traces) are left out."""
    steps: dict[int, dict[str, Interval]] = {}
    for name, step, start, stop in spans:
        if name in ("compute", "push", "wait"):
            steps.setdefault(step, {})[name] = (start, stop)
    return {step: own for step, own in steps.items() if len(own) == 3}


def _parts(
    worker: int, step: int, own: Mapping[str, Interval], updates: list[Interval], peers: list[Interval], end: float
) -> Parts:
    waiting = [own["wait"]]
    updating = common(waiting, updates)
    rest = without(waiting, updates)
    idle = common(rest, peers)
    start, stop = own["compute"]
    pushing = own["push"][1] - own["push"][0]
    return Parts(
        worker,
        step,
        seconds=end - start,
        compute=stop - start,
        update=length(updating),
        exposed=pushing + length(rest) - length(idle),
        idle=length(idle),
    )


def typical(parts: Iterable[Parts], *, skip: int = WARM_UP_STEPS) -> Parts:
    """The typical step of a training: the mean over the middle half, by length, of all workers' steps.

    Medians of each part would not add up to a step: where two workers take turns in waiting, the median wait is
    nothing. Each worker's first ``skip`` steps are left out. In the result ``worker`` is -1 and ``step`` the number of
    steps it stands for. Raises `ArgumentError` if none is left.
    """
    kept: list[Parts] = []
    seen: dict[int, int] = {}
    for part in sorted(parts, key=lambda p: (p.worker, p.step)):
        seen[part.worker] = seen.get(part.worker, 0) + 1
        if seen[part.worker] > skip:
            kept.append(part)
    if not kept:
        raise ArgumentError(f"the trace holds no step after the first {skip}")
    kept.sort(key=lambda p: p.seconds)
    quarter = len(kept) // 4
    middle = kept[quarter : len(kept) - quarter]
    names = ("seconds", "compute", "update", "exposed", "idle")
    return Parts(-1, len(kept), *(statistics.fmean(getattr(p, name) for p in middle) for name in names))


# ---- intervals


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The same points as sorted intervals that do not touch."""
    merged: list[Interval] = []
    for start, stop in sorted(i for i in intervals if i[1] > i[0]):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], stop))
        else:
            merged.append((start, stop))
    return merged


def common(first: Iterable[Interval], second: Iterable[Interval]) -> list[Interval]:
    """The points that are in both."""
    others = union(second)
    return [(max(a, c), min(b, d)) for a, b in union(first) for c, d in others if max(a, c) < min(b, d)]


def without(first: Iterable[Interval], second: Iterable[Interval]) -> list[Interval]:
    """The points of ``first`` that are not in ``second``."""
    left = union(first)
    for c, d in union(second):
        left = [(x, y) for a, b in left for x, y in ((a, min(b, c)), (max(a, d), b)) if x < y]
    return left


def length(intervals: Iterable[Interval]) -> float:
    """Seconds covered; overlaps count once."""
    return sum(stop - start for start, stop in union(intervals))
