"""Ends of jobs that train: servers and workers with torch. Few, because every process loads it."""

from __future__ import annotations

import os
import signal

import pytest

from tests.harness.sandbox import Sandbox

TRAINS = """
import torch
torch.manual_seed(0)
model = torch.nn.Linear(4, 2)
optimizer = tw.torch.StoreOptimizer(model.named_parameters(), torch.optim.SGD, lr=0.1)

def steps(number):
    for _ in range(number):
        optimizer.zero_grad()
        model(torch.full((3, 4), 1.0 + job.rank)).sum().backward()
        optimizer.step()
"""


@pytest.mark.long  # a killed server, and one that trains: test_run.py, and tests/store/test_failpoints.py
def test_a_server_killed_in_the_middle_of_training(sandbox: Sandbox) -> None:
    program = sandbox.run(sandbox.script(TRAINS + "steps(2)\nprint('trains', job.rank)\nsteps(10**9)"))
    program.expect("trains 0", "trains 1")
    os.kill(sandbox.find("tensorwire.launch.server_process"), signal.SIGKILL)
    result = program.finish()
    assert (result.status, result.one_line()) == (137, "tensorwire: server 0 was killed by SIGKILL")
    sandbox.nothing_left()
