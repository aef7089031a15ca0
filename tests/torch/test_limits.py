"""Where a store ends: too little memory, too long a wait, forked helpers, and going on after a refusal."""

from __future__ import annotations

import os
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import tensorwire as tw
from tensorwire import errors
from tests.harness.jobs import in_turn, run_job


def too_big(job: tw.Job, elements: int) -> None:
    p = torch.nn.Parameter(torch.empty(elements), requires_grad=True)  # never touched
    tw.torch.StoreOptimizer([("huge", p)], torch.optim.SGD, lr=0.1)


def test_a_plan_above_the_machines_memory_is_refused_before_step_1() -> None:
    available = next(x for x in Path("/proc/meminfo").read_text().splitlines() if x.startswith("MemAvailable"))
    half = int(available.split()[1]) * 1024 // 2 // 4  # elements; a server needs thrice as much
    ended = run_job(too_big, half)
    assert ended.cause is not None
    assert "server 0 would register" in str(ended.cause)
    assert all(e.startswith("JobEnded: server 0 stopped") for e in ended.errors)


def stays_away(job: tw.Job, uneven: bool) -> None:
    """Worker 1 comes neither to the second step nor to the end of the block."""
    p = torch.nn.Parameter(torch.zeros(10))
    optimizer = tw.torch.StoreOptimizer([("p", p)], torch.optim.SGD, lr=0.1)
    p.grad = torch.ones(10)
    optimizer.step()
    if job.rank == 1:
        with pytest.raises(errors.JobEnded):
            job._worker.member.client.lookup("something nobody publishes", 600.0)
        raise errors.JobEnded("as told")
    optimizer._parts[0].client.timeout = 0.2  # only now: all before may take its time
    with job.uneven() if uneven else nullcontext(optimizer.step()):
        pass


@pytest.mark.parametrize(
    ("uneven", "says"),
    [
        (False, "step 2 of store/0 did not complete within 0.2 s"),
        (True, "at the end of job.uneven() no other worker took"),
    ],
)
def test_nobody_waits_for_ever(uneven: bool, says: str) -> None:
    ended = run_job(stays_away, uneven)
    assert str(ended.cause).startswith(f"worker 0 raised WaitTimeout: {says}")


def with_a_loader(job: tw.Job) -> float:
    torch.manual_seed(0)
    x = torch.randn(64, 8)
    net = torch.nn.Linear(8, 1)
    optimizer = tw.torch.StoreOptimizer(net.named_parameters(), torch.optim.SGD, lr=0.05)
    data = TensorDataset(x, x.sum(1, keepdim=True))
    loader = DataLoader(data, 8, num_workers=2, multiprocessing_context="fork")
    for _ in range(2):
        for inputs, targets in loader:
            optimizer.zero_grad()
            loss = torch.nn.functional.mse_loss(net(inputs), targets)
            loss.backward()
            optimizer.step()
    return loss.item()


def refused_then_going_on(job: tw.Job) -> None:
    """A refused step changed nothing."""
    p = torch.nn.Parameter(torch.arange(5000.0))
    optimizer = tw.torch.StoreOptimizer([("p", p)], torch.optim.SGD, lr=1.0)
    p.grad = torch.ones(5000)
    p.data[7] = -1.0
    with pytest.raises(errors.ParameterModified):
        optimizer.step()
    optimizer.write_parameters()
    optimizer.step()
    expected = torch.arange(5000.0)
    expected[7] = -1.0
    assert torch.equal(p.detach(), expected - 1.0)


def after_the_job(job: tw.Job) -> None:
    """Parameters outlive it."""
    p = torch.nn.Parameter(torch.ones(3000))
    optimizer = tw.torch.StoreOptimizer([("p", p)], torch.optim.SGD, lr=0.5)
    p.grad = torch.ones(3000)
    optimizer.step()
    job.close()
    with pytest.raises(errors.TensorwireError):
        optimizer.step()
    assert (p == 0.5).all()


def in_a_child(job: tw.Job) -> None:
    """A forked child cannot use the optimizer."""
    p = torch.nn.Parameter(torch.ones(100))
    optimizer = tw.torch.StoreOptimizer([("p", p)], torch.optim.SGD, lr=0.5)
    p.grad = torch.ones(100)
    child = os.fork()
    if child == 0:
        try:
            optimizer.step()
        except errors.ArgumentError:
            try:
                optimizer.state_dict()
            except errors.ArgumentError:
                os._exit(7)
        os._exit(1)
    _, status = os.waitpid(child, 0)
    optimizer.step()
    assert os.waitstatus_to_exitcode(status) == 7
    assert (p == 0.5).all()


@pytest.mark.parametrize("device", ["shm", "tcp"])  # a forked child inherits what they hold
def test_forked_children_refusals_and_the_end(device: str) -> None:
    first, second = run_job(
        in_turn, with_a_loader, refused_then_going_on, in_a_child, after_the_job, device=device
    ).ok()
    assert first[0] == second[0] < 8.0


@pytest.mark.parametrize("folder", ["deep/er", "file/below"])
def test_a_trace_that_cannot_be_written_costs_no_run(folder: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    run_job(with_a_trace_in, str(tmp_path / folder), workers=1).ok()
    assert (tmp_path / folder / "worker-0.json").exists() == (folder == "deep/er")


def with_a_trace_in(job: tw.Job, folder: str) -> None:
    from tensorwire.observe import spans

    spans.folder, spans.enabled = folder, True
