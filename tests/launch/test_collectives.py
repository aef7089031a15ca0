"""Barrier, broadcast and all-reduce in real jobs."""

from __future__ import annotations

import contextlib
import os
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tensorwire as tw
from tensorwire.errors import ArgumentError, PlanMismatch, WaitTimeout
from tensorwire.launch import collectives
from tensorwire.observe import counters
from tests.harness.jobs import run_job

LARGE = 300_000  # floats: more than travels with a request


def broadcasts(job: tw.Job) -> list[Any]:
    value = {"stop": job.rank == 1, "rank": job.rank, "weights": torch.full((3,), job.rank).to(torch.bfloat16)}
    return [job.broadcast(value), job.broadcast(value, source=1), job.broadcast(None, source=job.num_workers - 1)]


@pytest.mark.parametrize(("workers", "servers"), [(2, 1), (3, 0)])
def test_all_workers_have_the_sources_value(workers: int, servers: int) -> None:
    for found in run_job(broadcasts, workers=workers, servers=servers).ok():
        for source in (0, 1):
            assert (found[source]["rank"], found[source]["stop"]) == (source, source == 1)
            assert torch.equal(found[source]["weights"], torch.full((3,), source).to(torch.bfloat16))
        assert found[2] is None


def one_worker(job: tw.Job) -> tuple[Any, ...]:
    job.barrier()
    return job.broadcast(3), job.all_reduce(4.0, "mean"), [job.all_reduce(torch.ones(2)).tolist()]


def test_one_worker_has_its_own_value() -> None:
    assert run_job(one_worker, workers=1, servers=0).ok() == [(3, 4.0, [[1.0, 1.0]])]


def large(job: tw.Job) -> tuple[Any, ...]:
    torch.manual_seed(job.rank)
    mine = torch.randn(LARGE + 1)
    before = counters.snapshot()
    state = job.broadcast({"weights": mine, "rest": [mine.numpy()[::2], job.rank]}, source=1)
    total = job.all_reduce(mine)
    mean = job.all_reduce(mine.to(torch.bfloat16), op="mean")
    most = job.all_reduce(mine.numpy().astype(np.float16), op="max")
    done = counters.since(before)
    assert done.rpcs == 2 + 3 * 3
    return state["weights"].numpy(), state["rest"], total.numpy(), mean.float().numpy(), most


@pytest.mark.parametrize("device", ["auto", "shm", "tcp"])
def test_large_tensors(device: str) -> None:
    values = []
    for rank in range(3):
        torch.manual_seed(rank)
        values.append(torch.randn(LARGE + 1))
    halves = [v.to(torch.bfloat16) for v in values]
    for weights, rest, total, mean, most in run_job(large, workers=3, servers=0, device=device).ok():
        assert np.array_equal(weights, values[1].numpy())
        assert np.array_equal(rest[0], values[1].numpy()[::2])
        assert rest[1] == 1
        assert np.array_equal(total, (values[0] + values[1] + values[2]).numpy())
        assert np.array_equal(mean, ((halves[0] + halves[1] + halves[2]) / 3).float().numpy())
        assert np.array_equal(most, np.max([v.numpy().astype(np.float16) for v in values], 0))


def hundred_megabytes(job: tw.Job) -> int:
    value = np.arange(100 << 17) if job.rank == 0 else None
    found = job.broadcast(value)
    return int((found == np.arange(100 << 17)).sum())


def test_a_broadcast_of_a_hundred_megabytes() -> None:
    assert run_job(hundred_megabytes, servers=0, device="tcp").ok() == [100 << 17] * 2


def mapped_after(job: tw.Job) -> list[str]:
    job.broadcast(np.ones(LARGE) if job.rank == 0 else None)
    job.all_reduce(np.ones(LARGE))
    job.barrier()
    found = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        start, end = (int(number, 16) for number in line.split()[0].split("-"))
        if "memfd" in line and end - start >= LARGE * 8:
            found.append(line)
    return found


@pytest.mark.parametrize("device", ["shm", "tcp"])
def test_nothing_stays_mapped_after_a_large_value(device: str) -> None:
    assert run_job(mapped_after, servers=0, device=device).ok() == [[], []]


def beside_training(job: tw.Job) -> list[bytes]:
    """Large collectives open devices of their own, and a store's waits do not hear of them."""
    torch.manual_seed(0)
    model = torch.nn.Linear(64, 64)
    optimizer = tw.torch.StoreOptimizer(model.named_parameters(), torch.optim.SGD, lr=0.1)
    found = []
    for step in range(4):
        optimizer.zero_grad()
        model(torch.full((2, 64), float(job.rank + step))).sum().backward()
        optimizer.step()
        weights = job.all_reduce(torch.cat([p.detach().flatten() for p in model.parameters()] * 60), op="mean")
        found.append(weights.numpy().tobytes())
    return found


def test_collectives_beside_training() -> None:
    one, other = run_job(beside_training, servers=2).ok()
    assert one == other


