"""A table under the rule sum: ``server|worker INDEX ROWS DEVICE WORKERS SERVERS HOST``.

An operation pulls a batch of random rows, and pushes ones to them; it is over when these have been applied. Batches are
drawn before, each row of a batch once and in order: removing duplicates is no communication. The answer has
``bytes_over_rows``: what the worker wrote, over the bytes of the rows that it pushed; over shm nothing is written.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks.actors.members import run_member
from tensorwire.bench.actors.lines import Run, timed
from tensorwire.observe import counters
from tensorwire.store import Async, KeyValue

ROWS, WIDTH, BATCH = 1_000_000, 64, 4096
_BATCHES = 32  # that are drawn; then they come again


class Batches:
    """Batches of random rows, in turn, and how often each row was in one."""

    def __init__(self, rows: int) -> None:
        random = np.random.default_rng(1)
        self._drawn = [np.sort(random.choice(rows, BATCH, replace=False)) for _ in range(_BATCHES)]
        self._used = [0] * _BATCHES
        self._turn = 0

    def next(self) -> np.ndarray[Any, np.dtype[np.int64]]:
        """Numbers of rows, in ascending order."""
        turn = self._turn
        self._turn = (turn + 1) % _BATCHES
        self._used[turn] += 1
        return self._drawn[turn]

    def check(self, pull: Callable[[np.ndarray[Any, Any]], np.ndarray[Any, Any]]) -> None:
        """Raises `SystemExit` unless the rows of some batch hold every push of ones, once."""
        some = self._drawn[self._turn]
        wanted = np.zeros(BATCH, np.float32)
        for numbers, times in zip(self._drawn, self._used, strict=True):
            wanted += times * np.isin(some, numbers)
        found = pull(some)
        if not np.array_equal(found, np.broadcast_to(wanted[:, None], found.shape)):
            raise SystemExit("the rows that arrived are wrong")


class RowWorker:
    """Pulls and pushes batches."""

    def __init__(self, rows: int) -> None:
        self._kv = KeyValue(Async(), "sum")
        self._kv.init_rows("table", (rows, WIDTH))
        self._batches = Batches(rows)
        self._ones = np.ones((BATCH, WIDTH), np.float32)
        self._pulled = np.empty_like(self._ones)

    def run(self, run: Run) -> dict[str, float]:
        """One round: its seconds, and bytes written over bytes of rows."""
        before = counters.bytes
        seconds = timed(run, self._exchange)
        written = counters.bytes - before
        self._batches.check(self._pull)
        share = written / ((run.warm + run.count) * self._ones.nbytes)
        return {"seconds": seconds, "bytes_over_rows": share}

    def _exchange(self, count: int) -> None:
        for _ in range(count):
            indices = self._batches.next()
            self._pull(indices)
            self._kv.row_sparse_push("table", indices, self._ones).wait()

    def _pull(self, indices: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        self._kv.row_sparse_pull("table", indices, out=self._pulled).wait()
        return self._pulled


def main(role: str, index: str, rows: str, *job: str) -> None:
    """Runs until its input ends. ``job``: DEVICE WORKERS SERVERS HOST."""
    run_member(role, index, *job, make=lambda: RowWorker(int(rows)).run)


if __name__ == "__main__":
    main(*sys.argv[1:])
