"""Training at a stated pace: ``server|worker INDEX WORKLOAD MODE MS KIND WORKERS SERVERS DEVICE HOST``.

The parameters have a model's shapes. A step computes for MS milliseconds, by KIND: ``sleep``, as if an accelerator
computed, or ``busy``, which takes that much time of a processor, and so longer in a process that is stopped now and
then. Words: none, a round is COUNT steps; ``timed``, it is as many steps as begin within COUNT milliseconds, for
workers that do not wait for each other.
"""

from __future__ import annotations

import sys
import time

import torch

from tensorwire.bench.actors.lines import Lines, Run
from tensorwire.bench.actors.store_job import join, serve
from tensorwire.bench.actors.transfer import counts, since
from tensorwire.bench.models import Model, find
from tensorwire.store import SSP, DiLoCo, Sync
from tensorwire.store.sharding import CUT

EVERY = 20
MODES: dict[str, Sync | SSP | DiLoCo] = {
    "sync": Sync(),
    "ssp": SSP(staleness=3),
    "diloco": DiLoCo(every=EVERY, fragments=4, delay=9),
    "decoupled": DiLoCo(every=EVERY, fragments=4, delay=4, quorum=1, grace=0.01),
}
_SMALL_BUCKETS = 2**20  # so that a small model has as many buckets as fragments
_LARGE = 64 * 2**20
_LEARNING_RATE = 2.0**-10


class PacedWorker:
    """Parameter ``i`` is 2**(i % 8) everywhere, and so is its gradient: all values change in proportion."""

    def __init__(self, model: Model, mode: str, seconds: float, kind: str, rank: int) -> None:
        import tensorwire as tw

        self._seconds, self._busy = seconds, kind == "busy"
        chosen = MODES[mode]
        self._scales = [2.0 ** (i % 8) for i in range(len(model.tensors))]
        bucket_bytes = _SMALL_BUCKETS if model.nbytes < _LARGE else 2**22
        self._most = chosen.fragments if isinstance(chosen, DiLoCo) else 1  # values, up to the scale
        if isinstance(chosen, SSP) or (isinstance(chosen, DiLoCo) and chosen.quorum is not None):
            # Each bucket is updated by itself: those of other workers' pushes that it has may differ.
            self._most = len(model.tensors) + model.nbytes // bucket_bytes
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
        # Where a step sleeps, the change that a worker's own optimizer would make belongs to the computation.
        self._changes = isinstance(chosen, DiLoCo) and kind == "sleep"
        self._shrink = 1 - _LEARNING_RATE * (rank + 1)
        for p, scale in zip(self._params, self._scales, strict=True):
            p.grad = None if self._changes else torch.full_like(p, scale)
        self._blocked = 0.0

    def run(self, run: Run) -> dict[str, float]:
        """One round: its steps, its seconds, and the share of them that it spent in ``step()``."""
        for _ in range(run.warm):
            self._step()
        self._blocked = 0.0
        start = time.perf_counter()
        end = start + run.count / 1e3 if run.word == "timed" else None
        steps = 0
        while steps < run.count if end is None else time.perf_counter() < end:
            self._step()
            steps += 1
        seconds = time.perf_counter() - start
        self._check()
        return {"seconds": seconds, "steps": steps, "exposed": self._blocked / seconds}

    def _step(self) -> None:
        start = time.perf_counter()
        if self._busy:
            end = time.thread_time() + self._seconds
            while time.thread_time() < end:
                pass
        else:
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


def work(
    lines: Lines, index: int, model: Model, mode: str, pace: tuple[float, str], sizes: tuple[int, int], device: str
) -> None:
    """A worker's rounds."""
    import tensorwire as tw

    join(lines, index, *sizes, device)
    tw.init()
    worker = PacedWorker(model, mode, *pace, index)
    for run in lines.runs():
        before = counts()
        lines.answer(**worker.run(run), **since(before))


def main(
    role: str,
    index: str,
    workload: str,
    mode: str,
    milliseconds: str,
    kind: str,
    workers: str,
    servers: str,
    device: str,
    interface: str,
) -> None:
    """Runs until its input ends."""
    torch.set_num_threads(1)
    lines = Lines()
    sizes = (int(workers), int(servers))
    if role == "server":
        serve(lines, int(index), *sizes, device, interface)
    else:
        pace = (float(milliseconds) / 1e3, kind)
        work(lines, int(index), find(workload), mode, pace, sizes, device)


if __name__ == "__main__":
    main(*sys.argv[1:])
