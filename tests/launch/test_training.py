"""Ends of jobs that train: servers and workers with torch. Few, because every process loads it."""

from __future__ import annotations

import signal

import pytest

from tests.sandbox import Sandbox

TRAINS = """
import torch
torch.manual_seed(0)
model = torch.nn.Linear(4, 2)
optimizer = tw.torch.StoreOptimizer(model.named_parameters(), torch.optim.SGD, lr=0.1)

def steps(number):
    for _ in range(number):
        optimizer.zero_grad()
        model(torch.ones(3, 4)).sum().backward()
        optimizer.step()
"""


def test_a_worker_that_finishes_early_is_named_with_its_step(sandbox: Sandbox) -> None:
    result = sandbox.run(sandbox.script(TRAINS + "steps(3 if job.rank else 5)")).finish()
    assert "worker 1 finished while worker 0 goes on with step 4" in result.one_line()
    assert "give every worker the same number of steps" in result.one_line()
    assert result.status == 1
    sandbox.nothing_left()


@pytest.mark.parametrize("victim", ["worker", "server"])
def test_a_process_killed_in_the_middle_of_training(sandbox: Sandbox, victim: str) -> None:
    import os

    program = sandbox.run(sandbox.script(TRAINS + "steps(2)\nprint('trains', job.rank)\nsteps(10**9)"))
    program.expect("trains 0", "trains 1")
    pid = program.number("pid-1") if victim == "worker" else sandbox.find("tensorwire.launch.server")
    os.kill(pid, signal.SIGKILL)
    result = program.finish()
    name = "worker 1" if victim == "worker" else "server 0"
    assert (result.status, result.one_line()) == (137, f"tensorwire: {name} was killed by SIGKILL")
    sandbox.nothing_left()
