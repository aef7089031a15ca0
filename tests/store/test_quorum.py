"""Rounds of a quorum: each bucket on each server decides for itself who contributes, and nobody waits for another."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import tensorwire as tw
from tensorwire.launch.join_store import join_store
from tensorwire.store import SGD, DiLoCo
from tensorwire.store.fates import Fate
from tensorwire.store.local_exchanges import local_spec
from tensorwire.store.sharding import Bucket, ParameterSpec
from tensorwire.store.step_header import StepOperation
from tensorwire.trace.push_fates import problems, read_fates
from tests.harness.jobs import run_job
from tests.levels import mostly_long

LATE = {0: 2, 1: 0}  # by server: the worker that comes when the round of the others has closed
ROUNDS = 3


def come_late(job: tw.Job) -> list[list[float]]:
    """Pushes its rank + 1. Returns, by server, the values that it saw after each of its rounds."""
    mode = DiLoCo(every=1, quorum=2, outer=SGD(lr=1.0, momentum=0.0, nesterov=False))
    tensors = [ParameterSpec(name, (1024,), "float32") for name in "ab"]
    spec = local_spec(mode, tensors, job.num_workers, job.num_servers, 4096, "")
    client = join_store(job._worker, spec)
    options = [float(spec.groups[0][option]) for _, option, _ in spec.numeric]
    buckets = sorted(client.order, key=lambda bucket: bucket.server)
    seen: list[list[float]] = [[], []]

    def push(bucket: Bucket, value: float) -> None:
        np.frombuffer(client.slot(bucket), np.float32)[:] = value
        client.push(bucket)

    client.begin(StepOperation.ASSIGN, options)
    for bucket in buckets if job.rank == 0 else ():
        push(bucket, 0.0)
    client.wait()
    for _ in range(ROUNDS):
        client.begin(StepOperation.UPDATE, options)
        for server, bucket in enumerate(buckets):
            if job.rank == LATE[server]:
                job.barrier()
            push(bucket, job.rank + 1.0)
            client.wait_for(bucket, client.step)
            seen[server].append(float(np.frombuffer(client.windows[0], np.float32, 1, bucket.space)[0]))
            if job.rank != LATE[server]:
                job.barrier()
    client.finish()
    return seen


@pytest.mark.parametrize("device", ["shm", "tcp"])
def test_servers_that_decide_differently_apply_each_push_once(device: str, tmp_path: Path) -> None:
    ended = run_job(come_late, workers=3, servers=2, device=device, fates=tmp_path)
    # On server 0, workers 0 and 1 push 1 and 2; a round later, with what worker 2 has pushed late, 3.
    expected = [[-1.5, -3.5, -5.5], [-2.5, -4.5, -6.5]]
    assert ended.ok() == [expected] * 3
    lines = read_fates([tmp_path])
    assert problems(lines) == []
    fates = [line for line in lines if isinstance(line, Fate)]
    assert {f.fate for f in fates} == {"merged"}
    assert len(fates) == 3 * 2 * ROUNDS
    for f in fates:
        number = f.round - 1  # round 1 has set the values
        late = f.worker == LATE[f.shard]
        assert (f.version, f.staleness) == ((number + 1, 1) if late else (number, 0))


def exchange_at_once(job: tw.Job, fragments: int) -> float:
    """Workers of equal speed exchange in every step: their pushes reach each server in another order."""
    params = [torch.nn.Parameter(torch.zeros(3000)) for _ in range(12)]
    mode = DiLoCo(every=fragments, quorum=2, fragments=fragments, outer=SGD(lr=1.0, momentum=0.0, nesterov=False))
    named = [(str(number), p) for number, p in enumerate(params)]
    store = tw.torch.StoreOptimizer(named, torch.optim.SGD, lr=0.1, bucket_bytes=4096, mode=mode)
    for _ in range(150):
        for p in params:
            p.grad = torch.ones_like(p)
        store.step()
    store.wait()
    return float(params[0].detach().sum())


@pytest.mark.parametrize("fragments", mostly_long([1, 3], [3]))
def test_workers_whose_pushes_reach_servers_in_another_order_do_not_wait_for_each_other(fragments: int) -> None:
    """If a push could join any open round, three workers would wait for each other within a hundred exchanges."""
    assert all(total < 0 for total in run_job(exchange_at_once, fragments, workers=3, servers=3).ok())


def meet_after_exchanges(job: tw.Job) -> tuple[float, float]:
    """All workers meet after each exchange, of which one may have come late; then they set values, and go on."""
    p = torch.nn.Parameter(torch.zeros(3000))
    mode = DiLoCo(every=1, quorum=2, outer=SGD(lr=1.0, momentum=0.0, nesterov=False))
    store = tw.torch.StoreOptimizer([("p", p)], torch.optim.SGD, lr=1.0, bucket_bytes=4096, mode=mode)
    p.grad = torch.ones_like(p)
    for _ in range(10):
        store.step()
        job.barrier(60.0)
    with torch.no_grad():
        p.fill_(100.0)
    store.write_parameters()
    first = float(p.detach()[0])
    store.step()
    job.barrier(60.0)
    store.step()
    return first, float(p.detach()[0])


def test_a_worker_that_comes_late_does_not_wait_for_those_who_have_gone_on(tmp_path: Path) -> None:
    for first, last in run_job(meet_after_exchanges, workers=3, servers=3, fates=tmp_path).ok():
        assert first == 100.0
        assert last == 98.0  # what came late before is not added to what was set
    assert problems(read_fates([tmp_path])) == []


def fall_behind(job: tw.Job) -> list[float]:
    """Worker 2 begins when the others have exchanged six times; then all exchange once more."""
    p = torch.nn.Parameter(torch.zeros(3000))
    mode = DiLoCo(every=1, quorum=2, outer=SGD(lr=1.0, momentum=0.0, nesterov=False))
    store = tw.torch.StoreOptimizer([("p", p)], torch.optim.SGD, lr=1.0, bucket_bytes=4096, mode=mode)
    p.grad = torch.ones_like(p)
    if job.rank == 2:
        job.barrier()
    seen = []
    for _ in range(6):
        store.step()
        seen.append(float(p.detach()[-1]))
    if job.rank < 2:
        job.barrier()
    job.barrier()
    store.step()
    return [*seen, float(p.detach()[-1])]


def test_a_worker_that_has_fallen_behind_waits_for_nobody_and_all_that_it_pushed_counts(tmp_path: Path) -> None:
    *others, behind = run_job(fall_behind, workers=3, servers=3, fates=tmp_path).ok()
    assert others == [[-1.0, -2.0, -3.0, -4.0, -5.0, -6.0, -12.0]] * 2
    assert behind == [-6.0, -7.0, -8.0, -9.0, -10.0, -11.0, -12.0]  # an update later
    assert problems(read_fates([tmp_path])) == []
