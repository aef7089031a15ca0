"""In which order a server takes the buckets of a round, and when a worker has done with one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tensorwire import Job
from tensorwire.testing.patience import patient
from tests.harness.jobs import run_job

if TYPE_CHECKING:
    from tensorwire.store.store_client import StoreClient


def opened(job: Job) -> tuple[StoreClient, dict[int, Any]]:
    """A store of three buckets, all zeros. Returns this worker's end, and by bucket what it pushes."""
    import torch

    from tensorwire.store.admission import versions
    from tensorwire.store.rules import tensor_over
    from tensorwire.store.sharding import ParameterSpec
    from tensorwire.store.step_header import StepOperation
    from tensorwire.store.store_client import StoreClient, agree
    from tensorwire.store.store_layout import StoreSpec

    tensors = [ParameterSpec(name, (1024,), "float32") for name in "abc"]
    options = {**torch.optim.SGD([torch.zeros(1)], lr=1.0).defaults, "foreach": False}
    spec = StoreSpec(versions(), tensors, "SGD", [options], [(0, "lr", -1)], 4096, False)
    name, plan = job._worker.next_store(), spec.plan(job.num_servers)
    agree(job._worker.member, name, spec, plan, job.num_workers)
    client = StoreClient(job._worker.member, name, spec, plan)
    views = {b.index: tensor_over(client.memory(b), "float32", 0, 1024) for b in client.order}
    client.begin(StepOperation.ASSIGN, [1.0])
    for bucket in client.order:
        views[bucket.index].fill_(0.0)
        client.push(bucket)
    client.wait()
    return client, views


def last_first(job: Job) -> list[float]:
    """Pushes bucket after bucket from the last to the first, each when the one before has its new version."""
    from tensorwire.store.rules import tensor_over
    from tensorwire.store.step_header import StepOperation

    client, views = opened(job)
    for _ in range(3):
        client.begin(StepOperation.UPDATE, [1.0])
        for bucket in reversed(client.order):
            job.barrier()  # meanwhile the server finds nothing, and waits
            client.slot(bucket)
            views[bucket.index].fill_(bucket.index + 1)
            client.push(bucket)
            client.wait_for(bucket, client.step)
    shown = tensor_over(memoryview(client.windows[0]), "float32", 0, 3 * 1024)
    values = [float(shown[1024 * i]) for i in range(3)]
    client.finish()
    return values


@pytest.mark.parametrize("device", ["shm", "tcp"])
def test_a_server_takes_what_has_come(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TENSORWIRE_TIMEOUT", str(patient(20.0)))  # a server that waits for the first one ends the test
    assert run_job(last_first, workers=2, device=device).ok() == [[-3.0, -6.0, -9.0]] * 2


def leaves_early(job: Job) -> list[bool]:
    """Worker 0 leaves with a round under way, to whose last bucket worker 1 pushes once that has begun to leave.

    Returns, of worker 0, which buckets had been answered when it said that it left.
    """
    from tensorwire.store.step_header import StepOperation

    client, _ = opened(job)
    client.begin(StepOperation.UPDATE, [1.0])
    for bucket in client.order[:-1]:
        client.slot(bucket)
        client.push(bucket)
    last = client.order[-1]
    client.slot(last)
    if job.rank:
        job.barrier()
        client.push(last)
        client.finish()
        return []
    client.push(last)
    seen: list[bool] = []
    step, begin, wait_for = client.step, client.begin, client._wait_for

    def begins(*arguments: Any) -> None:
        seen.extend(client.has(bucket, step) for bucket in client.order)
        if not seen[-1]:
            job.barrier()
        begin(*arguments)

    def waits_for(bucket: Any, version: int) -> None:
        if bucket is last:
            job.barrier()
        wait_for(bucket, version)

    client.begin, client._wait_for = begins, waits_for  # type: ignore[method-assign]
    client.finish()
    return seen


@pytest.mark.parametrize("device", ["shm", "tcp"])
def test_a_worker_leaves_when_every_bucket_has_been_answered(device: str) -> None:
    assert run_job(leaves_early, workers=2, device=device).ok() == [[True] * 3, []]
