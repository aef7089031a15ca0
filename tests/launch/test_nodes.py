"""Jobs of two nodes, both on this machine: two launchers, one message."""

from __future__ import annotations

import signal
import sys

import pytest

from tests.harness.sandbox import WAITS, Program, Sandbox, free_port
from tests.launch.test_starters import finish


def node(sandbox: Sandbox, number: int, port: int, script: str, *options: str, **environment: str) -> Program:
    """The launcher of one node, with a worker and a server."""
    where = ("--rendezvous", f"127.0.0.1:{port}", "--nodes", "2", "--node", str(number))
    return sandbox.launch("run", *where, *options, "--", sys.executable, script, **environment)


def both(sandbox: Sandbox, body: str, *, first: int = 0, init: bool = True) -> list[Program]:
    """The launchers of nodes 0 and 1; ``first`` starts before the other."""
    script, port, secret = sandbox.script(body, init=init), free_port(), sandbox.secret()
    started = {n: node(sandbox, n, port, script, TENSORWIRE_SECRET_FILE=secret) for n in (first, 1 - first)}
    return [started[0], started[1]]


@pytest.mark.parametrize("first", [0, 1])
def test_two_nodes_work_in_any_order(sandbox: Sandbox, first: int) -> None:
    zero, one = finish(both(sandbox, "job.barrier(); print('worker', job.rank, job.num_workers)", first=first))
    assert (zero.status, zero.err, one.status, one.err) == (0, "", 0, "")
    assert "worker 0 2" in zero.out
    assert "worker 1 2" in one.out
    sandbox.nothing_left()


def test_both_nodes_report_a_failure(sandbox: Sandbox) -> None:
    results = finish(both(sandbox, "job.barrier()\nif job.rank: raise ValueError('x')\njob.barrier()"))
    for result in results:
        assert result.status == 1
        assert result.message().startswith("tensorwire: worker 1 raised ValueError: x\nTraceback")
    sandbox.nothing_left()


def test_a_worker_of_another_node_that_is_stopped_before_it_joined_is_named(sandbox: Sandbox) -> None:
    """Only its own launcher sees it."""
    body = """
        if os.environ["TENSORWIRE_RANK"] == "1":
            os.kill(os.getpid(), signal.SIGSTOP)
        import tensorwire as tw
        tw.init().barrier()
    """
    script, port, secret = sandbox.script(body, init=False), free_port(), sandbox.secret()
    short = {"TENSORWIRE_FAILURE_TIMEOUT": "1", "TENSORWIRE_SECRET_FILE": secret}
    for result in finish([node(sandbox, number, port, script, **short) for number in (0, 1)]):
        assert result.one_line() == "tensorwire: worker 1 was stopped before it joined the job, 1 s ago"
        assert result.status == 1
    sandbox.nothing_left()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_the_end_of_one_launcher_ends_the_other(sandbox: Sandbox, number: signal.Signals) -> None:
    zero, one = both(sandbox, f"job.barrier(); print('ready')\n{WAITS}")
    zero.expect("ready")
    one.expect("ready")
    one.signal(number)
    survivor, _ = zero.finish(), one.process.wait()
    sandbox.all_gone()
    ended = one.finish()
    if number == signal.SIGINT:
        assert (ended.status, survivor.status) == (130, 1)
        assert ended.one_line() == survivor.one_line() == "tensorwire: the user interrupted the job"
    else:
        assert survivor.status == 1
        # Launcher and worker died together; who is named is who was missed first.
        assert "is gone: its connection closed without a word" in survivor.one_line()
    sandbox.nothing_left()


def test_the_end_of_node_0_ends_node_1(sandbox: Sandbox) -> None:
    zero, one = both(sandbox, f"job.barrier(); print('ready')\n{WAITS}")
    one.expect("ready")
    zero.signal(signal.SIGKILL)
    zero.process.wait()
    result = one.finish()
    assert result.status == 1
    assert sum("the coordinator is gone" in line for line in result.err.splitlines()) >= 1
    assert "Traceback" not in result.err
    sandbox.all_gone()
    zero.finish()


def test_a_killed_worker_of_node_1_is_named_on_both(sandbox: Sandbox) -> None:
    zero, one = both(sandbox, "job.barrier()\nif job.rank: os.kill(os.getpid(), signal.SIGKILL)\njob.barrier()")
    first, second = finish([zero, one])
    assert first.one_line() == second.one_line() == "tensorwire: worker 1 was killed by SIGKILL"
    assert (first.status, second.status) == (1, 137)
    sandbox.nothing_left()


def test_who_does_not_fit_is_refused_and_node_0_waits_on(sandbox: Sandbox) -> None:
    """Another secret, another size, and another node 0."""
    port, script, secret = free_port(), sandbox.script("job.barrier()"), sandbox.secret()
    zero = node(sandbox, 0, port, script, TENSORWIRE_SECRET_FILE=secret)
    zero.number("pid-0")  # it listens
    other = sandbox.secret("another secret of this test")
    result = node(sandbox, 1, port, script, TENSORWIRE_SECRET_FILE=other).finish()
    assert result.one_line() == "tensorwire: the other side does not hold this job's secret"
    assert result.status == 1
    result = node(sandbox, 1, port, script, "--workers", "2", TENSORWIRE_SECRET_FILE=secret).finish()
    assert result.one_line() == (
        "tensorwire: node 0 runs a job of 2 workers and 2 servers, node 1 one of 4 and 2: "
        "give every node the same --nodes, --workers and --servers"
    )
    assert result.status == 2
    result = node(sandbox, 0, port, script, TENSORWIRE_SECRET_FILE=secret).finish()
    assert result.one_line() == f"tensorwire: the coordinator cannot listen on 127.0.0.1:{port}: Address already in use"
    assert result.status == 2
    zero.signal(signal.SIGTERM)
    assert zero.finish().one_line() == "tensorwire: SIGTERM ended the job"
    sandbox.nothing_left()
