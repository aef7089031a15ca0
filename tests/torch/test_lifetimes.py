"""Stores end with their optimizers and keys: nothing of them stays in workers and servers."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import tensorwire as tw
from tensorwire.errors import ArgumentError
from tensorwire.launch.worker import current_worker
from tensorwire.store.modes import Async, DiLoCo, LocalSGD
from tensorwire.testing.patience import patient
from tests.harness.jobs import run_job
from tests.levels import mostly_long
from tests.store.array_rules import held


def network() -> torch.nn.Sequential:
    torch.manual_seed(3)
    return torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 8))


def train(net: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: int = 2) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        net(torch.ones(4, 64)).sum().backward()
        optimizer.step()


def trained(**options: Any) -> tuple[torch.nn.Module, tw.torch.StoreOptimizer]:
    net = network()
    optimizer = tw.torch.StoreOptimizer(net, torch.optim.SGD, lr=1e-3, momentum=0.9, **options)
    train(net, optimizer)
    return net, optimizer


# ---- nothing stays


def optimizers(close: bool, **options: Any) -> Callable[[], None]:
    def run() -> None:
        _, optimizer = trained(**options)
        torch.optim.lr_scheduler.StepLR(optimizer, 1)  # makes it refer to itself
        if options.get("mode") is None:
            optimizer.state_dict()  # an entry in the address book, and a thread that ends
        if close:
            optimizer.close()

    return run


def embedding() -> None:
    net = torch.nn.EmbeddingBag(1000, 8, sparse=True)
    optimizer = tw.torch.StoreOptimizer(net, torch.optim.SGD, lr=0.1)
    net(torch.arange(8).view(2, 4)).sum().backward()
    optimizer.step()
    optimizer.close()


def keys(close: bool) -> Callable[[], None]:
    def run() -> None:
        kv = tw.store.KeyValue(rule="sum")
        kv.init("a", np.zeros(1000, np.float32))
        kv.init_rows("r", (100, 8))
        kv.pushpull("a", np.ones(1000, np.float32)).wait()
        handle = kv.row_sparse_push("r", np.arange(4), np.ones((4, 8), np.float32))
        if close:
            kv.close()
            return
        del kv
        current_worker().finish_dropped()
        handle.wait()  # it keeps what it waits for

    return run


KINDS: dict[str, Callable[[], None]] = {
    "closed": optimizers(close=True),
    "dropped": optimizers(close=False),
    "overlap, closed": optimizers(close=True, overlap=True),
    "overlap, dropped": optimizers(close=False, overlap=True),
    "async": optimizers(close=True, mode=Async()),
    "local": optimizers(close=False, mode=LocalSGD(every=1)),
    "diloco": optimizers(close=False, mode=DiLoCo(every=2, delay=1)),
    "embedding": embedding,
    "keys, closed": keys(close=True),
    "keys, dropped": keys(close=False),
}


def sweep(job: Any) -> list[str]:
    """Runs each kind a few times; returns what was held more after the last than after the first."""
    probe = tw.store.KeyValue(Async(), "tests.store.array_rules:what_is_held")
    probe.init("held", np.zeros(3, np.int64))

    def settle() -> None:
        gc.collect()
        job.barrier()  # by now this worker has finished what was dropped
        job.barrier()  # and all have

    def in_both() -> list[int]:
        return [*probe.pushpull("held", np.zeros(3, np.int64)).wait(), *held()]

    def in_the_end(least: list[int]) -> list[int]:
        """Servers free a store in threads of theirs, when the last worker has finished."""
        end = time.monotonic() + patient(20.0)
        while True:
            found = in_both()
            if all(now <= then for now, then in zip(found, least, strict=True)) or time.monotonic() > end:
                return found

    grown = []
    for kind, run in KINDS.items():
        run()
        settle()
        before = in_both()
        for _ in range(2):
            run()
        settle()
        after = in_the_end(before)
        if any(now > then for now, then in zip(after, before, strict=True)):
            names = sorted(thread.name for thread in threading.enumerate())
            grown.append(f"{kind}: {before} became {after}, with threads {names}")
    return grown


@pytest.mark.slow
@pytest.mark.parametrize("device", mostly_long(["shm", "tcp"], ["shm"]))
def test_a_sweep_of_trainings_holds_what_one_holds(device: str) -> None:
    assert run_job(sweep, device=device).ok() == [[], []]


# ---- what comes after


def after_closing(job: Any) -> list[str]:
    """What every method says, and that the model goes on with a stock optimizer."""
    net, optimizer = trained()
    kept = [p.detach().clone() for p in net.parameters()]
    optimizer.close()
    optimizer.close()
    assert all(torch.equal(p, q) for p, q in zip(net.parameters(), kept, strict=True))
    calls: list[Callable[[], Any]] = [
        optimizer.step,
        optimizer.wait,
        optimizer.state_dict,
        optimizer.no_sync,
        lambda: optimizer.add_param_group({"params": [("more", torch.nn.Parameter(torch.zeros(2)))]}),
    ]
    for call in calls:
        with pytest.raises(ArgumentError, match="this optimizer was closed"):
            call()
    train(net, torch.optim.SGD(net.parameters(), lr=1e-3))
    assert not any(torch.equal(p, q) for p, q in zip(net.parameters(), kept, strict=True))
    _, again = trained()  # the next store of both workers
    kv = tw.store.KeyValue(rule="sum")
    kv.init("a", np.zeros(4))
    kv.close()
    kv.close()
    for use in (lambda: kv.pull("a"), lambda: kv.init("b", np.zeros(2)), lambda: kv.push("a", np.ones(4))):
        with pytest.raises(ArgumentError, match="these keys were closed"):
            use()
    again.close()
    return []


def test_what_is_closed_says_so_and_leaves_an_ordinary_model() -> None:
    assert run_job(after_closing).ok() == [[], []]
