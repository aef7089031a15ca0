"""How jobs of ``tensorwire run`` end by themselves: everybody leaves, people read one message, the status says it."""

from __future__ import annotations

import os
import signal
import sys

import pytest
import torch

import tensorwire as tw
from tensorwire.device.verbs.ports import has_active_port
from tensorwire.testing.patience import patient
from tests.harness.jobs import run_job
from tests.harness.sandbox import WAITS, Sandbox, wait_for_end
from tests.levels import long

RAISES = """
    def work():
        raise ValueError("broken data")
    job.barrier()
    if job.rank == 1:
        work()
    job.barrier()
"""


def test_a_job_that_works_says_nothing(sandbox: Sandbox) -> None:
    script = sandbox.script("job.barrier(); print('worker', job.rank, 'of', job.num_workers, job.num_servers)")
    result = sandbox.run(script, "--servers", "2", workers=3).finish()
    assert (result.status, result.err) == (0, "")
    assert [f"worker {i} of 3 2" in result.out for i in range(3)] == [True] * 3
    sandbox.nothing_left()


def test_an_exception_ends_everybody_with_its_traceback(sandbox: Sandbox) -> None:
    result = sandbox.run(sandbox.script(RAISES)).finish()
    message = result.message()
    assert result.status == 1
    assert message.splitlines()[0] == "tensorwire: worker 1 raised ValueError: broken data"
    assert message.splitlines()[-1] == "ValueError: broken data"
    assert message.count("Traceback") == 1
    assert "in work" in message
    sandbox.nothing_left()


def begin_an_optimizer(job: tw.Job) -> None:
    tw.torch.StoreOptimizer(torch.nn.Linear(2, 2).named_parameters(), torch.optim.SGD, lr=0.1)


def test_an_optimizer_needs_servers() -> None:
    (said,) = run_job(begin_an_optimizer, workers=1, servers=0).errors
    assert "this job has no servers to keep the parameters: start it with --servers 1 or more" in said


def test_every_worker_may_fail_at_once(sandbox: Sandbox) -> None:
    script = sandbox.script("job.barrier()\nraise SystemError('\\n\\nodd\\udcff')")
    result = sandbox.run(script, "--servers", "0", workers=3).finish()
    assert result.status == 1
    assert result.message().count("Traceback") == 1
    sandbox.nothing_left()


def test_a_with_statement_ends_the_same_way(sandbox: Sandbox) -> None:
    body = """
        import tensorwire as tw
        with tw.init() as job:
            job.barrier()
            if job.rank == 1:
                raise KeyError("k")
            job.barrier()
    """
    result = sandbox.run(sandbox.script(body, init=False)).finish()
    assert result.status == 1
    assert result.message().startswith("tensorwire: worker 1 raised KeyError: 'k'\nTraceback")
    sandbox.nothing_left()


@pytest.mark.parametrize(
    ("ending", "status", "message"),
    [
        ("sys.exit(3)", 3, "worker 1 exited with status 3"),
        ("os._exit(0)", 1, "worker 1 exited with status 0 in the middle of the job"),
        long(("os.kill(os.getpid(), signal.SIGSEGV)", 139, "worker 1 was killed by SIGSEGV")),
        long(("os.kill(os.getpid(), signal.SIGINT)", 130, "worker 1 was interrupted")),
        ("raise JobEnded('by hand')", 1, "worker 1 exited with status 1"),
    ],
)
def test_a_worker_that_ends_early(sandbox: Sandbox, ending: str, status: int, message: str) -> None:
    body = f"from tensorwire.errors import JobEnded\njob.barrier()\nif job.rank == 1: {ending}\njob.barrier()"
    result = sandbox.run(sandbox.script(body), "--servers", "0").finish()
    assert result.one_line() == f"tensorwire: {message}"
    assert result.status == status
    sandbox.nothing_left()


def test_a_worker_that_finishes_while_another_waits_for_it(sandbox: Sandbox) -> None:
    result = sandbox.run(sandbox.script("if job.rank == 0: job.barrier()"), "--servers", "0").finish()
    assert result.one_line() == "tensorwire: worker 1 left the job while worker 0 waits for it in job.barrier()"
    assert result.status == 1


