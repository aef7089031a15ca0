"""Real jobs for tests: a coordinator here, servers and workers as forked processes that share warm imports."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import secrets
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from tensorwire.control import Cause, Coordinator
from tensorwire.testing.patience import patient

JOIN_SECONDS = patient(200.0)
LOST_AFTER = patient(10.0)

context = multiprocessing.get_context("forkserver")
context.set_forkserver_preload(["tests.harness.warm_imports"])


@dataclass
class Ended:
    """How a job went: each worker's result (or its error's text), exit codes, and the cause of its end."""

    results: list[Any]
    errors: list[str]
    codes: list[int | None]
    cause: Cause | None

    def ok(self) -> list[Any]:
        """The results of a job in which nothing failed."""
        assert self.cause is None, self.cause
        assert self.errors == [""] * len(self.errors), self.errors
        assert self.codes == [0] * len(self.codes), self.codes
        return self.results


def environment(address: str, secret: str, device: str, workers: int, servers: int, fates: str = "") -> dict[str, str]:
    """What every process of a job finds in its environment."""
    return {
        "TENSORWIRE_COORDINATOR": address,
        "TENSORWIRE_SECRET": secret,
        "TENSORWIRE_DEVICE": device,
        "TENSORWIRE_WORKERS": str(workers),
        "TENSORWIRE_SERVERS": str(servers),
        "TENSORWIRE_GRACE": str(patient(20.0)),
        "TENSORWIRE_FAILURE_TIMEOUT": str(LOST_AFTER),
        "TENSORWIRE_FATES": fates,
    }


def serve(environment: dict[str, str], index: int, prepare: Callable[[], None] | None = None) -> None:
    """A server of a job."""
    from tensorwire.launch import server_process

    os.environ.update(environment, TENSORWIRE_INDEX=str(index))
    if prepare is not None:
        prepare()
    raise SystemExit(server_process.main())


def work(
    environment: dict[str, str], rank: int, function: Callable[..., Any], args: tuple[Any, ...], pipe: Connection
) -> None:
    """A worker of a job, whose error and result the pipe brings."""
    import tensorwire as tw

    if find_spec("torch"):
        import torch

        torch.set_num_threads(1)
    os.environ.update(environment, TENSORWIRE_RANK=str(rank))
    try:
        with tw.init() as job:
            result = function(job, *args)
        pipe.send_bytes(pickle.dumps(("", result)))  # plain pickle: torch would share tensors by descriptor
    except BaseException as error:
        pipe.send_bytes(pickle.dumps((f"{type(error).__name__}: {error}\n{traceback.format_exc()}", None)))
        raise SystemExit(1) from None


def for_each(job: Any, function: Callable[..., Any], cases: Sequence[tuple[Any, ...]]) -> list[Any]:
    """What ``function(job, *case)`` returns for each case: several programs of one job, as `run_job` runs them."""
    return [function(job, *case) for case in cases]


def in_turn(job: Any, *programs: Callable[[Any], Any]) -> list[Any]:
    """What each program returns: several of one job, as `run_job` runs them."""
    return [program(job) for program in programs]


def run_job(
    function: Callable[..., Any],
    *args: Any,
    workers: int = 2,
    servers: int = 1,
    device: str = "auto",
    prepare: Callable[[], None] | None = None,
    fates: Path | None = None,
    fresh: bool = False,
    min_workers: int = 0,
    again: Sequence[int] = (),
    rejoin_seconds: float = 0.0,
) -> Ended:
    """Runs ``function(job, *args)`` in every worker of a real job, and waits until all its processes are gone.

    ``prepare()`` is called in every server before it begins. ``fates``: a folder for the fates of all pushes.
    ``min_workers``, ``rejoin_seconds``: as for `Coordinator`. ``again``: ranks
    that another process takes when their first one dies.
    ``fresh``: workers import everything themselves: PyTorch takes a new kind of device only before its first backward.
    """
    worker_context = multiprocessing.get_context("spawn") if fresh else context
    secret = secrets.token_hex(32)
    coordinator = Coordinator(
        secret.encode(),
        workers=workers,
        servers=servers,
        lost_after=LOST_AFTER,
        min_workers=min_workers,
        rejoin_seconds=rejoin_seconds,
    )
    common = environment(coordinator.address, secret, device, workers, servers, str(fates or ""))
    pipes = [worker_context.Pipe(duplex=False) for _ in range(workers)]
    processes = [context.Process(target=serve, args=(common, i, prepare)) for i in range(servers)]
    for rank in range(workers):
        processes.append(worker_context.Process(target=work, args=(common, rank, function, args, pipes[rank][1])))  # type: ignore[arg-type]
    try:
        for process in processes:
            process.start()
        for _, theirs in pipes:
            theirs.close()
        results: list[Any] = [None] * workers
        errors = ["no answer"] * workers
        there = {mine: rank for rank, (mine, _) in enumerate(pipes)}
        left = set(again)
        while there and (ready := wait(list(there), JOIN_SECONDS)):
            for mine in ready:
                assert isinstance(mine, Connection)
                rank = there.pop(mine)
                try:
                    errors[rank], results[rank] = pickle.loads(mine.recv_bytes())
                except EOFError:
                    errors[rank] = "died"
                    if rank in left:
                        left.discard(rank)
                        new, theirs = worker_context.Pipe(duplex=False)
                        process = worker_context.Process(target=work, args=(common, rank, function, args, theirs))  # type: ignore[arg-type]
                        process.start()
                        processes.append(process)
                        theirs.close()
                        there[new] = rank
                mine.close()
        for process in processes:
            process.join(JOIN_SECONDS)
        codes = [p.exitcode for p in processes]
        if any(codes):  # of several accounts of a failure the coordinator waits a moment for the best
            coordinator.ended.wait(patient(10.0))
        return Ended(results, errors, codes, coordinator.cause)
    finally:
        for process in processes:
            if process.is_alive():
                process.kill()
            process.join()
            process.close()
        coordinator.close()
