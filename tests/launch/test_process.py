"""What docs/process.md says about a worker's process: what changes, and that it is given back."""

from __future__ import annotations

import gc
import os
import re
import socket
from pathlib import Path

import pytest
import torch

import tensorwire as tw
from tensorwire.errors import ArgumentError, ParameterModified
from tests.harness.jobs import run_job
from tests.harness.sandbox import Sandbox

PAGE = Path(__file__).resolve().parents[2] / "docs" / "process.md"
SOURCE = Path(tw.__file__).parent
# Threads of other processes: of the launcher, of servers, of the coordinator, and of tests.
ELSEWHERE = {"coordinator", "faulty", "output", "guard", "leash", "wait-"}

LOOK = """
import gc, os, resource, signal, sys, threading

def looks():
    links = [os.path.realpath(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")]
    return {
        "hook": sys.excepthook,
        "thread hook": threading.excepthook,
        "signals": [signal.getsignal(s) for s in sorted(signal.valid_signals())],
        "mask": signal.pthread_sigmask(signal.SIG_BLOCK, []),
        "environment": dict(os.environ),
        "limits": [resource.getrlimit(getattr(resource, n)) for n in dir(resource) if n.startswith("RLIMIT_")],
        "threads": sorted(t.name for t in threading.enumerate()),
        "descriptors": len([link for link in links if "memfd" in link or "socket" in link or "pipe" in link]),
        "buffered": sys.stdout.line_buffering,
    }

def changed(before):
    now = looks()
    return {name for name in now if now[name] != before[name]}
"""

GIVEN_BACK = f"""
{LOOK}
import torch._dynamo  # it sets a variable of its own
before = looks()
import tensorwire as tw
print("imported", sorted(changed(before)))
for _ in range(2):
    job = tw.init()
    model = torch.nn.Sequential(torch.nn.Linear(300, 300), torch.nn.Linear(300, 2))
    optimizer = tw.torch.StoreOptimizer(model.named_parameters(), torch.optim.SGD, lr=0.1, overlap=True)
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.ones(2, 300)).sum().backward()
        optimizer.step()
    print("in the job", sorted(changed(before)))
    assert all(t.daemon for t in threading.enumerate() if t.name.startswith("tensorwire"))
    print("running", sorted({{t.name for t in threading.enumerate()}} - {{"MainThread"}}))
    job.close()
    del job, optimizer, model
    gc.collect()
    print("closed", sorted(changed(before)))
"""


@pytest.mark.slow
def test_a_closed_job_gives_everything_back(sandbox: Sandbox) -> None:
    result = sandbox.python(sandbox.script(GIVEN_BACK, init=False)).finish()
    assert (result.status, result.err) == (0, "")
    lines = result.out.splitlines()
    assert [line for line in lines if not line.startswith("running")] == [
        "imported []",
        *["in the job ['descriptors', 'hook', 'threads']", "closed []"] * 2,
    ]
    running = set(re.findall(r"'tensorwire-([\w-]+)'", result.out))
    assert {"control", "end", "push"} <= running <= documented_threads()


def documented_threads() -> set[str]:
    return set(re.findall(r"`tensorwire-([\w-]+)`", PAGE.read_text()))


def test_every_thread_of_a_worker_is_on_the_page() -> None:
    found: set[str] = set()
    for path in SOURCE.rglob("*.py"):
        if path.relative_to(SOURCE).parts[0] in ("bench", "cli"):
            continue
        found.update(re.findall(r'(?:name=f?|greet, |TransferThread\()"tensorwire-([\w-]+)', path.read_text()))
    assert found - ELSEWHERE == documented_threads()


def test_another_hook_may_take_its_place_where_a_block_reports_errors(sandbox: Sandbox) -> None:
    body = """
        import tensorwire as tw
        with tw.init() as job:
            sys.excepthook = lambda kind, error, trace: print("mine:", error)
            raise ValueError("broken data")
    """
    result = sandbox.run(sandbox.script(body, init=False)).finish()
    assert result.status != 0
    assert "raised ValueError: broken data" in result.err
    assert "mine: broken data" in result.out
    sandbox.all_gone()


def test_the_hook_calls_the_one_before(sandbox: Sandbox) -> None:
    body = """
        import tensorwire as tw
        sys.excepthook = lambda kind, error, trace: print("mine:", error)
        job = tw.init()
        raise ValueError("broken data")
    """
    result = sandbox.python(sandbox.script(body, init=False)).finish()
    assert (result.status, result.out.strip(), result.err) == (1, "mine: broken data", "")


