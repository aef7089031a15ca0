"""Workers that take different numbers of steps: with ``job.uneven()``, and without."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

import tensorwire as tw
from tensorwire import errors
from tests.harness.jobs import for_each, run_job
from tests.levels import mostly_long

SHAPES = {"wide": (300, 40), "bias": (7,), "rare": (5,), "never": (3,)}
BUCKET = 16 << 10
BLOCKS = [(2, 5, 3), (4, 0, 4), (1, 1, 1)]  # steps of each worker; between them one step of all


def parameters(seed: int) -> dict[str, torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return {k: torch.nn.Parameter(torch.randn(s, generator=generator)) for k, s in SHAPES.items()}


def gradient(name: str, rank: int, step: int) -> torch.Tensor | None:
    """``rare`` is used by worker 1 alone, ``never`` by nobody."""
    if name == "never" or (name == "rare" and rank != 1):
        return None
    return torch.randn(SHAPES[name], generator=torch.Generator().manual_seed(100 * len(name) + 10 * rank + step))


def train(optimizer: torch.optim.Optimizer, params: dict[str, torch.nn.Parameter], rank: int, step: int) -> None:
    for name, p in params.items():
        p.grad = gradient(name, rank, step)
    optimizer.step()


def uneven(job: tw.Job) -> tuple[list[dict[str, torch.Tensor]], list[int], dict[str, Any]]:
    """Two stores, of which the second takes every other step."""
    models = [parameters(seed) for seed in (0, 1)]
    stores = [
        tw.torch.StoreOptimizer(m.items(), torch.optim.Adam, lr=0.1, bucket_bytes=BUCKET, betas=(0.5, 0.9))
        for m in models
    ]
    step = 0
    for block in BLOCKS:
        with job.uneven():
            for i in range(block[job.rank]):
                train(stores[0], models[0], job.rank, step + i)
                if i % 2 == 0:
                    train(stores[1], models[1], job.rank, step + i)
        step += max(block)
        for store, params in zip(stores, models, strict=True):
            train(store, params, job.rank, step)
        step += 1
    values = [{k: p.detach().clone() for k, p in m.items()} for m in models]
    return values, [s._parts[0].client.updates for s in stores], stores[0].state_dict()["state"]


def reference() -> list[dict[str, torch.Tensor]]:
    """One process; the mean is over all three."""
    models = [parameters(seed) for seed in (0, 1)]
    stocks = [torch.optim.Adam(m.items(), lr=0.1, betas=(0.5, 0.9), fused=True) for m in models]

    def together(which: int, ranks: list[int], step: int) -> None:
        for name, p in models[which].items():
            found = [g for g in (gradient(name, rank, step) for rank in ranks) if g is not None]
            p.grad = None
            if found:
                total = found[0].clone()
                for g in found[1:]:
                    total += g
                p.grad = total / 3
        stocks[which].step()

    step = 0
    for block in BLOCKS:
        for i in range(max(block)):
            ranks = [rank for rank in range(3) if i < block[rank]]
            together(0, ranks, step + i)
            if i % 2 == 0:
                together(1, ranks, step + i)
        step += max(block)
        together(0, [0, 1, 2], step)
        together(1, [0, 1, 2], step)
        step += 1
    return [{k: p.detach().clone() for k, p in m.items()} for m in models]


@pytest.mark.parametrize(("device", "servers"), mostly_long([("shm", 1), ("tcp", 2)], [("tcp", 2)]))
def test_a_worker_whose_loop_ended_counts_as_zero(device: str, servers: int) -> None:
    expected = reference()
    for values, updates, state in run_job(uneven, workers=3, servers=servers, device=device).ok():
        for mine, stock in zip(values, expected, strict=True):
            assert all(torch.equal(mine[k], stock[k]) for k in stock)
        assert updates == [5 + 1 + 4 + 1 + 1 + 1, 3 + 1 + 2 + 1 + 1 + 1]
        assert sorted(state) == [0, 1, 2]  # ``never`` was not touched


def with_overlap(job: tw.Job, max_norm: float | None) -> tuple[list[torch.Tensor], int]:
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(9, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3))
    store = tw.torch.StoreOptimizer(
        net.named_parameters(), torch.optim.SGD, lr=0.1, overlap=True, max_grad_norm=max_norm
    )

    def backward(step: int) -> None:
        x = torch.randn(4, 9, generator=torch.Generator().manual_seed(10 * job.rank + step))
        store.zero_grad()
        net(x).square().sum().backward()

    with job.uneven():
        for step in range(4 if job.rank else 1):
            backward(step)
            store.step()
    backward(5)
    with pytest.raises(errors.ArgumentError, match="between backward"), job.uneven():
        pass
    store.step()
    store.wait()
    return [p.detach().clone() for p in net.parameters()], store._parts[0].client.updates


def test_with_overlap() -> None:
    for (first, steps), (second, others) in zip(*run_job(for_each, with_overlap, [(None,), (0.5,)]).ok(), strict=True):
        assert steps == others == 5
        assert all(map(torch.equal, first, second))
        assert all(bool(p.isfinite().all()) for p in first)


def finishes_early(job: tw.Job) -> str:
    params = parameters(0)
    store = tw.torch.StoreOptimizer(params.items(), torch.optim.SGD, lr=0.1)
    for step in range(4 if job.rank else 2):
        try:
            train(store, params, job.rank, step)
        except errors.WorkerFinished as error:
            return str(error)
    return ""


def test_without_it_the_error_names_the_worker_that_finished() -> None:
    ended = run_job(finishes_early)
    message = "worker 0 finished after step 2, worker 1 goes on with step 3: give every worker the same number of steps"
    assert str(ended.cause).startswith(message)
    assert ended.results[1].startswith(message)


def alone_in_the_block(job: tw.Job) -> None:
    params = parameters(0)
    store = tw.torch.StoreOptimizer(params.items(), torch.optim.SGD, lr=0.1)
    train(store, params, job.rank, 0)
    if job.rank == 1:
        with job.uneven():
            train(store, params, job.rank, 1)
    else:
        train(store, params, job.rank, 1)


def test_a_worker_without_the_block_gets_an_error() -> None:
    ended = run_job(alone_in_the_block)
    assert "worker 0 finished, worker 1 waits for it at the end of `with job.uneven():`" in str(ended.cause)
    assert ended.errors[1].startswith("WorkerFinished")


def fails(job: tw.Job, how: str) -> None:
    params = parameters(0)
    store = tw.torch.StoreOptimizer(params.items(), torch.optim.SGD, lr=0.1)
    with job.uneven():
        for step in range(3 if job.rank else 1):
            train(store, params, job.rank, step)
        if job.rank and how == "raises":
            raise ValueError("no more data")
        if job.rank:
            os._exit(9)


@pytest.mark.parametrize(("how", "why"), [("raises", "worker 1 raised ValueError: no more data"), ("dies", "worker 1")])
def test_a_failure_while_others_wait_ends_the_job(how: str, why: str) -> None:
    ended = run_job(fails, how)
    assert ended.cause is not None
    assert str(ended.cause).startswith(why)
    assert ended.errors[0].startswith("JobEnded")