def test_an_exit_status_after_the_job_was_done(sandbox: Sandbox) -> None:
    body = """
        import select
        if job.rank == 0:
            job._worker.member.client.publish("first", str(os.getpid()).encode())
            job.barrier()
            sys.exit()
        first = os.pidfd_open(int(job._worker.member.client.lookup("first")))
        job.barrier()
        job.close()
        select.select([first], [], [])  # worker 0 has gone, and the job is over
        sys.exit(4)
    """
    result = sandbox.run(sandbox.script(body)).finish()
    assert (result.status, result.one_line()) == (
        4,
        "tensorwire: worker 1 exited with status 4 after it had left the job",
    )


def test_a_script_may_go_on_after_the_job(sandbox: Sandbox) -> None:
    """Longer than any grace: saving what was trained is no part of the job, but it must not be cut off."""
    body = "job.close()\nprint(sys.stdin.read())\nprint('left')\ntime.sleep(1.8)\nprint('saved')"
    result = sandbox.run(sandbox.script(body), "--servers", "0", TENSORWIRE_GRACE="0.2").finish()
    assert (result.status, result.err) == (0, "")
    assert result.out.count("saved") == 2


def test_python_reports_an_exception_after_the_job(sandbox: Sandbox) -> None:
    result = sandbox.run(
        sandbox.script("job.close()\nif job.rank: raise ValueError('late')"), "--servers", "0"
    ).finish()
    assert result.status == 1
    assert result.err.count("ValueError: late") == 1
    assert result.err.splitlines()[-1] == "tensorwire: worker 1 exited with status 1 after it had left the job"


@pytest.mark.skipif(has_active_port(), reason="there is RDMA here")
def test_verbs_where_there_is_no_rdma_is_refused_before_anything_starts(sandbox: Sandbox) -> None:
    result = sandbox.run(sandbox.script("print('started')"), "--device", "verbs").finish()
    assert (result.status, result.out) == (1, "")
    assert "RDMA" in result.one_line()
    sandbox.nothing_left()


def test_a_missing_interface_is_reported_once_before_anything_starts(sandbox: Sandbox) -> None:
    result = sandbox.run(sandbox.script("print('started')"), TENSORWIRE_IFACE="nosuch0").finish()
    assert (result.status, result.out) == (2, "")
    assert result.one_line() == "tensorwire: TENSORWIRE_IFACE: no interface 'nosuch0' with an IPv4 address here"
    sandbox.nothing_left()


def test_a_script_that_never_joins(sandbox: Sandbox) -> None:
    result = sandbox.run(sandbox.script("print('hello')", init=False), "--servers", "0").finish()
    assert result.status == 1
    assert "exited without joining the job: its script has to call tensorwire.init()" in result.one_line()
    sandbox.nothing_left()


def test_a_worker_that_fails_before_everybody_joined(sandbox: Sandbox) -> None:
    """The others wait for it in vain, and hear of it from its launcher."""
    body = """
        if os.environ["TENSORWIRE_RANK"] == "1":
            import no_such_module
        import tensorwire as tw
        tw.init().barrier()
    """
    result = sandbox.run(sandbox.script(body, init=False), "--servers", "0").finish()
    lines = result.err.splitlines()
    assert lines[-1] == "tensorwire: worker 1 exited with status 1"
    assert lines[-2] == "ModuleNotFoundError: No module named 'no_such_module'"
    assert result.err.count("Traceback") == 1
    assert result.status == 1
    sandbox.nothing_left()


def test_a_job_that_fails_while_a_script_is_at_its_end(sandbox: Sandbox) -> None:
    """Python 3.12.0 and 3.12.1 start no thread from there on."""
    body = """
        import atexit, select
        def end():
            job._worker.member.client.publish("at its end", b"")
            select.select([], [], [])
        if job.rank == 0:
            atexit.register(end)
        else:
            job._worker.member.client.lookup("at its end")
            raise ValueError("broken data")
    """
    result = sandbox.run(sandbox.script(body)).finish()
    message = result.message()
    assert message.splitlines()[0] == "tensorwire: worker 1 raised ValueError: broken data"
    assert message.count("Traceback") == 1
    assert result.status == 1
    sandbox.nothing_left()


def test_a_worker_that_computes_on_is_ended_and_its_output_is_kept(sandbox: Sandbox) -> None:
    body = """
        sys.stdout.write("kept\\n")  # and is in a buffer
        job.barrier()
        if job.rank == 1:
            raise ValueError("x")
        while True:
            pass
    """
    result = sandbox.run(sandbox.script(body)).finish()
    assert result.status == 1
    assert result.message().startswith("tensorwire: worker 1 raised ValueError: x")
    assert result.out.count("kept") == 2
    sandbox.nothing_left()


