"""Whether every push has exactly one fate, from the files of servers and workers for ``TENSORWIRE_FATES``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import msgspec
import numpy as np

from tensorwire.control.names import member_name
from tensorwire.errors import ArgumentError
from tensorwire.store.fates import COUNTS, Begun, Counting, Ended, Fate, GaveUp, Line, Produced

_MOST_SHOWN = 5  # problems of a kind
_LINE_BYTES = 1 << 20  # no line is longer


@dataclass(frozen=True)
class WorkerFates:
    """One worker's pushes to one store. ``produced``: None where the worker left no total.

    ``lost``: those that were not yet in their server's memory when the worker was lost.
    """

    store: str
    worker: int
    produced: int | None
    applied: int
    merged: int
    discarded: int
    reasons: tuple[str, ...]
    lost: int = 0


def read_fates(paths: Sequence[str | Path]) -> list[Line]:
    """All lines of the files, and of those in the folders; a last line that a killed process left torn is not one.

    Raises `ArgumentError` for files that hold something else, and for none.
    """
    lines: list[Line] = []
    for given in map(Path, paths):
        files = [given] if given.is_file() else sorted(given.glob("*.jsonl"))
        if not files:
            raise ArgumentError(f"{given} holds no fates: was --fates or TENSORWIRE_FATES set to it?")
        for path in files:
            try:
                found = list(_read(path))
            except OSError as error:
                raise ArgumentError(f"{path} cannot be read: {error.strerror}") from None
            if not found or not isinstance(found[0], Begun):
                raise ArgumentError(f"{path} does not begin as a log of fates does")
            lines += found
        lines += [line for path in ([] if given.is_file() else sorted(given.glob("*.counts"))) for line in _count(path)]
    return lines


def _count(path: Path) -> Iterator[Line]:
    """What a worker has sent, also one that was killed. Raises `ArgumentError` for another file."""
    try:
        data = path.read_bytes()
        head = msgspec.json.decode(data[:COUNTS], type=Counting)
        counts = np.frombuffer(data, np.uint64, head.shards, COUNTS)
    except (OSError, msgspec.MsgspecError, ValueError) as error:
        raise ArgumentError(f"{path} cannot be read as a file of counts: {error}") from None
    yield Begun(head.job, head.store, "", 0, 0)  # the lines of what job follow
    for shard, count in enumerate(counts.tolist()):
        yield Produced(head.store, shard, head.worker, count, head.incarnation)


def _read(path: Path) -> Iterator[Line]:
    with path.open("rb") as file:
        for number, line in enumerate(iter(lambda: file.readline(_LINE_BYTES), b""), start=1):
            try:
                yield msgspec.json.decode(line, type=Line)
            except msgspec.DecodeError as error:
                if line.endswith(b"\n") or len(line) == _LINE_BYTES:
                    raise ArgumentError(f"{path}, line {number}, is not a fate: {error}") from None


def by_job(lines: Sequence[Line]) -> dict[str, list[Line]]:
    """The lines of each job: those that follow its `Begun`."""
    jobs: dict[str, list[Line]] = {}
    job = ""
    for line in lines:
        job = line.job if isinstance(line, Begun) else job
        jobs.setdefault(job, []).append(line)
    return jobs


def totals(lines: Sequence[Line]) -> list[WorkerFates]:
    """By store and worker, of all processes that it was."""
    fates = [line for line in lines if isinstance(line, Fate)]
    counted = Counter((f.store, f.worker, f.fate) for f in fates)
    produced = Counter[tuple[str, int]]()
    for (store, _, worker, _), pushes in _produced(lines).items():
        produced[store, worker] += pushes
    lost = Counter[tuple[str, int]]()
    for (store, _, worker, _), pushes in _lost(lines).items():
        lost[store, worker] += pushes
    begun = {(b.store, w) for b in lines if isinstance(b, Begun) for w in range(b.workers)}
    keys = sorted({(f.store, f.worker) for f in fates} | produced.keys() | begun)
    return [
        WorkerFates(
            key[0],
            key[1],
            produced.get(key),
            counted[(key[0], key[1], "applied")],
            counted[(key[0], key[1], "merged")],
            counted[(key[0], key[1], "discarded")],
            tuple(sorted({f.reason for f in fates if (f.store, f.worker) == key and f.reason})),
            lost[key],
        )
        for key in keys
    ]


_Process = tuple[str, int, int, int]  # store, shard, worker and incarnation


def _produced(lines: Sequence[Line]) -> dict[_Process, int]:
    """What each process has sent to a shard: its own last word, and what its counts say, are the same number."""
    found: dict[_Process, int] = {}
    for line in lines:
        if isinstance(line, Produced):
            key = (line.store, line.shard, line.worker, line.incarnation)
            found[key] = max(line.pushes, found.get(key, 0))
    return found


def _lost(lines: Sequence[Line]) -> dict[_Process, int]:
    """What processes that were lost had sent, and no server has got."""
    known = Counter((f.store, f.shard, f.worker, f.incarnation) for f in lines if isinstance(f, Fate))
    gone = {(g.store, g.shard, g.worker, g.incarnation) for g in lines if isinstance(g, GaveUp)}
    return {key: pushes - known[key] for key, pushes in _produced(lines).items() if key in gone}


def problems(lines: Sequence[Line]) -> list[str]:
    """What does not add up in one job, in words."""
    fates = [line for line in lines if isinstance(line, Fate)]
    pushes = Counter((f.store, f.shard, f.bucket, f.worker, f.incarnation, f.round) for f in fates)
    found = []
    for store, shard, bucket, worker, _, number in [push for push, count in pushes.items() if count > 1][:_MOST_SHOWN]:
        push = f"worker {worker}'s push of round {number}, bucket {bucket} of shard {shard},"
        found.append(f"{store}: {push} has two fates")
    found += _versions(fates)
    lacking = _lacking(lines)
    for store in lacking:
        found += lacking[store][:_MOST_SHOWN]
    found += _too_many_lost(lines)
    for total in totals(lines):
        known = total.applied + total.merged + total.discarded + total.lost
        if total.produced != known and not lacking.get(total.store):  # with all logs in hand
            found.append(f"{total.store}: worker {total.worker} sent {total.produced} pushes, and {known} have a fate")
    return found


def _too_many_lost(lines: Sequence[Line]) -> list[str]:
    """Of each bucket only so many pushes can have been on their way when their worker was lost."""
    buckets: dict[tuple[str, int], set[int]] = {}
    for f in (line for line in lines if isinstance(line, Fate)):
        buckets.setdefault((f.store, f.shard), set()).add(f.bucket)
    ahead = {b.store: b.ahead for b in lines if isinstance(b, Begun) and b.process.startswith("server")}
    found = []
    for (store, shard, worker, _), count in _lost(lines).items():
        most = len(buckets.get((store, shard), ())) * ahead.get(store, 1)
        if not 0 <= count <= most:
            lost = f"{count} pushes of worker {worker} to shard {shard} are lost with it"
            found.append(f"{store}: {lost}, and {most} can have been on their way")
    return found[:_MOST_SHOWN]


def _lacking(lines: Sequence[Line]) -> dict[str, list[str]]:
    """By store: the logs of its workers and servers that are not there, or not whole."""
    # A server has a log for each of its shards.
    gone = {(g.store, member_name("worker", g.worker)) for g in lines if isinstance(g, GaveUp)}
    begun = Counter((line.store, line.process) for line in lines if isinstance(line, Begun) and line.process)
    ended = Counter((line.store, line.process) for line in lines if isinstance(line, Ended))
    found: dict[str, list[str]] = {}
    for line in {line.store: line for line in lines if isinstance(line, Begun) and line.process}.values():
        everyone = [member_name("worker", w) for w in range(line.workers)]
        everyone += [member_name("server", s) for s in range(line.servers)]
        for name in everyone:
            if (line.store, name) not in begun:
                why = f"{line.store}: {name} has no log here: was it on another machine, or did the job end before?"
                found.setdefault(line.store, []).append(why)
            elif ended[line.store, name] < begun[line.store, name] and (line.store, name) not in gone:
                why = f"{line.store}: the log of {name} has no end: it still runs, or it failed or was killed"
                found.setdefault(line.store, []).append(why)
    return found


def _versions(fates: Sequence[Fate]) -> list[str]:
    """Versions of a bucket follow each other, and each has the pushes of one round."""
    found = []
    versions: dict[tuple[str, int, int], Counter[int]] = {}
    for f in fates:
        if f.fate != "discarded":
            versions.setdefault((f.store, f.shard, f.bucket), Counter())[f.version] += f.fate == "applied"
    for (store, shard, bucket), seen in sorted(versions.items()):
        where = f"{store}: bucket {bucket} of shard {shard}"
        found += [f"{where} has no version {v + 1}" for v, after in pairwise(sorted(seen)) if after > v + 1][:1]
        found += [f"{where}: {count} pushes were applied as version {v}" for v, count in seen.items() if count > 1]
    return found[:_MOST_SHOWN]
