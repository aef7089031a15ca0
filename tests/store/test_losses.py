"""A worker that dies is lost, and the others go on: what came of it counts, once, and what did not changes nothing."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tensorwire as tw
from tensorwire.observe import failpoints
from tensorwire.store import SSP, Async, DiLoCo, KeyValue, LocalSGD, Sync
from tensorwire.store.fates import Fate
from tensorwire.store.modes import Mode
from tensorwire.trace.push_fates import problems, read_fates, totals
from tests.harness.jobs import Ended, run_job
from tests.levels import mostly_long
from tests.store.test_modes import Replay

WORKERS, STEPS, AT = 3, 8, 4
SHAPE = (40, 100)
STATES = ("headed", "pushed", "answered_some")
MODES = (Sync(), Async(), SSP(staleness=1), DiLoCo(every=1, quorum=2), LocalSGD(every=1))


def gradient(rank: int, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * rank + step)
    return torch.randint(-4, 5, SHAPE, generator=generator).float()


def train(job: tw.Job, mode: Mode, state: str, options: dict[str, Any]) -> dict[str, Any]:
    """Each gradient is known from its worker and its step, also those of a worker that was killed."""
    if job.rank == 1:
        failpoints.fail_at("worker", 1, AT, state)
    p = torch.nn.Parameter(torch.zeros(SHAPE))
    local = isinstance(mode, (DiLoCo, LocalSGD))
    store = tw.torch.StoreOptimizer(
        [("p", p)], torch.optim.SGD, lr=1.0, mode=mode, bucket_bytes=4096, shards=3, **options
    )
    for step in range(STEPS):
        p.grad = gradient(job.rank, step)
        store.step()
    store.wait()
    final = p.detach().clone()
    return {"final": final, "plan": None if local else store._parts[0].plan, "num": job.num_workers}


def fates_in(folder: Path) -> list[Fate]:
    """The fates of a job, which add up, also those of processes that were killed."""
    lines = read_fates([folder])
    assert problems(lines) == []
    found = [line for line in lines if isinstance(line, Fate)]
    pushes = [(f.store, f.shard, f.bucket, f.worker, f.incarnation, f.round) for f in found]
    assert len(pushes) == len(set(pushes)), "a push has two fates"
    return found


def survivors(ended: Ended) -> list[dict[str, Any]]:
    """What they returned; worker 1 alone was killed."""
    assert ended.cause is None, ended.cause
    assert [ended.errors[0], ended.errors[2]] == ["", ""]
    assert ended.errors[1] == "died"
    assert sorted(code or 0 for code in ended.codes) == [-signal.SIGKILL, *[0] * (len(ended.codes) - 1)]
    return [result for result in ended.results if result is not None]


CASES = [(device, mode, state) for device in ("shm", "tcp") for mode in MODES for state in STATES]
FAST = [case for case in CASES if (case[0] == "shm") == (case[2] == "pushed")]


@pytest.mark.parametrize(("device", "mode", "state"), mostly_long(CASES, FAST), ids=repr)
def test_the_others_go_on_in_every_mode(device: str, mode: Mode, state: str, tmp_path: Path) -> None:
    ended = run_job(train, mode, state, {}, workers=WORKERS, servers=2, device=device, fates=tmp_path, min_workers=2)
    found = survivors(ended)
    fates = fates_in(tmp_path)
    for worker in (0, 2):
        assert {f.round for f in fates if f.worker == worker} == set(range(2, STEPS + 2)), "round 1 set the values"
    assert max(f.round for f in fates if f.worker == 1) <= AT + 1
    zero, one, two = totals(read_fates([tmp_path]))
    assert zero.lost == two.lost == 0
    assert one.produced == one.applied + one.merged + one.discarded + one.lost
    if isinstance(mode, Sync):
        assert one.lost == 0, "what was counted had been sent"
        check_sync(found, fates)


def check_sync(found: list[dict[str, Any]], fates: list[Fate]) -> None:
    """The parameters have the bits of one process that takes what the fates say."""
    plan = found[0]["plan"]
    assert torch.equal(found[0]["final"], found[1]["final"])
    for shard, buckets in enumerate(plan.buckets):
        for bucket in buckets:
            mine = [f for f in fates if (f.shard, f.bucket) == (shard, bucket.index)]
            one = Replay(plan, bucket, {"p": torch.zeros(SHAPE)}, "SGD", {"lr": 1.0})
            for version in range(1, STEPS + 1):
                came = sorted(f.worker for f in mine if f.version == version)
                assert came in ([0, 1, 2], [0, 2])
                assert came == [0, 1, 2] or version >= AT
                assert came == [0, 2] or version <= AT
                assert {f.weight for f in mine if f.version == version} == {1 / len(came)}
                one.update(version, [{"p": gradient(w, version - 1)} for w in came], len(came), 1.0)
            one.check(STEPS, {"p": found[0]["final"]})


def test_a_worker_lost_while_all_clip(tmp_path: Path) -> None:
    options = {"max_grad_norm": 0.5}
    ended = run_job(train, Sync(), "pushed", options, workers=WORKERS, servers=2, fates=tmp_path, min_workers=2)
    found = survivors(ended)
    assert torch.equal(found[0]["final"], found[1]["final"])
    assert len({f.version for f in fates_in(tmp_path)}) == STEPS


def lose_the_first(job: tw.Job, mode: Mode, publish: bool) -> float:
    """Worker 0 has said what the store is, and made versions of it."""
    p = torch.nn.Parameter(torch.zeros(SHAPE))
    options: dict[str, Any] = {"publish": tw.store.Every(2)} if publish else {}
    store = tw.torch.StoreOptimizer([("p", p)], torch.optim.SGD, lr=1.0, mode=mode, bucket_bytes=4096, **options)
    for step in range(12):
        p.grad = torch.ones_like(p)
        store.step()
        if job.rank == 0 and step == AT:
            os.kill(os.getpid(), signal.SIGKILL)
    store.wait()
    return float(p[0, 0].item())


@pytest.mark.parametrize("device", ["shm", "tcp"])
@pytest.mark.parametrize(("mode", "publish"), [(Sync(), False), (Sync(), True), (Async(), True), (Async(), False)])
def test_worker_0_is_no_more_than_the_others(device: str, mode: Mode, publish: bool) -> None:
    ended = run_job(lose_the_first, mode, publish, workers=WORKERS, servers=2, device=device, min_workers=1)
    assert ended.cause is None, ended.cause
    assert ended.errors[0] == "died"
    assert ended.errors[1:] == ["", ""]
    if mode == Sync():
        assert ended.results[1:] == [-12, -12]


# ---- keys and rows


def count_pushes(job: tw.Job, mode: Sync | Async | SSP) -> list[list[float]]:
    """Each worker's pushes are counted by the store itself. Worker 1 is killed between those of a step."""
    kv = KeyValue(mode, "sum")
    kv.init(["a", "b"], [np.zeros(WORKERS, "f4"), np.zeros((3000, WORKERS), "f4")])
    kv.init_rows("rows", (5, WORKERS), values=np.zeros((5, WORKERS), "f4"))
    mine = np.zeros(WORKERS, "f4")
    mine[job.rank] = 1
    for step in range(STEPS):
        kv.push("a", mine)
        kv.row_sparse_push("rows", np.array([3]), mine[None])
        if job.rank == 1 and step == AT:
            os.kill(os.getpid(), signal.SIGKILL)
        kv.push("b", np.tile(mine, (3000, 1)))
        seen = [kv.pull("a").wait(), kv.pull("b").wait()[-1], kv.row_sparse_pull("rows", np.array([3])).wait()[0]]
    least = np.array([STEPS, AT, STEPS])  # without common rounds others may be behind, also the one that is killed
    while not isinstance(mode, Sync) and any((one < least).any() for one in seen):
        seen = [kv.pull("a").wait(), kv.pull("b").wait()[-1], kv.row_sparse_pull("rows", np.array([3])).wait()[0]]
    return [one.tolist() for one in seen]


@pytest.mark.parametrize("device", ["shm", "tcp"])
@pytest.mark.parametrize("mode", [Sync(), Async(), SSP(staleness=1)], ids=repr)
def test_pushes_to_keys_and_rows_count_once(device: str, mode: Sync | Async | SSP, tmp_path: Path) -> None:
    ended = run_job(count_pushes, mode, workers=WORKERS, servers=2, device=device, fates=tmp_path, min_workers=1)
    for of_a, of_b, of_rows in survivors(ended):
        for key in (of_a, of_b, of_rows):
            assert [key[0], key[2]] == [STEPS, STEPS]
        assert of_b[1] == AT
        assert of_a[1] in (AT, AT + 1)
        assert of_rows[1] in (AT, AT + 1)
    fates_in(tmp_path)