@pytest.mark.parametrize("victim", ["worker", "server"])
def test_a_killed_process_ends_the_job_by_name(sandbox: Sandbox, victim: str) -> None:
    program = sandbox.run(sandbox.script(f"job.barrier(); print('ready')\n{WAITS}"))
    program.expect("ready")
    pid = program.number("pid-1") if victim == "worker" else sandbox.find("tensorwire.launch.server_process")
    os.kill(pid, signal.SIGKILL)
    result = program.finish()
    name = "worker 1" if victim == "worker" else "server 0"
    assert result.one_line() == f"tensorwire: {name} was killed by SIGKILL"
    assert result.status == 137
    sandbox.nothing_left()


def test_a_stopped_worker_ends_the_job_by_name(sandbox: Sandbox) -> None:
    program = sandbox.run(
        sandbox.script(f"job.barrier(); print('ready')\n{WAITS}"),
        TENSORWIRE_FAILURE_TIMEOUT=str(patient(1.5)),
    )
    program.expect("ready")
    os.kill(program.number("pid-1"), signal.SIGSTOP)
    result = program.finish()
    assert result.one_line().startswith("tensorwire: worker 1 sent no heartbeat for ")
    assert result.status == 1
    sandbox.nothing_left()


def test_what_a_killed_worker_started_ends_with_the_job(sandbox: Sandbox) -> None:
    """Data loaders, shells: they are in the worker's process group, which outlives it."""
    body = """
        import subprocess
        if job.rank == 1:
            child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
            print("grandchild", child.pid)
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        job.barrier()
        job._worker.member.client.lookup("nothing", 600.0)
    """
    program = sandbox.run(sandbox.script(body))
    grandchild = program.number("grandchild")
    os.kill(program.number("pid-1"), signal.SIGKILL)
    assert program.finish().one_line() == "tensorwire: worker 1 was killed by SIGKILL"
    wait_for_end(grandchild)
    sandbox.nothing_left()


def test_two_jobs_at_once_do_not_meet(sandbox: Sandbox) -> None:
    script = sandbox.script("""
        job._worker.member.client.publish(f"mine/{job.rank}", sys.argv[1].encode())
        job.barrier()
        print("sees", job._worker.member.client.lookup(f"mine/{1 - job.rank}").decode())
    """)
    first, second = (
        sandbox.launch("run", "--workers", "2", "--servers", "0", "--", sys.executable, script, name)
        for name in ("first", "second")
    )
    for program, name in ((first, "first"), (second, "second")):
        result = program.finish()
        assert result.status == 0, result.err
        assert result.out.count(f"sees {name}") == 2
    sandbox.nothing_left()


CLOSERS = """
    import atexit
    def fails(): raise {error}
    job._worker.at_close(fails)
    job._worker.at_close(lambda: print("closed", job.rank))
"""


@pytest.mark.parametrize(
    ("error", "status", "message"),
    [
        ("tw.errors.WaitTimeout('too late')", 1, "worker 0 raised WaitTimeout: too late"),
        ("KeyboardInterrupt", 130, "worker 0 was interrupted"),
    ],
)
def test_what_fails_at_the_end_of_a_script(sandbox: Sandbox, error: str, status: int, message: str) -> None:
    """The others do not learn it from its silence, and what is left to close is closed."""
    body = f"{CLOSERS.format(error=error)}\n    if job.rank: {WAITS}"
    result = sandbox.run(sandbox.script(body)).finish()
    assert (result.status, result.message().splitlines()[0]) == (status, f"tensorwire: {message}")
    assert "closed 0" in result.out
    sandbox.nothing_left()


def test_what_fails_at_the_end_of_a_worker_alone(sandbox: Sandbox) -> None:
    """Python's own exit status would be 0."""
    closers = CLOSERS.format(error="tw.errors.WaitTimeout('too late')")
    result = sandbox.python(sandbox.script(f"{closers}    atexit.register(print, 'after')")).finish()
    assert (result.status, result.err.count("WaitTimeout: too late"), result.err.count("Traceback")) == (1, 1, 1)
    assert {"closed 0", "after"} <= set(result.out.splitlines())
    caught = f"{closers}    try: job.close()\n    except tw.errors.WaitTimeout: sys.exit(7)"
    result = sandbox.python(sandbox.script(caught)).finish()
    assert (result.status, result.err) == (7, "")
    sandbox.nothing_left()
