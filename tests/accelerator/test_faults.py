"""Faults while copies from and to a device are under way: one typed error, nothing hangs, nothing stays page-locked."""

from __future__ import annotations

import gc
import itertools
import os
import signal
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from unittest import mock

import pytest
import torch

import tensorwire as tw
from tensorwire import errors
from tensorwire.store.sharding import Bucket
from tensorwire.torch.part import Part
from tests.accelerator import models, simulated
from tests.accelerator.features import ended, made
from tests.accelerator.left_out import late
from tests.accelerator.programs import Found, prepare, same
from tests.harness.jobs import run_job

if why := simulated.unavailable():
    pytest.skip(why, allow_module_level=True)


def note_process(path: Path) -> None:
    path.write_text(str(os.getpid()))


def after_a_kill(job: tw.Job, path: Path) -> str:
    """The server dies when gradients have been asked for, and none has come."""
    prepare(0)
    model = models.built().to("sim:0")
    optimizer = made(model)
    models.loss(model, 0, job.rank, "sim:0").backward()
    optimizer.step()
    optimizer.zero_grad()
    try:
        with late() as gate:
            optimizer.wait()
            gate.hold()
            models.loss(model, 1, job.rank, "sim:0").backward()
            job.barrier()
            if job.rank == 0:
                os.kill(int(path.read_text()), signal.SIGKILL)
            gate.go_on()
            optimizer.step()
            models.loss(model, 2, job.rank, "sim:0")
    except (errors.JobEnded, errors.StepInterrupted) as error:
        return str(error)
    return "nothing happened"


def test_a_server_that_is_killed_while_copies_are_under_way(tmp_path: Path) -> None:
    path = tmp_path / "process"
    ended = run_job(after_a_kill, path, prepare=partial(note_process, path), fresh=True)
    assert ended.cause is not None
    assert "server 0" in str(ended.cause)
    told = [result or error for result, error in zip(ended.results, ended.errors, strict=True)]
    assert all("server 0" in each for each in told), told


def dropped(job: tw.Job) -> list[int]:
    """How much memory is page-locked while there is an optimizer, and when nothing refers to it any more."""
    prepare(0)
    model = models.built().to("sim:0")
    optimizer = made(model)
    models.loss(model, 0, job.rank, "sim:0").backward()
    optimizer.step()
    before = simulated.registered()
    del model, optimizer
    gc.collect()
    job.barrier()
    gc.collect()
    return [before, simulated.registered()]


def interrupted(job: tw.Job, on: str) -> Found:
    """Ctrl-C where a forward waits for values: it can be called again."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 8)).to(on)
    optimizer = made(model, overlap=True)
    wait, waits, interrupts = Part._await, itertools.count(), 0

    def awaiting(part: Part, buckets: Iterable[Bucket]) -> None:
        if next(waits) == 2:
            signal.raise_signal(signal.SIGINT)
        wait(part, buckets)

    with mock.patch.object(Part, "_await", awaiting):
        for n in range(4):
            optimizer.zero_grad()
            x = torch.full((2, 8), n + job.rank + 1.0).to(on)
            loss = None
            while loss is None:
                try:
                    loss = model(x).square().sum()
                except KeyboardInterrupt:
                    interrupts += 1
            loss.backward()
            optimizer.step()
    assert interrupts == 1
    return ended(optimizer, model)


def out_of_memory(job: tw.Job, on: str) -> Found:
    """A batch is too large for the device; training goes on with a smaller one."""
    model = models.built().to(on)
    optimizer = made(model)
    for n in range(4):
        optimizer.zero_grad()
        if n == 2 and on != "cpu":
            optimizer.wait()
            torch.accelerator.synchronize()
            simulated.limit(simulated.allocated() + 4096)
            with pytest.raises(torch.OutOfMemoryError):
                models.loss(model, n, job.rank, on)
            simulated.limit(None)
        models.loss(model, n, job.rank, on).backward()
        optimizer.step()
    return ended(optimizer, model)


def what_goes_on(job: tw.Job) -> tuple[list[int], list[bool]]:
    prepare(0)
    same_bits = [
        same(interrupted(job, "cpu"), interrupted(job, "sim:0")),
        same(out_of_memory(job, "cpu"), out_of_memory(job, "sim:0")),
    ]
    return dropped(job), same_bits


def test_interrupts_and_a_full_device_in_forward_and_dropped_optimizers_do_no_harm() -> None:
    for (before, after), same_bits in run_job(what_goes_on, fresh=True).ok():
        assert before > 0 == after
        assert same_bits == [True, True]


def out_of_memory_in_backward(job: tw.Job) -> None:
    prepare(0)
    model = models.built().to("sim:0")
    optimizer = made(model)
    for n in range(3):
        optimizer.zero_grad()
        loss = models.loss(model, n, job.rank, "sim:0")
        if n == 1 and job.rank == 0:
            simulated.limit(1)
        loss.backward()
        optimizer.step()


def test_a_device_without_memory_in_backward_ends_the_job() -> None:
    ended = run_job(out_of_memory_in_backward, fresh=True)
    assert "OutOfMemoryError" in ended.errors[0]
    assert ended.errors[1].startswith("JobEnded: worker 0 raised OutOfMemoryError"), ended.errors[1]
