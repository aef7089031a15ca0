"""What a closed job keeps of its memory."""

from __future__ import annotations

import pytest

from tests.harness.sandbox import Sandbox

BODY = """
import gc, os
import tensorwire as tw
import torch

def memory_files():
    links = []
    for fd in os.listdir("/proc/self/fd"):
        try:
            links.append(os.readlink(f"/proc/self/fd/{fd}"))
        except OSError:
            pass
    return sum("memfd" in link for link in links)

before = memory_files()
for _ in range(2):
    job = tw.init()
    model = torch.nn.Linear(4, 4)
    optimizer = tw.torch.StoreOptimizer(model.named_parameters(), torch.optim.SGD, lr=0.1)
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    job.close()
    del job, optimizer, model
    gc.collect()
    print("kept", memory_files() - before)
"""


@pytest.mark.slow
def test_a_closed_job_keeps_no_descriptors_of_its_memory(sandbox: Sandbox) -> None:
    result = sandbox.python(sandbox.script(BODY, init=False)).finish()
    assert (result.status, result.out.split()) == (0, ["kept", "0", "kept", "0"])
