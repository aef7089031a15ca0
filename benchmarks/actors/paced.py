"""Training at a stated pace: ``server|worker INDEX WORKLOAD MODE MS DEVICE WORKERS SERVERS HOST``.

The parameters have a model's shapes. A step sleeps for MS milliseconds, as if an accelerator computed.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

import torch

from benchmarks.actors.members import run_member
from tensorwire.bench.actors.lines import Run
from tensorwire.models import Model, find
from tensorwire.store import DiLoCo, Sync
from tensorwire.store.sharding import CUT

EVERY = 20
MODES: dict[str, Sync | DiLoCo] = {"sync": Sync(), "diloco": DiLoCo(every=EVERY, fragments=4, delay=9)}
_SMALL_BUCKETS = 2**20  # so that a small model has as many buckets as fragments
_LARGE = 64 * 2**20
_LEARNING_RATE = 2.0**-10


class PacedWorker:
    """Parameter ``i`` is 2**(i % 8) everywhere, and so is its gradient: all values change in proportion."""

    def __init__(self, model: Model, mode: str, seconds: float, rank: int) -> None:
        import tensorwire as tw

        self._seconds, chosen = seconds, MODES[mode]
        self._scales = [2.0 ** (i % 8) for i in range(len(model.tensors))]
        bucket_bytes = _SMALL_BUCKETS if model.nbytes < _LARGE else 2**22
        self._most = chosen.fragments if isinstance(chosen, DiLoCo) else 1  # values, up to the scale
        self._params = [
            torch.nn.Parameter(torch.full((t.elements,), scale))
            for t, scale in zip(model.tensors, self._scales, strict=True)
        ]
        self._optimizer = tw.torch.StoreOptimizer(
            [(t.name, p) for t, p in zip(model.tensors, self._params, strict=True)],
            torch.optim.SGD,
            lr=_LEARNING_RATE,
            fused=True,
            mode=chosen,
            bucket_bytes=bucket_bytes,
        )
        # The change that a worker's own optimizer would make belongs to the computation.
        self._changes = isinstance(chosen, DiLoCo)
        self._shrink = 1 - _LEARNING_RATE * (rank + 1)
        for p, scale in zip(self._params, self._scales, strict=True):
            p.grad = None if self._changes else torch.full_like(p, scale)
        self._blocked = 0.0

    def run(self, run: Run) -> dict[str, float]:
        """One round: its seconds, and the share of them that it spent in ``step()``."""
        for _ in range(run.warm):
            self._step()
        self._blocked = 0.0
        start = time.perf_counter()
        for _ in range(run.count):
            self._step()
        seconds = time.perf_counter() - start
        self._check()
        return {"seconds": seconds, "exposed": self._blocked / seconds}

    def _step(self) -> None:
        start = time.perf_counter()
        with torch.no_grad():
            for p in self._params if self._changes else ():
                p.mul_(self._shrink)
        time.sleep(max(0.0, start + self._seconds - time.perf_counter()))
        called = time.perf_counter()
        self._optimizer.step()
        self._blocked += time.perf_counter() - called

    def _check(self) -> None:
        """Raises `SystemExit` unless all values have changed in proportion, as the same rounds make them."""
        found: set[float] = set()
        for p, scale in zip(self._params, self._scales, strict=True):
            for rows in _rows(p.detach()):
                if not torch.equal(rows.amin(1), rows.amax(1)):
                    raise SystemExit("the parameters have other values within a bucket")
                found |= set((torch.unique(rows[:, 0]) / scale).tolist())
        if len(found) > self._most or 1.0 in found:
            raise SystemExit(f"the parameters have {len(found)} values in place of {self._most} new ones")


def _rows(values: torch.Tensor) -> list[torch.Tensor]:
    """In rows that no bucket divides."""
    whole = values.numel() // CUT * CUT
    return [rows for rows in (values[:whole].view(-1, CUT), values[whole:].view(1, -1)) if rows.numel()]


def main(role: str, index: str, workload: str, mode: str, milliseconds: str, *job: str) -> None:
    """Runs until its input ends. ``job``: DEVICE WORKERS SERVERS HOST."""
    torch.set_num_threads(1)

    def worker() -> Callable[[Run], dict[str, float]]:
        return PacedWorker(find(workload), mode, float(milliseconds) / 1e3, int(index)).run

    run_member(role, index, *job, make=worker)


if __name__ == "__main__":
    main(*sys.argv[1:])
