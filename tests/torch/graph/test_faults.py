"""Models over workers that come to grief: everybody ends, soon, with the reason."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path

import pytest
import torch

import tensorwire as tw
from tests.harness.jobs import run_job
from tests.harness.sandbox import Sandbox
from tests.levels import long, mostly_long

ROOT = str(Path(__file__).resolve().parents[3])


class Net(torch.nn.Module):
    """Over two workers."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (torch.nn.Linear(8, 8) for _ in range(3))
        self.e = torch.nn.Embedding(8, 8)

    def forward(self, x: torch.Tensor, i: torch.Tensor) -> torch.Tensor:
        return self.c(torch.tanh(self.b(torch.relu(self.a(x))) + self.e(i))).square().mean()


def train(job: tw.Job, fault: str = "", differs: bool = False, mode: str = "zerocopy") -> None:
    """In step 3 worker 1 does what ``fault`` says; where ``differs`` each places a layer on itself."""
    workers = {"a": 0, "b": 1, "c": job.rank if differs else 0, "e": 1}
    torch.manual_seed(0)
    compiled = torch.compile(Net(), backend="tensorwire", options={"workers": workers, "mode": mode})
    for step in range(100_000):
        x, i = torch.randn(4, 8), torch.zeros(4, dtype=torch.int64)
        if step == 3:
            print("three", job.rank, flush=True)
        if step == 3 and job.rank == 1:
            if fault == "is killed":
                os.kill(os.getpid(), signal.SIGKILL)
            elif fault == "raises":
                raise ValueError("broken data")
            elif fault == "catches":  # what its own part raises: the others wait for what will not come
                with contextlib.suppress(IndexError):
                    compiled(x, i + 99)
                job.barrier()
            elif fault == "sees another shape":
                x, i = torch.randn(5, 8), torch.zeros(5, dtype=torch.int64)
            elif fault == "is done":
                return
        compiled(x, i).backward()


MOVED_ON = (
    "worker 0 raised PlanMismatch: worker 1 {}, while this worker runs graph 0 (forward) once more: did they get "
    "arguments of other shapes, take another branch, or another number of steps?"
)
FAULTS = {
    "is killed": "worker 1 is gone: ",
    "raises": "worker 1 raised ValueError: broken data",
    "catches": "worker 1 raised IndexError: index out of range in self",
    "sees another shape": MOVED_ON.format("plans another graph"),
    "is done": MOVED_ON.format("runs no graph any more"),
}


@pytest.mark.parametrize("fault", mostly_long([*FAULTS], FAULTS.keys() - {"is done"}))
def test_a_fault_of_one_worker_ends_the_job_with_its_reason(fault: str) -> None:
    ended = run_job(train, fault, servers=0)
    assert str(ended.cause).startswith(FAULTS[fault])


@pytest.mark.long
def test_workers_that_place_differently() -> None:
    said = str(run_job(train, "", True, servers=0).cause)
    assert "does not agree with" in said.splitlines()[0]
    assert "on graph 0" in said.splitlines()[0]
    assert "addmm_2 = aten.addmm.default: worker " in said


# What the command shows

TRAIN = """
    from tests.torch.graph.test_faults import train
    import torch, warnings
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", message="Guards may run slower")  # Python 3.13.0
    train(job, mode="{mode}")
"""


@pytest.mark.long
def test_a_wrong_option_is_named(sandbox: Sandbox) -> None:
    """Dynamo makes of what a backend raises an error of its own, and shows all of its frames; not so of ours."""
    result = sandbox.run(sandbox.script(TRAIN.format(mode="quick")), "--servers", "0", PYTHONPATH=ROOT).finish()
    assert result.status != 0
    sandbox.nothing_left()
    message = result.message()
    first = message.splitlines()[0].partition(" raised ")[2]
    assert first.startswith("ArgumentError: options['mode'] must be one of ")
    assert "compiled(x, i)" in message
    assert "output_graph.py" not in message


@pytest.mark.slow
@pytest.mark.parametrize("signal_", [signal.SIGINT, long(signal.SIGTERM)])
def test_a_job_that_people_end(sandbox: Sandbox, signal_: signal.Signals) -> None:
    program = sandbox.run(sandbox.script(TRAIN.format(mode="zerocopy")), "--servers", "0", PYTHONPATH=ROOT)
    program.expect("three 1", "three 0")
    program.signal(signal_)
    assert program.finish().status == 128 + signal_
    sandbox.nothing_left()


@pytest.mark.long
def test_a_model_of_which_nothing_is_captured(sandbox: Sandbox) -> None:
    """It ran on every worker, and one of them says so."""
    script = sandbox.script(
        """
        import torch

        class Net(torch.nn.Linear):
            @torch._dynamo.disable
            def forward(self, x):
                return super().forward(x)

        workers = {"": 1}
        torch.compile(Net(2, 2), backend="tensorwire", options={"workers": workers})(torch.ones(2))
        """
    )
    result = sandbox.run(script, "--servers", "0").finish()
    assert result.status == 0
    assert result.err.count("captured nothing: every worker ran all of the model") == 1
