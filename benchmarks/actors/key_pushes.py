"""A store of keys with the rule sum: ``server|worker INDEX KEYS MODE DEVICE WORKERS SERVERS HOST``.

KEYS: the name of a model, whose tensors are the keys, or ``COUNTxBYTES``. Words: ``whole``, every key is pushed from
its slot and pulled; ``list``, a call pushes 64 arrays, which are copied; ``one``, a call pushes one; ``turns``, every
key is pushed and pulled by itself, one after the other.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable

import numpy as np

from benchmarks.actors.members import run_member
from tensorwire.bench.actors.lines import Run, timed
from tensorwire.store import SSP, Async, KeyValue, Sync

LIST = 64  # keys of a call
_MODES: dict[str, Sync | Async | SSP] = {"sync": Sync(), "async": Async(), "ssp": SSP(staleness=3)}


def sizes_of(keys: str) -> list[int]:
    """Elements of each key, of four bytes."""
    if keys[:1].isdigit():
        count, nbytes = map(int, keys.split("x"))
        return [nbytes // 4] * count
    from tensorwire.models import find  # it imports torch

    return [t.elements for t in find(keys).tensors]


class KeyWorker:
    """Pushes ``rank + 1`` to every element, so that the values tell how often everybody has pushed."""

    def __init__(self, sizes: list[int], mode: str) -> None:
        self._kv = kv = KeyValue(_MODES[mode], "sum")
        self._keys = list(range(len(sizes)))
        self._sizes = sizes
        kv.init(self._keys, [np.zeros(n, np.float32) for n in sizes])
        self._array = np.full(max(sizes), kv.rank + 1, np.float32)
        for key in self._keys:
            kv.slot(key)[:] = kv.rank + 1
        self._expected = [0] * len(sizes)
        self._next = 0
        self._calls: dict[str, Callable[[int], object]] = {
            "whole": self._whole,
            "list": lambda count: self._push(count, LIST),
            "one": lambda count: self._push(count, 1),
            "turns": self._turns,
        }
        self._took: list[list[float]] = []

    def run(self, run: Run) -> dict[str, float]:
        """One round: its seconds, and what else is told of it."""
        self._took = [[] for _ in self._keys]
        seconds = timed(run, self._calls[run.word or "whole"])
        self._check()
        return {"seconds": seconds, **(self._delays() if run.word == "turns" else {})}

    def _note(self, keys: list[int]) -> None:
        everybody = self._kv.num_workers * (self._kv.num_workers + 1) // 2
        for key in keys:
            self._expected[key] += everybody

    def _whole(self, count: int) -> None:
        for _ in range(count):
            self._kv.pushpull(self._keys, [self._kv.slot(key) for key in self._keys], copy=False).wait()
            self._note(self._keys)

    def _push(self, count: int, at_once: int) -> None:
        """Pushes to the keys in turn, and returns when all of it has been applied."""
        arrays = [self._array[: self._sizes[0]]] * at_once
        handles = {}
        for _ in range(count):
            keys = self._keys[self._next : self._next + at_once]
            handles[self._next] = self._kv.push(keys, arrays)
            self._next = (self._next + at_once) % len(self._keys)
            self._note(keys)
        for handle in handles.values():
            handle.wait()

    def _turns(self, count: int) -> None:
        """``count`` passes over all keys, each in an order of its own."""
        for _ in range(count):
            for key in random.sample(self._keys, len(self._keys)):
                start = time.perf_counter()
                self._kv.pushpull(key, self._array[: self._sizes[key]], copy=False).wait()
                self._took[key].append(time.perf_counter() - start)
                self._note([key])

    def _delays(self) -> dict[str, float]:
        """From push to answer: the median, and of the worst key its 99th percentile over its median."""
        medians = [float(np.median(took)) for took in self._took]
        tails = [float(np.quantile(took, 0.99)) / median for took, median in zip(self._took, medians, strict=True)]
        middle = float(np.median(medians))
        return {"median": middle, "p99_over_median": max(tails), "slowest_key_over_median": max(medians) / middle}

    def _check(self) -> None:
        """Raises `SystemExit` unless every push of every worker is in the values, once."""
        kv = self._kv
        kv.barrier()
        for key, expected in zip(self._keys, self._expected, strict=True):
            values = kv.pull(key, copy=False).wait()
            if values.min() != expected or values.max() != expected:
                raise SystemExit(f"key {key} holds {values.min()} to {values.max()}, not {expected}")
        kv.barrier()


def main(role: str, index: str, keys: str, mode: str, *job: str) -> None:
    """Runs until its input ends. ``job``: DEVICE WORKERS SERVERS HOST."""
    run_member(role, index, *job, make=lambda: KeyWorker(sizes_of(keys), mode).run)


if __name__ == "__main__":
    main(*sys.argv[1:])
