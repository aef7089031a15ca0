"""A worker that trains, or its server: ``ROLE INDEX KIND WORKLOAD SHRINK MEETING DEVICE WORKERS SERVERS HOST``.

``KIND``: ``compute`` (no update), ``alone`` (torch's own optimizer in each worker), ``ddp``,
``store``, or ``overlap`` (a store that is pushed to while backward runs). ``MEETING``: the file by which DDP's workers
find each other. The word of a round: the seconds that a model of sleeping layers takes a step.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.actors import members
from benchmarks.sleeping_layers import MODELS, SleepingLayers
from benchmarks.training import REHEARSAL
from tensorwire.bench.actors import store_job
from tensorwire.bench.actors.lines import Lines, Run
from tensorwire.bench.actors.transfer import counts, since
from tensorwire.models import Model

SGD: dict[str, Any] = {"lr": 0.01, "momentum": 0.9, "fused": True}
BATCHES = 4  # of each worker, over and over


class Worker:
    """One worker: its model, its batches, and how it updates. ``update()`` follows backward; ``leave()`` is the end."""

    def __init__(self, kind: str, model: Model, shrink: int, rank: int, workers: int, meeting: str) -> None:
        torch.manual_seed(0)  # every worker of every kind begins with the same values
        self.model = model.build(shrink)
        self.module: nn.Module = self.model
        generator = torch.Generator().manual_seed(1 + rank)
        self.size, self._rank, self._steps = model.size, rank, 0
        self._batches = [model.inputs(model.size, generator) for _ in range(BATCHES)]
        self.leave: Callable[[], object] = lambda: None
        self.update: Callable[[], object] = lambda: None
        self.clear: Callable[[], object] = self.model.zero_grad
        if kind in ("store", "overlap"):
            self._store(overlap=kind == "overlap")
        elif kind == "ddp":
            self._ddp(rank, workers, meeting)
        if kind in ("alone", "ddp"):
            self.update = torch.optim.SGD(self.module.parameters(), **SGD).step

    def _store(self, overlap: bool) -> None:
        import tensorwire as tw

        job = tw.init()
        options = {**SGD, "overlap": True} if overlap else SGD
        optimizer = tw.torch.StoreOptimizer(self.model.named_parameters(), torch.optim.SGD, **options)
        self.update, self.leave = optimizer.step, job.close
        self.clear = optimizer.zero_grad  # the model's would wait for all parameters

    def _ddp(self, rank: int, workers: int, meeting: str) -> None:
        from torch import distributed

        distributed.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=workers)
        # Its faster settings. Buffers stay local, as with a store: the same work.
        self.module = nn.parallel.DistributedDataParallel(
            self.model, gradient_as_bucket_view=True, broadcast_buffers=False
        )
        self.leave = distributed.destroy_process_group

    def step(self) -> Tensor:
        """One step; its loss."""
        torch.manual_seed(1_000_000 * self._rank + self._steps)  # dropout: the same for every kind
        batch = self._batches[self._steps % BATCHES]
        self._steps += 1
        self.clear()
        loss: Tensor = self.module(*batch)
        loss.backward()  # type: ignore[no-untyped-call]
        self.update()
        return loss

    def round(self, run: Run) -> tuple[float, float, dict[str, float]]:
        """A round's beginning and end by the clock, and what else is told of it."""
        if run.word and isinstance(self.model, SleepingLayers):
            self.model.take(float(run.word))
        before = counts()
        start, stop, loss = members.steps(run, self.step)
        return start, stop, {"loss": loss, "samples": self.size, **since(before)}


def main(role: str, index: str, kind: str, workload: str, shrink: str, meeting: str, device: str, *sizes: str) -> None:
    """Runs as the bench says. ``sizes``: WORKERS SERVERS HOST."""
    lines, workers, servers = Lines(), int(sizes[0]), int(sizes[1])
    if role == "server":
        members.serve(lines, int(index), device, workers, servers, sizes[2])
        return
    if kind in ("store", "overlap"):
        store_job.join(lines, int(index), device, workers, servers)
    else:
        lines.hello()
    worker = Worker(kind, MODELS[workload], int(shrink), int(index), workers, meeting)
    members.train(lines, worker.round, worker.leave, REHEARSAL)


if __name__ == "__main__":
    main(*sys.argv[1:])
