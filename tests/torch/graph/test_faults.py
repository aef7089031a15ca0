"""Models over workers that come to grief: everybody ends, soon, with the reason."""

from __future__ import annotations

import signal

import pytest

from tests.harness.sandbox import Sandbox

# A model over two workers; in step 3 worker 1 does what FAULT says.
TRAIN = """
    import torch, warnings
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", message="Guards may run slower")  # Python 3.13.0

    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.c = (torch.nn.Linear(8, 8) for _ in range(3))
            self.e = torch.nn.Embedding(8, 8)

        def forward(self, x, i):
            return self.c(torch.tanh(self.b(torch.relu(self.a(x))) + self.e(i))).square().mean()

    workers = {{"a": 0, "b": 1, "c": 0, "e": 1}}
    {before}
    torch.manual_seed(0)
    model = Net()
    compiled = torch.compile(model, backend="tensorwire", options={{"workers": workers, "mode": "{mode}"}})
    for step in range(100000):
        x, i = torch.randn(4, 8), torch.zeros(4, dtype=torch.int64)
        if step == 3:
            print("three", job.rank)
            if job.rank == 1:
                {fault}
        compiled(x, i).backward()
"""


def run(sandbox: Sandbox, fault: str = "pass", before: str = "", mode: str = "zerocopy") -> str:
    script = sandbox.script(TRAIN.format(fault=fault, before=before, mode=mode))
    result = sandbox.run(script, "--servers", "0").finish()
    assert result.status != 0
    sandbox.nothing_left()
    return result.message()


def test_a_worker_that_is_killed(sandbox: Sandbox) -> None:
    message = run(sandbox, "os.kill(os.getpid(), signal.SIGKILL)")
    assert message == "tensorwire: worker 1 was killed by SIGKILL\n"


def test_an_exception_of_one_worker(sandbox: Sandbox) -> None:
    message = run(sandbox, "raise ValueError('broken data')")
    assert message.splitlines()[0] == "tensorwire: worker 1 raised ValueError: broken data"
    assert message.count("Traceback") == 1


@pytest.mark.slow
def test_an_exception_inside_a_partition(sandbox: Sandbox) -> None:
    """Which its own worker catches: the others wait for what will not come, so the job ends all the same."""
    fault = """try:
                    compiled(x, i + 99)
                except IndexError:
                    print('caught')
                while True:
                    signal.pause()"""
    message = run(sandbox, fault)
    assert message.splitlines()[0] == "tensorwire: worker 1 raised IndexError: index out of range in self"
    assert "embedding" in message


@pytest.mark.long
def test_a_wrong_option_is_named(sandbox: Sandbox) -> None:
    """Dynamo makes of what a backend raises an error of its own, and shows all of its frames; not so of ours."""
    message = run(sandbox, mode="quick")
    first = message.splitlines()[0].partition(" raised ")[2]
    assert first.startswith("ArgumentError: options['mode'] must be one of ")
    assert "compiled(x, i)" in message
    assert "output_graph.py" not in message


@pytest.mark.long
def test_workers_that_place_differently(sandbox: Sandbox) -> None:
    message = run(sandbox, before='workers["c"] = job.rank')
    first = message.splitlines()[0]
    assert "does not agree with" in first
    assert "on graph 0" in first
    assert "addmm_2 = aten.addmm.default: worker " in message


@pytest.mark.parametrize(
    ("fault", "does"),
    [
        ("x, i = torch.randn(5, 8), torch.zeros(5, dtype=torch.int64)", "plans another graph"),
        pytest.param("break", "runs no graph any more", marks=pytest.mark.long),
    ],
)
def test_workers_that_move_on(sandbox: Sandbox, fault: str, does: str) -> None:
    """One sees another shape and compiles anew, or is done; the other goes on as before."""
    message = run(sandbox, fault)
    assert message.splitlines()[0] == (
        f"tensorwire: worker 0 raised PlanMismatch: worker 1 {does}, while this worker runs graph 0 (forward) once "
        "more: did they get arguments of other shapes, take another branch, or another number of steps?"
    )


@pytest.mark.parametrize("signal_", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.long)])
def test_a_job_that_people_end(sandbox: Sandbox, signal_: signal.Signals) -> None:
    program = sandbox.run(sandbox.script(TRAIN.format(fault="pass", before="", mode="zerocopy")), "--servers", "0")
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
