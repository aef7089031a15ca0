"""Workers that leave a job on purpose, and others that come in the place of those that were lost."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest
import torch

import tensorwire as tw
from tensorwire import errors
from tests.harness.jobs import run_job
from tests.harness.sandbox import Sandbox

HEAD = """
import os, signal, sys, time, torch, tensorwire as tw
job = tw.init()
joined = job._worker.joins
p = torch.nn.Parameter(torch.zeros(3000))
store = tw.torch.StoreOptimizer([("p", p)], torch.optim.SGD, lr=1.0, reduce="sum")
"""


def leave_early(job: tw.Job) -> list[float]:
    p = torch.nn.Parameter(torch.zeros(3000))
    store = tw.torch.StoreOptimizer([("p", p)], torch.optim.SGD, lr=1.0, reduce="sum")
    seen = []
    for step in job.steps(6):
        p.grad = torch.ones_like(p)
        store.step()
        seen.append(p[0].item())
        if job.rank == 1 and step == 2:
            job.leave()
            break
    return seen


def test_a_worker_leaves_and_what_it_pushed_counts() -> None:
    zero, one = run_job(leave_early, min_workers=1).ok()
    assert one == [-2, -4, -6]
    assert zero == [-2, -4, -6, -7, -8, -9]


def refuse_to_leave(job: tw.Job) -> str:
    with pytest.raises(errors.Unsupported, match="started with min_workers"):
        job.leave()
    job.barrier()
    return "still here"


def test_no_worker_leaves_a_job_that_ends_with_it() -> None:
    assert run_job(refuse_to_leave).ok() == ["still here"] * 2


def test_sigterm_lets_a_worker_end_its_step_and_leave(sandbox: Sandbox) -> None:
    script = sandbox.script(
        f"""{HEAD}
for step in job.steps(30):
    p.grad = torch.ones_like(p)
    if job.rank == 1 and step == 10: os.kill(os.getpid(), signal.SIGTERM)
    store.step()
print("done", job.rank, p[0].item())
""",
        init=False,
    )
    result = sandbox.run(script, "--min-workers", "1", "--restart", "3").finish()
    assert result.status == 0, result.err
    assert "tensorwire: worker 1 left the job: the job goes on with 1 worker\n" in result.err
    assert "joins" not in result.err, "one that left is not started again"
    assert result.out.split() == ["done", "0", "-41.0"]
    sandbox.nothing_left()


def test_a_worker_that_does_not_come_to_the_end_of_its_step_is_ended(sandbox: Sandbox) -> None:
    script = sandbox.script(
        f"""{HEAD}
for step in job.steps(20):
    p.grad = torch.ones_like(p)
    if job.rank == 1 and step == 10:
        os.kill(os.getpid(), signal.SIGTERM)
        while True: pass
    store.step()
print("done", job.rank, p[0].item())
""",
        init=False,
    )
    result = sandbox.run(script, "--min-workers", "1", TENSORWIRE_GRACE="0.5").finish()
    assert result.status == 0, result.err
    assert "tensorwire: worker 1 exited with status 143: the job goes on with 1 worker\n" in result.err
    assert "done 0 -30.0" in result.out
    sandbox.nothing_left()


RESTARTED = f"""{HEAD}
for step in job.steps(20):
    p.grad = torch.ones_like(p)
    store.step()
    if job.rank == 1 and step == 3 and not joined: os.kill(os.getpid(), signal.SIGKILL)
    while job.rank == 0 and step == 10 and len(job.workers) < 2: time.sleep(0.01)
print("done", job.rank, job.workers, store.steps_taken)
"""


def test_a_worker_is_started_again(sandbox: Sandbox) -> None:
    result = sandbox.run(sandbox.script(RESTARTED, init=False), "--min-workers", "1", "--restart", "1").finish()
    assert result.status == 0, result.err
    assert result.err.count("worker 1 was killed by SIGKILL: the job goes on with 1 worker\n") == 1
    assert result.err.count("worker 1 joins: the job goes on with 2 workers\n") == 1
    assert sorted(result.out.splitlines()) == ["done 0 (0, 1) 20", "done 1 (0, 1) 20"]
    sandbox.nothing_left()


FAILS_ALWAYS = f"""{HEAD}
for step in job.steps(20):
    p.grad = torch.ones_like(p)
    if job.rank == 1: raise ValueError("always")
    store.step()
"""


def test_a_worker_that_fails_each_time_is_not_started_for_ever(sandbox: Sandbox) -> None:
    result = sandbox.run(sandbox.script(FAILS_ALWAYS, init=False), "--min-workers", "1", "--restart", "2").finish()
    assert result.status == 0, result.err
    assert 1 <= result.err.count("worker 1 raised ValueError: always: the job goes on with 1 worker\n") <= 3
    sandbox.nothing_left()


def test_restarts_need_a_job_that_goes_on_meanwhile(sandbox: Sandbox) -> None:
    result = sandbox.run(sandbox.script(""), "--restart", "2").finish()
    assert result.one_line() == (
        "tensorwire: --restart needs --min-workers: with how many workers the job goes on meanwhile"
    )
    assert result.status == 2


# ---- shares of a data set


def take_shares(job: tw.Job) -> list[Any]:
    p = torch.nn.Parameter(torch.zeros(30))
    store = tw.torch.StoreOptimizer([("p", p)], torch.optim.SGD, lr=1.0)
    sampler = tw.torch.ShardSampler(range(12), shuffle=True, seed=3)
    seen: list[Any] = [tuple(job.shard(0)), list(sampler)]
    for step in range(4):
        p.grad = torch.ones_like(p)
        store.step()
        if job.rank == 1 and step == 2:
            os.kill(os.getpid(), signal.SIGKILL)
    while 1 in job.workers:
        pass
    sampler.set_epoch(1)
    return [*seen, tuple(job.shard(1)), list(sampler), tuple(job.shard(0))]


def test_an_epoch_is_divided_among_the_workers_that_are_there() -> None:
    ended = run_job(take_shares, workers=3, min_workers=2)
    assert ended.cause is None, ended.cause
    zero, _, two = ended.results
    assert (zero[0], two[0]) == ((0, 3), (2, 3))
    assert len(zero[1]) == len(two[1]) == 4
    assert not set(zero[1]) & set(two[1])
    assert (zero[2], two[2]) == ((0, 2), (1, 2))
    assert sorted(zero[3] + two[3]) == list(range(12))
    assert (zero[4], two[4]) == (zero[0], two[0]), "an epoch that has been divided stays as it is"


def misuse(job: tw.Job) -> None:
    with pytest.raises(errors.ArgumentError, match="construct it before the loop"):
        next(job.steps(3))
    for epoch in (-1, 1.5, True):
        with pytest.raises(errors.ArgumentError, match="whole number from 0"):
            job.shard(epoch)  # type: ignore[arg-type]


def test_wrong_arguments_are_refused() -> None:
    run_job(misuse, workers=1).ok()
