"""torchft's streaming DiLoCo at a stated pace: ``server|worker INDEX WORKLOAD MS HOST``; the server is its lighthouse.

As ours in `tensorwire.bench.actors.paced`: parameters of a model's shapes in 4 fragments, H = 20, and a step that
sleeps for MS milliseconds. torchft takes delays below the 5 steps between two fragments, so here it is 4; ours is 9.
"""

from __future__ import annotations

import os
import sys
import time
from datetime import timedelta

import torch
from torch.distributed import TCPStore
from torchft import Manager, ProcessGroupGloo
from torchft.coordination import LighthouseServer
from torchft.local_sgd import DiLoCo

from tensorwire.bench.actors.lines import Lines, Run
from tensorwire.bench.models import Model, find

EVERY, FRAGMENTS, DELAY = 20, 4, 4
_LONG = timedelta(seconds=600)
_SHRINK = 2.0**-10


class Worker:
    """A replica group of one process."""

    def __init__(self, model: Model, seconds: float, index: int, host: str, lighthouse: str) -> None:
        self._seconds, self._shrink = seconds, 1 - _SHRINK * (index + 1)
        self._params = [
            torch.nn.Parameter(torch.full((t.elements,), 2.0 ** (i % 8))) for i, t in enumerate(model.tensors)
        ]
        self._store = TCPStore(host, 0, is_master=True, wait_for_workers=False)
        self._manager = Manager(
            pg=ProcessGroupGloo(timeout=_LONG),
            load_state_dict=None,
            state_dict=None,
            min_replica_size=2,
            use_async_quorum=False,
            timeout=_LONG,
            quorum_timeout=_LONG,
            connect_timeout=_LONG,
            rank=0,
            world_size=1,
            store_addr=host,
            store_port=self._store.port,
            lighthouse_addr=lighthouse,
            replica_id=f"worker {index}",
            hostname=host,
            init_sync=False,
        )
        fragments = self._fragments(model)
        self._inner = torch.optim.SGD(self._params, lr=0.0)  # without gradients it does nothing, and is hooked
        outer = [torch.optim.SGD(f.parameters(), lr=0.7, momentum=0.9, nesterov=True) for f in fragments]
        self._training = DiLoCo(
            self._manager, fragments, self._inner, outer, EVERY, pin_memory=False, fragment_sync_delay=DELAY
        )
        self._training.__enter__()
        self._blocked = 0.0

    def _fragments(self, model: Model) -> list[torch.nn.Module]:
        """The tensors in their order, in groups of about the same size."""
        groups: list[list[torch.nn.Parameter]] = [[] for _ in range(FRAGMENTS)]
        passed = 0
        for param in self._params:
            groups[min(FRAGMENTS - 1, passed * FRAGMENTS * 4 // model.nbytes)].append(param)
            passed += param.numel()
        return [torch.nn.ParameterList(group) for group in groups if group]

    def run(self, run: Run) -> dict[str, float]:
        for _ in range(run.warm):
            self._step()
        self._blocked = 0.0
        start = time.perf_counter()
        for _ in range(run.count):
            self._step()
        seconds = time.perf_counter() - start
        if not all(torch.isfinite(p).all() and (p == p.flatten()[0]).all() for p in self._params):
            raise SystemExit("the parameters have other values within a tensor")
        return {"seconds": seconds, "steps": run.count, "exposed": self._blocked / seconds}

    def _step(self) -> None:
        start = time.perf_counter()
        with torch.no_grad():
            for p in self._params:
                p.mul_(self._shrink)
        time.sleep(max(0.0, start + self._seconds - time.perf_counter()))
        called = time.perf_counter()
        self._inner.step()
        self._blocked += time.perf_counter() - called


def main(role: str, index: str, workload: str, milliseconds: str, host: str) -> None:
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "cable"
    lines = Lines()
    if role == "server":
        lighthouse = LighthouseServer(bind=f"{host}:0", min_replicas=2, join_timeout_ms=60_000)
        lines.hello(f"http://{host}:{lighthouse.address().rpartition(':')[2]}")
        for _ in lines.runs():
            lines.answer()
        return
    worker = Worker(find(workload), float(milliseconds) / 1e3, int(index), host, lines.hello().split()[0])
    for run in lines.runs():
        lines.answer(**worker.run(run))


if __name__ == "__main__":
    main(*sys.argv[1:])
