"""Traces as Chrome's trace events, for Perfetto and ``chrome://tracing``, and back.

One file holds all processes of a launcher, on the clock of the job's coordinator. A process has one track per kind of
span, more where spans overlap, and a worker has one for the parts of its steps. Times are microseconds after the first.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from tensorwire.errors import ArgumentError
from tensorwire.observe.files import write_file
from tensorwire.observe.spans import Clock, Span
from tensorwire.trace.parts import PARTS, ProcessTrace, steps_of_trace

# The order of a process's tracks.
_TRACKS = ("compute", "push", "wait", "copy", "update", "transfer")
_US = 1e6


class _Process(msgspec.Struct, frozen=True):
    """What a file says of a process beside its events."""

    name: str
    pid: int
    machine: str
    clock: Clock
    facts: dict[str, object]
    counters: dict[str, int]


class _About(msgspec.Struct, frozen=True):
    """``origin``: the moment 0 of the file, in seconds on the coordinator's clock."""

    tensorwire: int
    origin: float
    processes: list[_Process]


class _Event(msgspec.Struct, frozen=True):
    """The events that we read; others are left out by their category."""

    ph: str
    pid: int
    name: str
    cat: str = ""
    ts: float = 0.0
    dur: float = 0.0
    args: dict[str, Any] = {}


class _File(msgspec.Struct, frozen=True):
    traceEvents: list[_Event]
    otherData: _About


def write_chrome(path: str | Path, trace: Mapping[str, ProcessTrace]) -> None:
    """Writes the records of a trace as one file. Raises `OSError`."""
    spans = {name: record.on_one_clock() for name, record in trace.items()}
    origin = min((s.start for all_of_one in spans.values() for s in all_of_one), default=0.0)
    events: list[dict[str, object]] = []
    for name in trace:
        events += _process_events(name, spans[name], origin)
    for step in steps_of_trace(trace):
        args = {"step": step.step}
        for part in PARTS[:-1]:  # what is hidden lies beside compute, on tracks of its own
            for start, stop in step.when[part]:
                events.append(_event(f"worker-{step.worker}", 0, "part", part, start - origin, stop - start, args))
    processes = [_Process(n, _pid(n), r.machine, r.clock, r.facts, r.counters) for n, r in trace.items()]
    whole = {"displayTimeUnit": "ms", "otherData": _About(1, origin, processes), "traceEvents": events}
    write_file(path, msgspec.json.encode(whole))


def read_chrome(path: str | Path) -> dict[str, ProcessTrace]:
    """The records of a file that `write_chrome` made, on the coordinator's clock. Raises `ArgumentError`."""
    try:
        found = msgspec.json.decode(Path(path).read_bytes(), type=_File)
    except OSError as error:
        raise ArgumentError(f"cannot read {path}: {error.strerror}") from None
    except msgspec.DecodeError as error:
        raise ArgumentError(f"{path} is not a trace of tensorwire run --trace: {error}") from None
    spans: dict[int, list[Span]] = {p.pid: [] for p in found.otherData.processes}
    for event in found.traceEvents:
        if event.cat == "span" and event.pid in spans:
            start = found.otherData.origin + event.ts / _US
            step, what = event.args.get("step"), event.args.get("what", "")
            if not isinstance(step, int) or not isinstance(what, str):
                raise ArgumentError(f"{path} is not a trace of tensorwire run --trace: a span without its step")
            spans[event.pid].append(Span(event.name, step, start, start + event.dur / _US, what))
    return {
        p.name: ProcessTrace(p.name, p.facts, p.counters, spans[p.pid], Clock(0.0, p.clock.error), p.machine)
        for p in found.otherData.processes
    }


def _pid(process: str) -> int:
    """Workers are odd, servers even."""
    role, _, index = process.partition("-")
    return 2 * int(index) + (1 if role == "worker" else 2)


def _event(
    process: str, track: int, category: str, name: str, start: float, seconds: float, args: Mapping[str, object]
) -> dict[str, object]:
    times = {"ts": round(start * _US, 3), "dur": round(seconds * _US, 3)}
    return {"ph": "X", "pid": _pid(process), "tid": track, "cat": category, "name": name, **times, "args": args}


def _process_events(process: str, spans: Sequence[Span], origin: float) -> Iterator[dict[str, object]]:
    yield _label(process, 0, "process_name", name=process.replace("-", " "))
    yield _label(process, 0, "process_sort_index", sort_index=_pid(process) + (0 if process[0] == "w" else 1 << 20))
    if process.startswith("worker-"):
        yield _label(process, 0, "thread_name", name="parts of the step")
    track = 0
    names = sorted({s.name for s in spans}, key=lambda n: (_TRACKS.index(n) if n in _TRACKS else len(_TRACKS), n))
    for name in names:
        for number, lane in enumerate(_lanes(s for s in spans if s.name == name)):
            track += 1
            yield _label(process, track, "thread_name", name=name if number == 0 else f"{name} {number + 1}")
            yield _label(process, track, "thread_sort_index", sort_index=track)
            for s in lane:
                args = {"step": s.step, "what": s.what} if s.what else {"step": s.step}
                yield _event(process, track, "span", name, s.start - origin, s.stop - s.start, args)


def _label(process: str, track: int, kind: str, **args: object) -> dict[str, object]:
    return {"ph": "M", "pid": _pid(process), "tid": track, "name": kind, "args": args}


def _lanes(spans: Iterable[Span]) -> list[list[Span]]:
    """As few rows as possible in which no two overlap: viewers draw what overlaps on one track wrong."""
    lanes: list[list[Span]] = []
    for span in sorted(spans, key=lambda s: s.start):
        lane = next((lane for lane in lanes if lane[-1].stop <= span.start), None)
        if lane is None:
            lanes.append([span])
        else:
            lane.append(span)
    return lanes
