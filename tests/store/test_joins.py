"""A worker that joins gets the present values, holds nobody up, and takes part from some step on."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

import tensorwire as tw
from tensorwire.store import SSP, Async, DiLoCo, LocalSGD, Sync
from tensorwire.store.modes import Mode
from tests.harness.jobs import run_job
from tests.levels import mostly_long
from tests.store.test_losses import fates_in

WORKERS, AT = 3, 5
NEW = WORKERS  # the place of what the one who joins pushes; each of the others has one by its rank
MODES = (Sync(), Async(), SSP(staleness=1), DiLoCo(every=1, quorum=2), LocalSGD(every=1))


def count_pushes(job: tw.Job, mode: Mode, options: dict[str, Any]) -> dict[str, Any]:
    """The parameters count the pushes of each. Worker 1 is killed; who joins in its place counts elsewhere."""
    joined = job._worker.joins
    p = torch.nn.Parameter(torch.full((WORKERS + 1, 1500), 7.0 * (1 + job.rank)))  # worker 0's values win
    kind: dict[str, Any] = {} if isinstance(mode, (DiLoCo, LocalSGD)) else {"reduce": "sum"}
    store = tw.torch.StoreOptimizer(
        [("p", p)], torch.optim.SGD, lr=1.0, mode=mode, bucket_bytes=4096, shards=3, **kind, **options
    )
    first = p.detach().clone()
    place, steps = NEW if joined else job.rank, 0
    while True:
        loss = p[place].sum()
        store.zero_grad()
        loss.backward()
        store.step()
        store.wait()
        steps += 1
        if job.rank == 1 and not joined and steps == AT:
            os.kill(os.getpid(), signal.SIGKILL)
        if (p[NEW] - 7.0).max() <= -1:
            break
    return {"first": first, "last": p.detach().clone(), "steps": steps, "updates": store._client.updates}


CASES = [(device, mode) for device in ("shm", "tcp") for mode in MODES]


@pytest.mark.parametrize(("device", "mode"), mostly_long(CASES, [c for c in CASES if c[0] == "shm"]), ids=repr)
def test_a_worker_joins_in_every_mode(device: str, mode: Mode, tmp_path: Path) -> None:
    options: dict[str, Any] = {"overlap": True} if device == "tcp" and mode == Sync() else {}
    ended = run_job(
        count_pushes, mode, options, workers=WORKERS, servers=2, device=device, fates=tmp_path, min_workers=2, again=[1]
    )
    assert ended.cause is None, ended.cause
    assert ended.errors == [""] * WORKERS
    zero, one, two = ended.results
    assert (one["first"][1] < 7).all(), "the present values, to which the process before it had pushed"
    fates = fates_in(tmp_path)
    if mode == Sync():
        assert torch.equal(zero["last"], one["last"])
        assert torch.equal(zero["last"], two["last"])
        assert zero["updates"] == one["updates"] == two["updates"] == zero["steps"]
        for worker, places in ((0, [0]), (1, [1, NEW]), (2, [2])):
            for shard, bucket in {(f.shard, f.bucket) for f in fates}:
                count = sum((f.worker, f.shard, f.bucket) == (worker, shard, bucket) for f in fates)
                assert count == (7 - zero["last"][places]).sum(0).max()


def wait_for_another(job: tw.Job) -> dict[str, Any]:
    """With fewer workers than the job needs, rounds wait."""
    joined = job._worker.joins
    p = torch.nn.Parameter(torch.zeros(3000))
    store = tw.torch.StoreOptimizer([("p", p)], torch.optim.SGD, lr=1.0, reduce="sum", bucket_bytes=4096)
    for step in range(8):
        p.grad = torch.ones_like(p)
        store.step()
        if job.rank == 1 and not joined and step == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        if store._client.updates == 8:
            break
    return {"last": p[0].item(), "updates": store._client.updates}


@pytest.mark.parametrize("device", ["shm", "tcp"])
def test_rounds_wait_where_too_few_are_left(device: str) -> None:
    """The step of the loss may have been taken by one worker alone, but no other one."""
    ended = run_job(wait_for_another, workers=2, servers=2, device=device, min_workers=2, again=[1], rejoin_seconds=600)
    assert ended.cause is None, ended.cause
    zero, one = ended.results
    assert zero == one
    assert zero["updates"] == 8
    assert zero["last"] in (-16, -15, -14)


def differ(job: tw.Job) -> int:
    p = torch.nn.Parameter(torch.zeros(4 if job._worker.joins else 3))
    store = tw.torch.StoreOptimizer([("p", p)], torch.optim.SGD, lr=1.0)
    for step in range(30):
        p.grad = torch.ones_like(p)
        store.step()
        if job.rank == 1 and step == 2:
            os.kill(os.getpid(), signal.SIGKILL)
    while (lost := job._worker.member.membership.lost.get(1)) is None or lost.incarnation == 0:
        pass
    return 0


def test_one_with_another_model_is_refused_alone() -> None:
    ended = run_job(differ, workers=3, min_workers=1, again=[1])
    assert ended.cause is None
    assert "PlanMismatch" in ended.errors[1]
    assert ended.errors[0] == ended.errors[2] == ""
