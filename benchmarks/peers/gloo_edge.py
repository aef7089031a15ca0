"""torch.distributed's gloo with the ends of ``bench edge``: ``target|initiator DEVICE NBYTES``; the initiator produces.

``isend`` and ``irecv`` with two tensors at each end, so that one is on its way while the other is made or summed up.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.distributed as dist

from tensorwire.bench.actors.edge_work import Summands, Sums
from tensorwire.bench.actors.lines import Lines, Run, check, fill, timed

DEPTH = 2


class Target:
    """The consumer."""

    def __init__(self, nbytes: int) -> None:
        self._sums = Sums(nbytes // 4)
        self._tensors = [torch.zeros(nbytes // 4) for _ in range(DEPTH)]
        self._back = torch.zeros(1)

    def _receive(self, count: int, word: str) -> torch.Tensor:
        coming: Any = None
        for i in range(count):
            if i == 0:
                coming = dist.irecv(self._tensors[0], 1)
            coming.wait()
            if i + 1 < count:
                coming = dist.irecv(self._tensors[(i + 1) % DEPTH], 1)
            if word == "whole":
                self._sums.take(self._tensors[i % DEPTH])
        dist.send(self._back, 1)
        return self._tensors[(count - 1) % DEPTH]

    def run(self, run: Run) -> float:
        self._receive(run.warm, run.word)
        latest = self._receive(run.count, run.word).numpy()
        if run.word == "whole":
            self._sums.check(run.round, run.warm + run.count, latest)
        else:
            check(latest, run.round)
        return 0.0


class Initiator:
    """The producer."""

    def __init__(self, nbytes: int) -> None:
        self._summands = Summands(nbytes // 4)
        self._tensors = [torch.zeros(nbytes // 4) for _ in range(DEPTH)]
        self._back = torch.zeros(1)
        self._step = 0

    def _send(self, count: int, word: str) -> None:
        going: list[Any] = [None] * DEPTH
        for _ in range(count):
            self._step += 1
            at = self._step % DEPTH
            if going[at] is not None:
                going[at].wait()
            if word == "whole":
                self._summands.add(self._step, self._tensors[at])
            going[at] = dist.isend(self._tensors[at], 0)
        for work in going:
            if work is not None:
                work.wait()
        dist.recv(self._back, 0)

    def run(self, run: Run) -> float:
        self._step = 0
        if run.word == "whole":
            self._summands.prepare(run.round)
        else:
            for tensor in self._tensors:
                fill(tensor.numpy(), run.round)
        return timed(run, lambda count: self._send(count, run.word))


def main(role: str, device: str, nbytes: str) -> None:
    torch.set_num_threads(1)
    lines = Lines()
    target = role == "target"
    if target:
        store = dist.TCPStore("127.0.0.1", 0, 2, is_master=True, wait_for_workers=False)
        lines.hello(str(store.port))
    else:
        store = dist.TCPStore("127.0.0.1", int(lines.hello()), 2)
    dist.init_process_group("gloo", store=store, rank=0 if target else 1, world_size=2)
    end = Target(int(nbytes)) if target else Initiator(int(nbytes))
    for run in lines.runs():
        lines.answer(end.run(run))


if __name__ == "__main__":
    main(*sys.argv[1:])