def fork_and_step(job: tw.Job) -> list[str]:
    net = torch.nn.Linear(2, 2)
    optimizer = tw.torch.StoreOptimizer(net.named_parameters(), torch.optim.SGD, lr=1.0)
    net(torch.ones(1, 2)).sum().backward()
    ours, theirs = socket.socketpair()
    before = net.bias.detach().clone()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            refused = 0
            for call in (optimizer.step, job.barrier):
                try:
                    call()
                except ArgumentError as error:
                    refused += "forked child" in str(error)
            job.close()
            theirs.send(b"refused %d" % refused)
            theirs.recv(1)
            theirs.send(b"later %d" % torch.equal(net.bias, before - 1))
            status = 0
        finally:
            os._exit(status)
    said = [ours.recv(99).decode()]
    optimizer.step()
    ours.send(b"x")
    said.append(ours.recv(99).decode())
    assert os.waitpid(child, 0)[1] == 0
    return said


@pytest.mark.filterwarnings("ignore:This process")
def test_a_forked_child_is_no_member_and_sees_later_versions() -> None:
    assert run_job(fork_and_step, workers=1).ok() == [["refused 2", "later 1"]]


def step(net: torch.nn.Module, optimizer: tw.torch.StoreOptimizer) -> None:
    optimizer.zero_grad()
    net(torch.ones(1, 2)).sum().backward()
    optimizer.step()


def load_zeros(net: torch.nn.Module) -> None:
    net.load_state_dict({k: torch.zeros_like(v) for k, v in net.state_dict().items()})


def load_into_a_frozen_module(job: tw.Job) -> list[float]:
    net = torch.nn.Linear(2, 2)
    gc.freeze()
    optimizer = tw.torch.StoreOptimizer(net.named_parameters(), torch.optim.SGD, lr=1.0, overlap=True)
    step(net, optimizer)
    assert (bool(net.bias.isfinite().all()), type(net._parameters)) == (True, dict)
    load_zeros(net)
    with pytest.raises(ParameterModified):
        step(net, optimizer)
    optimizer.zero_grad()
    optimizer.write_parameters()
    step(net, optimizer)
    return net.bias.tolist()


def test_frozen_modules_are_not_found_and_loading_needs_a_word() -> None:
    assert run_job(load_into_a_frozen_module, workers=1).ok() == [[-1.0, -1.0]]


def load_into_a_model_that_was_given(job: tw.Job) -> list[str]:
    net = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    gc.freeze()
    gc.get_objects = None  # type: ignore[assignment]
    optimizer = tw.torch.StoreOptimizer(net, torch.optim.SGD, lr=1.0, overlap=True)
    step(net, optimizer)
    assert (bool(net[1].bias.isfinite().all()), type(net[1]._parameters).__name__) == (True, "Awaited")
    load_zeros(net)
    net.append(torch.nn.Linear(2, 2))
    optimizer.add_param_group({"params": net[2].named_parameters("2")})
    step(net, optimizer)
    assert type(net[2]._parameters).__name__ == "Awaited"
    assert net[1].bias.tolist() != [0.0, 0.0]  # the step began with what was loaded, and updated it
    names: list[str] = optimizer.param_groups[0]["param_names"]
    return names


def test_nothing_is_searched_where_the_model_is_given() -> None:
    names = run_job(load_into_a_model_that_was_given, workers=1).ok()
    assert names == [["0.weight", "0.bias", "1.weight", "1.bias"]]


def place_and_take_back(job: tw.Job) -> list[tuple[list[bool], list[bool], bool]]:
    from torch._dynamo.variables import builder

    os.environ["TENSORWIRE_BIRTH"] = "off"
    stock = builder.infer_subclass_type
    net = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    state = {k: v.clone() for k, v in net.state_dict().items()}

    def look() -> tuple[list[bool], list[bool], bool]:
        kinds = [type(p) is torch.nn.Parameter for p in net.parameters()]
        hooked = [bool(m._forward_hooks or m._forward_pre_hooks) for m in net]
        return kinds, hooked, builder.infer_subclass_type is stock

    seen = [look()]
    tw.torch.place(net, {"0": 0, "1": 1}, worker=0)
    seen.append(look())
    tw.torch.unplace(net, state)

    class Other(torch.Tensor):
        pass

    for value in (torch.ones(1), torch.ones(1).as_subclass(Other)):
        assert builder.infer_subclass_type(value) is stock(value)
    return [*seen, look()]


def test_unplace_takes_back_all_of_place_but_one_function() -> None:
    assert run_job(place_and_take_back, workers=1, servers=0).ok() == [
        [
            ([True, True, True, True], [False, False], True),
            ([True, True, False, False], [True, True], False),
            ([True, True, True, True], [False, False], False),
        ]
    ]


@pytest.mark.slow
def test_a_failed_job_ends_the_process_past_atexit_and_finally(sandbox: Sandbox) -> None:
    body = """
        import atexit
        if job.rank == 1:
            job.barrier()
            raise ValueError("broken data")
        job.barrier()  # which raises, where the job has ended before its answer came
        atexit.register(print, "atexit")
        try:
            while True:
                pass
        finally:
            print("finally")
    """
    result = sandbox.run(sandbox.script(body)).finish()
    assert result.status != 0
    assert "atexit" not in result.out
    assert "finally" not in result.out
    sandbox.all_gone()
