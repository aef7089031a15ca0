"""``tensorwire run --min-workers``: what people see of a worker that is lost while the job goes on."""

from __future__ import annotations

import pytest

from tensorwire.testing.patience import patient
from tests.harness.sandbox import Sandbox

TRAIN = """
import os, signal, sys, torch, tensorwire as tw
with tw.init() as job:
    p = torch.nn.Parameter(torch.zeros(3000))
    store = tw.torch.StoreOptimizer([("p", p)], torch.optim.SGD, lr=1.0)
    for step in range(30):
        p.grad = torch.ones_like(p)
        store.step()
        if job.rank == {rank} and step == 10:
            {ending}
    print("done", job.rank, p[0].item())
"""
ENDINGS = {
    "os.kill(os.getpid(), signal.SIGKILL)": "was killed by SIGKILL",
    "os._exit(3)": "exited with status 3",
    "os._exit(0)": "exited with status 0",
    "raise ValueError('no luck')": "raised ValueError: no luck",
    "sys.exit('enough')": "exited: enough",
}


@pytest.mark.parametrize("ending", ENDINGS)
def test_a_loss_is_told_once_and_the_job_goes_on(sandbox: Sandbox, ending: str) -> None:
    script = sandbox.script(TRAIN.format(rank=1, ending=ending), init=False)
    result = sandbox.run(script, "--min-workers", "2", workers=3).finish()
    assert result.status == 0, result.err
    assert result.err.count(f"tensorwire: worker 1 {ENDINGS[ending]}: the job goes on with 2 workers") == 1
    assert result.err.count("tensorwire: worker") == 1
    assert sorted(line[-12:] for line in result.out.splitlines()) == ["done 0 -30.0", "done 2 -30.0"]
    sandbox.nothing_left()


def test_too_few_are_left(sandbox: Sandbox) -> None:
    script = sandbox.script(TRAIN.format(rank=1, ending="os._exit(3)"), init=False)
    result = sandbox.run(script, "--min-workers", "3", workers=3).finish()
    assert result.status == 3
    assert "worker 1 exited with status 3: 2 workers are left, and it needs 3" in result.err
    sandbox.nothing_left()


def test_a_stopped_worker_is_lost_and_ended(sandbox: Sandbox) -> None:
    script = sandbox.script(TRAIN.format(rank=2, ending="os.kill(os.getpid(), signal.SIGSTOP)"), init=False)
    result = sandbox.run(script, "--min-workers", "1", workers=3, TENSORWIRE_FAILURE_TIMEOUT=str(patient(1.5))).finish()
    assert result.status == 0, result.err
    assert "worker 2 sent no heartbeat for " in result.err
    assert "stopped, or cut off: the job goes on with 2 workers" in result.err
    sandbox.nothing_left()


@pytest.mark.parametrize("least", ["0", "3"])
def test_a_number_that_no_job_has(sandbox: Sandbox, least: str) -> None:
    script = sandbox.script("")
    result = sandbox.run(script, "--min-workers", least).finish()
    assert result.status
    assert f"{least} is not in the range" in result.err or "the number of workers to go on with, 1 to 2" in result.err
