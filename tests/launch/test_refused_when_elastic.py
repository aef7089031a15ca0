"""What needs every worker to the end is refused where workers come and go, in one line each."""

from __future__ import annotations

import os
import signal

import numpy as np
import pytest
import torch

import tensorwire as tw
from tensorwire import errors
from tensorwire.store import Async, KeyValue
from tests.harness.jobs import run_job


def refuse(job: tw.Job) -> None:
    with pytest.raises(errors.Unsupported, match=r"a process group of torch\.distributed needs all workers to the end"):
        job.init_process_group()
    model = tw.torch.place(torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)), {"0": 0, "1": 1})
    with pytest.raises(errors.Unsupported, match="a model that is cut over workers needs all workers to the end"):
        torch.compile(model, backend="tensorwire")(torch.zeros(1, 2))


def test_cut_models_and_process_groups() -> None:
    run_job(refuse, min_workers=1).ok()


def meet_after_a_loss(job: tw.Job) -> None:
    job.barrier()
    p = torch.nn.Parameter(torch.zeros(3))
    store = tw.torch.StoreOptimizer([("p", p)], torch.optim.SGD, lr=1.0)
    for step in range(4):
        p.grad = torch.ones_like(p)
        store.step()
        if job.rank == 1 and step == 1:
            os.kill(os.getpid(), signal.SIGKILL)
    for call in (job.barrier, lambda: job.broadcast(1), lambda: job.all_reduce(1)):
        with pytest.raises(
            errors.Unsupported, match="needs all workers that the job began with, and worker 1 was lost"
        ):
            call()


def test_collectives_after_a_loss() -> None:
    ended = run_job(meet_after_a_loss, workers=3, min_workers=1)
    assert ended.cause is None, ended.cause
    assert ended.errors == ["", "died", ""]


def publish_keys(job: tw.Job) -> None:
    kv = KeyValue(Async(), "sum", publish=True)
    kv.init("a", np.zeros(3, "f4"))
    kv.publish()
    kv.push("a", np.ones(3, "f4"))
    kv.pull("a").wait()
    if job.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    while (lost := job._worker.member.membership.lost.get(1)) is None or lost.incarnation == 0:
        pass


def test_a_worker_cannot_join_versions_of_keys() -> None:
    ended = run_job(publish_keys, min_workers=1, again=[1])
    assert ended.cause is None, ended.cause
    assert "Unsupported: a worker that joins a job which has begun joins the stores of PyTorch" in ended.errors[1]
