"""A table under the rule sum: ``server|worker INDEX ROWS WORKERS SERVERS DEVICE HOST``.

An operation pulls a batch of random rows, and pushes ones to them; it is over when these have been applied. The answer
has ``bytes_over_rows``: what the worker wrote, over the bytes of the rows that it pushed; over shm nothing is written.
"""

from __future__ import annotations

import sys

import numpy as np

from tensorwire.bench.actors.lines import Lines, Run, timed
from tensorwire.bench.actors.store_job import join, serve
from tensorwire.bench.actors.transfer import counts, since
from tensorwire.observe import counters
from tensorwire.store import Async, KeyValue

ROWS, WIDTH, BATCH = 1_000_000, 64, 4096


class RowWorker:
    """Knows how often each row was pushed."""

    def __init__(self, rows: int) -> None:
        self._kv = KeyValue(Async(), "sum")
        self._kv.init_rows("table", (rows, WIDTH))
        self._batches = np.random.default_rng(1)
        self._pushed = np.zeros(rows, np.float32)
        self._ones = np.ones((BATCH, WIDTH), np.float32)

    def run(self, run: Run) -> tuple[float, float]:
        """One round: its seconds, and bytes written over bytes of rows."""
        before = counters.bytes
        seconds = timed(run, self._batch)
        written = counters.bytes - before
        self._check()
        return seconds, written / ((run.warm + run.count) * self._ones.nbytes)

    def _batch(self, count: int) -> None:
        for _ in range(count):
            indices = self._batches.integers(0, len(self._pushed), BATCH)
            self._kv.row_sparse_pull("table", indices).wait()
            self._kv.row_sparse_push("table", indices, self._ones).wait()
            np.add.at(self._pushed, indices, 1)

    def _check(self) -> None:
        """Raises `SystemExit` unless a part of the rows holds every push, once."""
        some = self._batches.integers(0, len(self._pushed), BATCH)
        found = self._kv.row_sparse_pull("table", some).wait()
        if not np.array_equal(found, np.broadcast_to(self._pushed[some][:, None], found.shape)):
            raise SystemExit("the rows that arrived are wrong")


def main(role: str, index: str, rows: str, workers: str, servers: str, device: str, interface: str) -> None:
    """Runs until its input ends."""
    lines = Lines()
    sizes = (int(workers), int(servers))
    if role == "server":
        serve(lines, int(index), *sizes, device, interface)
        return
    import tensorwire as tw

    join(lines, int(index), *sizes, device)
    tw.init()
    worker = RowWorker(int(rows))
    for run in lines.runs():
        before = counts()
        seconds, share = worker.run(run)
        lines.answer(seconds, bytes_over_rows=share, **since(before))


if __name__ == "__main__":
    main(*sys.argv[1:])
