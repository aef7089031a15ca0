"""Push and pull of one key by MXNet: ``server|worker INDEX STORE DEVICE WORKERS SERVERS HOST``; the word: its bytes.

All workers push whole numbers, so that their sum, which each of them pulls, is exact in any order. MXNet's own store
pulls into the array that was pushed as well, so every push begins with new values there; nobody times that.
"""

from __future__ import annotations

import hashlib
import time
from typing import Any

import numpy as np
from mxnet_job import run_program

from tensorwire.bench.actors.lines import Lines
from tensorwire.bench.actors.transfer import counts, since

_BLOCK = 1024  # elements, again and again


def values(round: int, rank: int) -> np.ndarray[Any, Any]:
    """A block of what a worker pushes in a round."""
    digest = hashlib.shake_128(f"{round} {rank}".encode()).digest(_BLOCK)
    return np.frombuffer(digest, np.uint8).astype(np.float32)


class Key:
    """A key: a round's values, the array from which they are pushed, and the one into which their sum is pulled."""

    def __init__(self, mx: Any, kv: Any, nbytes: int) -> None:
        self._kv, self._name, self._size = kv, str(nbytes), nbytes // 4
        self._values, self._source, self._out = (mx.nd.zeros((self._size,), dtype="float32") for _ in range(3))
        kv.init(self._name, self._source)

    def fill(self, round: int) -> None:
        """Takes a round's values; nothing is left of what was pulled."""
        self._values[:] = np.resize(values(round, self._kv.rank), self._size)
        self._out[:] = -1
        self._out.wait_to_read()

    def exchange(self, count: int) -> float:
        """Pushes, then pulls, so many times; the seconds of that."""
        seconds = 0.0
        for _ in range(count):
            self._values.copyto(self._source)
            self._source.wait_to_read()
            start = time.perf_counter()
            self._kv.push(self._name, self._source)
            self._kv.pull(self._name, out=self._out)
            self._out.wait_to_read()
            seconds += time.perf_counter() - start
        return seconds

    def check(self, round: int) -> None:
        """Raises `SystemExit` unless the sum of all pushes was pulled."""
        wanted = sum(values(round, rank) for rank in range(self._kv.num_workers))
        if not np.array_equal(self._out.asnumpy(), np.resize(wanted, self._size)):
            raise SystemExit(f"the key of {self._name} bytes is not the sum of what was pushed")


def work(lines: Lines, mx: Any, kv: Any) -> None:
    """A worker's rounds."""
    keys: dict[str, Key] = {}
    for run in lines.runs():
        if run.word not in keys:
            keys[run.word] = Key(mx, kv, int(run.word))
        key, before = keys[run.word], counts()
        key.fill(run.round)
        key.exchange(run.warm)
        seconds = key.exchange(run.count)
        key.check(run.round)
        lines.answer(seconds, **since(before))


if __name__ == "__main__":
    run_program(work)
