"""A worker that joins gets the present values, holds nobody up, and takes part from some step on."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tensorwire as tw
from tensorwire.store import SSP, Async, DiLoCo, KeyValue, LocalSGD, Sync
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


def count_in_keys(job: tw.Job, mode: Sync | Async | SSP) -> tuple[list[float], list[float], int]:
    """As above, in keys and rows. Another store comes when the one who joins is there."""
    joined = job._worker.joins
    kv = KeyValue(mode, "sum")
    kv.init(["a", "b"], [np.full(WORKERS + 1, 7.0 * (1 + job.rank), "f4"), np.zeros((2000, 2), "f4")])
    kv.init_rows("rows", (6, WORKERS + 1), values=np.full((6, WORKERS + 1), 7.0 * (1 + job.rank), "f4"))
    mine, steps = np.zeros(WORKERS + 1, "f4"), 0
    mine[NEW if joined else job.rank] = 1
    while True:
        kv.push("a", mine)
        kv.row_sparse_push("rows", np.array([1, 4]), np.stack([mine, mine]))
        a, rows = kv.pull("a").wait(), kv.row_sparse_pull("rows", np.array([0, 4])).wait()
        steps += 1
        if job.rank == 1 and not joined and steps == AT:
            os.kill(os.getpid(), signal.SIGKILL)
        if a[NEW] >= 10 and rows[1][NEW] >= 10:
            break
    assert (rows[0] == 7).all()
    if not isinstance(mode, Sync):
        kv.init("late", np.zeros(3, "f4"))
        kv.push("late", np.ones(3, "f4"))
        kv.pull("late").wait()
    return (a - 7).tolist(), (rows[1] - 7).tolist(), steps


@pytest.mark.parametrize("device", ["shm", "tcp"])
@pytest.mark.parametrize("mode", [Sync(), Async(), SSP(staleness=1)], ids=repr)
def test_a_worker_joins_keys_and_rows(device: str, mode: Sync | Async | SSP, tmp_path: Path) -> None:
    ended = run_job(
        count_in_keys, mode, workers=WORKERS, servers=2, device=device, fates=tmp_path, min_workers=1, again=[1]
    )
    assert ended.cause is None, ended.cause
    assert ended.errors == [""] * WORKERS
    fates_in(tmp_path)
    (a, rows, steps), (_, _, joined), _ = ended.results
    if isinstance(mode, Sync):
        for seen in (a, rows):
            assert seen == [steps, seen[1], steps, 3]
            assert seen[1] in (AT, AT + 1)
        assert joined == 3


def train_rows(job: tw.Job) -> tuple[torch.Tensor, int]:
    """An embedding whose gradients are sparse, beside a dense parameter."""
    joined = job._worker.joins
    torch.manual_seed(3 + job.rank)
    model = torch.nn.Sequential(torch.nn.Embedding(20, 3, sparse=True), torch.nn.Linear(3, 1))
    store = tw.torch.StoreOptimizer(model, torch.optim.SGD, lr=0.5)
    for step in job.steps(30):
        store.zero_grad()
        model(torch.tensor([step % 20, job.rank])).sum().backward()
        store.step()
        if job.rank == 1 and not joined and step == AT:
            os.kill(os.getpid(), signal.SIGKILL)
        while step == 20 and job.rank == 0 and len(job.workers) < WORKERS:
            pass
    return torch.cat([p.detach().flatten() for p in model.parameters()]), store.steps_taken


def test_a_worker_joins_an_optimizer_with_sparse_gradients() -> None:
    ended = run_job(train_rows, workers=WORKERS, servers=2, min_workers=1, again=[1])
    assert ended.cause is None, ended.cause
    assert ended.errors == [""] * WORKERS
    zero, one, two = ended.results
    assert zero[1] == one[1] == two[1] == 30
    assert torch.equal(zero[0], two[0])


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