def disagree(job: tw.Job) -> list[str]:
    told = []
    for calls in (
        (lambda: job.broadcast(1), lambda: job.barrier()),
        (lambda: job.broadcast(1, source=0), lambda: job.broadcast(1, source=1)),
        (lambda: job.all_reduce(1), lambda: job.all_reduce(1, op="max")),
        (lambda: job.all_reduce(1), lambda: job.all_reduce(1.0)),
        (lambda: job.all_reduce(torch.ones(3)), lambda: job.all_reduce(np.ones(3, np.float32))),
        (lambda: job.all_reduce(torch.ones(3, LARGE)), lambda: job.all_reduce(torch.ones(3))),
    ):
        with pytest.raises(PlanMismatch) as caught:
            calls[job.rank]()
        told.append(str(caught.value))
        assert job.all_reduce(1) == 2  # nothing is broken by it
    return told


CALLS = [
    ("broadcast(source=0)", "barrier()"),
    ("broadcast(source=0)", "broadcast(source=1)"),
    ("all_reduce(op='sum') of int", "all_reduce(op='max') of int"),
    ("all_reduce(op='sum') of int", "all_reduce(op='sum') of float"),
    ("all_reduce(op='sum') of float32 tensor [3]", "all_reduce(op='sum') of <f4 array [3]"),
    (f"all_reduce(op='sum') of float32 tensor [3, {LARGE}]", "all_reduce(op='sum') of float32 tensor [3]"),
]


def test_different_calls_name_workers_and_calls() -> None:
    advice = "all workers must make the same calls in the same order"
    told = [f"worker 0 called job.{first}, worker 1 called job.{second}: {advice}" for first, second in CALLS]
    assert run_job(disagree, servers=0).ok() == [told, told]


def times_out(job: tw.Job) -> list[str]:
    found = []
    if job.rank == 0:
        for call in (lambda: job.barrier(timeout=0.1), lambda: job.all_reduce(1, timeout=0.1)):
            with pytest.raises(WaitTimeout) as told:
                call()
            found.append(str(told.value))
    elif job.rank == 1:
        with pytest.raises(ArgumentError, match="cannot carry set"):
            job.broadcast({1}, source=1)
    job._worker.member.client.barrier("tried", 2)
    job.barrier()
    return found


def test_every_wait_has_an_end_and_the_call_can_be_made_again() -> None:
    zero, one = run_job(times_out, servers=0).ok()
    assert zero == [
        "job.barrier(): only worker 0 of 2 came (waited 0.1 s)",
        "job.all_reduce(op='sum') of int: only worker 0 of 2 came (waited 0.1 s)",
    ]
    assert one == []


def two_threads(job: tw.Job) -> str:
    began, errors = threading.Event(), []

    def wait() -> None:
        began.set()
        job.barrier()

    thread = threading.Thread(target=wait)
    if job.rank == 0:
        thread.start()
        began.wait()
        while not job._worker.collectives._inside:
            pass
        try:
            job.all_reduce(1)
        except ArgumentError as error:
            errors.append(str(error))
    job._worker.member.client.barrier("tried", 2)
    if job.rank == 0:
        thread.join()
    else:
        job.barrier()
    return "".join(errors)


def test_a_second_thread_is_refused() -> None:
    told, _ = run_job(two_threads, servers=0).ok()
    assert told == (
        "job.all_reduce(op='sum') of int while another thread of this worker is in job.barrier(): make such calls from "
        "one thread"
    )


def fails(job: tw.Job, how: str) -> None:
    if job.rank == 0:
        job.all_reduce(torch.ones(LARGE))
    elif how == "raises":
        raise ValueError("broken data")
    elif how == "dies":
        os._exit(3)
    else:
        # The other has this worker's offer, and finds nobody there.
        collectives.Collectives._together = lambda *_: os._exit(3)  # type: ignore[method-assign,assignment]
        job.all_reduce(torch.ones(LARGE))


@pytest.mark.parametrize("how", ["raises", "dies", "dies inside", "finishes"])
@pytest.mark.parametrize("device", ["shm", "tcp"])
def test_a_worker_that_fails_ends_the_call_of_the_others(how: str, device: str) -> None:
    ended = run_job(fails if how != "finishes" else finishes, how, servers=0, device=device)
    told = {
        "raises": "worker 1 raised ValueError: broken data",
        "dies": "worker 1 is gone",
        "dies inside": "worker 1 is gone",
        "finishes": "worker 1 left the job while worker 0 waits for it in job.all_reduce(op='sum') of float32 tensor",
    }
    assert ended.cause is not None
    assert told[how] in str(ended.cause)
    assert ended.errors[0].startswith(f"JobEnded: {told[how]}"), ended.errors[0]


def calls_too_late(job: tw.Job) -> None:
    job.all_reduce(torch.ones(LARGE))  # which opens the devices
    if job.rank == 1:
        raise ValueError("broken data")
    worker = job._worker
    worker.member.client.ended.wait(60.0)
    collectives.Collectives._turn = lambda *_: contextlib.nullcontext()  # type: ignore[method-assign,assignment]
    job.all_reduce(torch.ones(LARGE))


@pytest.mark.parametrize("device", ["shm", "tcp"])
def test_a_call_after_the_end_says_why_the_job_ended(device: str) -> None:
    ended = run_job(calls_too_late, servers=0, device=device)
    assert ended.errors[0].startswith("JobEnded: worker 1 raised ValueError: broken data"), ended.errors[0]


def finishes(job: tw.Job, _: str) -> None:
    if job.rank == 0:
        job.all_reduce(torch.ones(LARGE))
