"""Whether every push has exactly one fate: reads what servers and workers wrote for ``TENSORWIRE_FATES``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from tensorwire.errors import ArgumentError
from tensorwire.store.fates import Fate, Line, Produced

_MOST_SHOWN = 5  # problems of a kind


@dataclass(frozen=True)
class WorkerFates:
    """One worker's pushes to one store. ``produced``: None where the worker left no total."""

    store: str
    worker: int
    produced: int | None
    applied: int
    merged: int
    discarded: int
    reasons: tuple[str, ...]


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
            lines += _read(path)
    return lines


def _read(path: Path) -> Iterator[Line]:
    for number, line in enumerate(path.read_bytes().splitlines(keepends=True), start=1):
        try:
            yield msgspec.json.decode(line, type=Line)
        except msgspec.DecodeError as error:
            if line.endswith(b"\n"):
                raise ArgumentError(f"{path}, line {number}, is not a fate: {error}") from None


def totals(lines: Sequence[Line]) -> list[WorkerFates]:
    """By store and worker."""
    fates = [line for line in lines if isinstance(line, Fate)]
    counted = Counter((f.store, f.worker, f.fate) for f in fates)
    produced: dict[tuple[str, int], int] = {}
    for line in lines:
        if isinstance(line, Produced):
            key = (line.store, line.worker)
            produced[key] = produced.get(key, 0) + line.pushes
    keys = sorted({(f.store, f.worker) for f in fates} | produced.keys())
    return [
        WorkerFates(
            key[0],
            key[1],
            produced.get(key),
            counted[(key[0], key[1], "applied")],
            counted[(key[0], key[1], "merged")],
            counted[(key[0], key[1], "discarded")],
            tuple(sorted({f.reason for f in fates if (f.store, f.worker) == key and f.reason})),
        )
        for key in keys
    ]


def problems(lines: Sequence[Line]) -> list[str]:
    """What does not add up, in words."""
    found = []
    fates = [line for line in lines if isinstance(line, Fate)]
    pushes = Counter((f.store, f.server, f.bucket, f.worker, f.round) for f in fates)
    twice = [push for push, count in pushes.items() if count > 1]
    for store, server, bucket, worker, number in twice[:_MOST_SHOWN]:
        push = f"worker {worker}'s push of round {number}, bucket {bucket} of server {server},"
        found.append(f"{store}: {push} has two fates")
    found += _versions(fates)
    for total in totals(lines):
        who = f"{total.store}: worker {total.worker}"
        known = total.applied + total.merged + total.discarded
        if total.produced is None:
            found.append(f"{who} left no total: it was killed, or still runs")
        elif total.produced != known:
            found.append(f"{who} sent {total.produced} pushes, and {known} have a fate")
    return found


def _versions(fates: Sequence[Fate]) -> list[str]:
    """Versions of a bucket follow each other, and each has the pushes of one round."""
    found = []
    versions: dict[tuple[str, int, int], Counter[int]] = {}
    for f in fates:
        if f.fate != "discarded":
            versions.setdefault((f.store, f.server, f.bucket), Counter())[f.version] += f.fate == "applied"
    for (store, server, bucket), seen in sorted(versions.items()):
        where = f"{store}: bucket {bucket} of server {server}"
        lacking = sorted(set(range(min(seen), max(seen) + 1)) - seen.keys())
        if lacking:
            found.append(f"{where} has no version {lacking[0]}")
        found += [f"{where}: {count} pushes were applied as version {v}" for v, count in seen.items() if count > 1]
    return found[:_MOST_SHOWN]
