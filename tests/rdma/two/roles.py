"""The processes of a job in one guest: forked from one that has imported torch, which takes half a minute here."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

from tensorwire.testing.patience import patient
from tests.harness import jobs
from tests.rdma.two import training

END_SECONDS = patient(180.0)  # only a guard


class Roles:
    """Servers and workers of one job after the other."""

    def __init__(self) -> None:
        self._processes: list[BaseProcess] = []
        self._pipes: list[Connection] = []

    def start_server(self, address: str, secret: str, device: str, workers: int) -> None:
        """The one server of a job."""
        self._start(jobs.serve, jobs.environment(address, secret, device, workers, 1), 0)

    def start_worker(
        self, address: str, secret: str, device: str, workers: int, rank: int, what: str, *arguments: Any
    ) -> None:
        """A worker that runs the function of ``training`` that is named ``what``."""
        mine, theirs = jobs.context.Pipe(duplex=False)
        function: Callable[..., Any] = getattr(training, what)
        environment = jobs.environment(address, secret, device, workers, 1)
        self._start(jobs.work, environment, rank, function, arguments, theirs)
        theirs.close()
        self._pipes.append(mine)

    def _start(self, target: Callable[..., Any], *arguments: Any) -> None:
        process = jobs.context.Process(target=target, args=arguments)
        process.start()
        self._processes.append(process)

    def ended(self, index: int) -> int | None:
        """Waits for the end of a process, in the order they were started; its exit code."""
        process = self._processes[index]
        assert wait([process.sentinel], END_SECONDS), "a process of the job did not end"
        process.join()
        return process.exitcode

    def results(self) -> list[tuple[str, Any]]:
        """Each worker's error and result; all processes are gone then, and forgotten."""
        found: list[tuple[str, Any]] = []
        for pipe in self._pipes:
            try:
                assert pipe.poll(END_SECONDS), "a worker says nothing"
                found.append(pickle.loads(pipe.recv_bytes()))
            except EOFError:
                found.append(("died", None))
            pipe.close()
        for index in range(len(self._processes)):
            self.ended(index)
        for process in self._processes:
            process.close()
        self._pipes, self._processes = [], []
        return found


PRELOAD = ["sklearn.datasets", "tests.harness.warm_imports"]


def warm() -> None:
    """Starts the process that the others are forked from; it has imported everything when this returns."""
    jobs.context.set_forkserver_preload(PRELOAD)
    process = jobs.context.Process(target=int)
    process.start()
    process.join()
    process.close()
