"""A worker of a model that is cut, or the coordinator of their job: ``server|worker INDEX MODE WORKLOAD SHRINK DEVICE
WORKERS SERVERS HOST``.

``MODE``: how tensors cross, or ``alone``: the whole model in one process, by eager kernels. Its line to the benchmark
tells where the model is cut, as JSON.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections.abc import Callable
from dataclasses import asdict, replace

import torch
from torch import Tensor

import tensorwire as tw
from benchmarks.actors import members
from benchmarks.actors.train import BATCHES, SGD
from benchmarks.cuts import cut
from benchmarks.graphs import REHEARSAL
from tensorwire.bench.actors import store_job
from tensorwire.bench.actors.lines import Lines, Run
from tensorwire.control import Coordinator
from tensorwire.launch import current_worker
from tensorwire.models import MODELS
from tensorwire.observe import counters, spans
from tensorwire.observe.spans import clock
from tensorwire.torch.graph.execution.job_group import group_of


class Worker:
    """The model, of which this worker has a part, and the batches, which all workers have."""

    def __init__(self, mode: str, workload: str, shrink: int, workers: int) -> None:
        torch.manual_seed(0)  # every process begins with the same values
        made = MODELS[workload]
        self.model = made.build(shrink)
        generator = torch.Generator().manual_seed(1)
        self._batches = [made.inputs(made.size, generator) for _ in range(BATCHES)]
        self._step = 0
        nbytes = sum(p.numel() * p.element_size() for p in self.model.parameters())
        self.facts = {"cut": "", "nbytes": nbytes, "batch": made.size}
        self.run: Callable[..., Tensor] = self.model
        self.leave: Callable[[], object] = lambda: None
        if mode == "alone":
            self.run = torch.compile(self.model, backend="eager")
        else:
            self._cut = cut(workload, self.model, self._batches[0], workers)
            self.facts["cut"] = self._cut.text
        # Parameters of other workers have no gradients here: the optimizer passes them by.
        self._optimizer = torch.optim.SGD(self.model.parameters(), **SGD)

    def join(self, mode: str) -> None:
        """Joins the job, and has this worker's part of the model run."""
        job = tw.init()
        self.leave = job.close
        if mode == "rpc":
            os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # it tells people that a peer has left in good order
            importlib.import_module("benchmarks.rpc").install(group_of(current_worker()))
            mode = "copy"
        tw.torch.place(self.model, self._cut.workers)
        self.run = torch.compile(self.model, backend="tensorwire", options={"mode": mode})

    def step(self) -> Tensor:
        """One step, which a trace shows; its loss."""
        start = clock()
        torch.manual_seed(self._step)  # dropout: the same in every mode
        batch = self._batches[self._step % BATCHES]
        self._step += 1
        self._optimizer.zero_grad()
        loss = self.run(*batch)
        loss.backward()  # type: ignore[no-untyped-call]
        self._optimizer.step()
        spans.add("compute", self._step, start, clock())
        return loss.detach()

    def round(self, run: Run) -> tuple[float, float, dict[str, float]]:
        """When the timed steps began and ended by the clock, and what is told of them."""
        for _ in range(run.warm):
            self.step()
        before = counters.snapshot()
        start, stop, loss = members.steps(replace(run, warm=0), self.step)
        return start, stop, {"loss": loss, **asdict(counters.since(before))}


def main(role: str, index: str, mode: str, workload: str, shrink: str, device: str, workers: str, *_: str) -> None:
    """Runs as the bench says."""
    lines = Lines()
    if role == "server":
        lines.hello(Coordinator(os.environ["TENSORWIRE_SECRET"].encode(), workers=int(workers), servers=0).address)
        for _run in lines.runs():
            lines.answer()
        return
    worker = Worker(mode, workload, int(shrink), int(workers))
    store_job.join(lines, int(index), device, int(workers), 0, json.dumps(worker.facts))
    if mode != "alone":
        worker.join(mode)
    members.train(lines, worker.round, worker.leave, REHEARSAL)


if __name__ == "__main__":
    main(*sys.argv[1:])
