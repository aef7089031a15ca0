"""What ends the launcher ends the whole job: Ctrl-C, SIGTERM, a closed terminal, SIGKILL, a stop."""

from __future__ import annotations

import os
import shlex
import signal
import sys
import time
from pathlib import Path

import pytest

from tensorwire.launch.stops import is_stopped
from tensorwire.testing.patience import patient
from tests.harness.sandbox import WAITS, Program, Sandbox, free_port, run_command, wait_for_end
from tests.levels import mostly_long

READY = f"job.barrier(); print('ready', job.rank)\n{WAITS}"
STAYS = "job.barrier(); print('ready', job.rank)\nwhile True: time.sleep(99)"


def ready(sandbox: Sandbox, body: str = READY, *options: str, **environment: str) -> Program:
    """A job whose two workers are there."""
    program = sandbox.run(sandbox.script(body), *options, **environment)
    program.expect("ready 0", "ready 1")
    return program


@pytest.mark.parametrize(
    ("number", "message"),
    [
        (signal.SIGTERM, "SIGTERM ended the job"),  # test_a_second_interrupt_does_not_wait has SIGINT
        (signal.SIGHUP, "SIGHUP ended the job: its terminal was closed"),
    ],
)
def test_a_signal_ends_the_job(sandbox: Sandbox, number: signal.Signals, message: str) -> None:
    program = ready(sandbox)
    program.signal(number)
    result = program.finish()
    assert result.one_line() == f"tensorwire: {message}"
    assert result.status == 128 + number
    sandbox.nothing_left()


def test_what_is_meant_for_scripts_reaches_the_workers(sandbox: Sandbox) -> None:
    """A script without a handler ends as it would alone; servers and the launcher go on."""
    body = """
        import time
        def take(number, frame):
            signal.signal(number, signal.SIG_DFL)
            print(signal.Signals(number).name, job.rank)
        for number in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGQUIT):
            signal.signal(number, take)
        job.barrier(); print("ready", job.rank)
        while True: time.sleep(0.1)  # pause() would miss a signal that came just before it
    """
    program = ready(sandbox, body)
    for name in ("SIGUSR1", "SIGUSR2", "SIGQUIT"):
        program.signal(signal.Signals[name])
        program.expect(f"{name} 0", f"{name} 1")
    program.signal(signal.SIGUSR1)
    result = program.finish()
    assert result.one_line() in [f"tensorwire: worker {rank} was killed by SIGUSR1" for rank in (0, 1)]
    assert result.status == 128 + signal.SIGUSR1
    sandbox.nothing_left()


def test_a_second_interrupt_does_not_wait(sandbox: Sandbox) -> None:
    program = ready(sandbox, f"signal.signal(signal.SIGTERM, signal.SIG_IGN)\n{STAYS}", TENSORWIRE_GRACE="1000")
    program.signal(signal.SIGINT)
    while not program._errors.read_text():  # it has said why, and waits for the workers
        pass
    program.signal(signal.SIGINT)
    result = program.finish()
    assert result.one_line() == "tensorwire: the user interrupted the job"
    assert result.status == 130
    sandbox.nothing_left()


def test_an_interrupt_while_waiting_for_node_0(sandbox: Sandbox) -> None:
    where = f"127.0.0.1:{free_port()}"
    code = (
        "import signal, sys; from tensorwire.launch import launcher\n"
        "def connect(*_, **__): print('waiting', flush=True); signal.pause()\n"
        "launcher.Client = connect\n"
        f"sys.exit(launcher.Launcher(launcher.RunOptions(['true'], rendezvous='{where}', nodes=2, node=1))())"
    )
    program = sandbox.start(sys.executable, "-c", code, TENSORWIRE_SECRET_FILE=sandbox.secret())
    program.expect("waiting")
    program.signal(signal.SIGINT)
    result = program.finish()
    assert (result.status, result.one_line()) == (130, "tensorwire: the user interrupted the job")


def test_an_ignored_hangup_stays_ignored(sandbox: Sandbox) -> None:
    """``nohup tensorwire run``: a closed terminal is not the end."""
    body = "job.barrier(); print('ready', job.rank)\nwhile not os.path.exists(sys.argv[1]): time.sleep(0.02)"
    flag = sandbox.folder / "flag"
    command = shlex.join(run_command(sandbox.script(body)))
    program = sandbox.start("bash", "-c", f"trap '' HUP; exec {command} {flag}")
    program.expect("ready 0", "ready 1")
    program.signal(signal.SIGHUP)
    flag.touch()
    assert (program.finish().status, sandbox.processes()) == (0, {})


def test_nothing_outlives_a_killed_launcher(sandbox: Sandbox) -> None:
    body = f"import subprocess\nsubprocess.Popen(['sleep', '1000'])\n{STAYS}"
    program = ready(sandbox, body)
    program.signal(signal.SIGKILL)
    program.process.wait()
    sandbox.all_gone()
    lines = program.finish().err.splitlines()
    guard = "tensorwire: the launcher was killed: its processes are ended"
    assert guard in lines
    # A worker may notice that the coordinator is gone before the guard ends it.
    others = [line for line in lines if line != guard]
    assert all(line.startswith("tensorwire: worker ") and "the coordinator is gone" in line for line in others)
    sandbox.nothing_left()


@pytest.mark.parametrize(
    ("numbers", "told"),
    [
        ([signal.SIGKILL], "tensorwire: worker 0: the job ended: the coordinator is gone"),
        (
            [signal.SIGINT, signal.SIGTERM, signal.SIGHUP],
            "tensorwire: the launcher was killed: its processes are ended",
        ),
    ],
    ids=["killed", "signalled"],
)
def test_the_guard_may_be_killed_too_and_ignores_what_is_meant_for_the_launcher(
    sandbox: Sandbox, numbers: list[signal.Signals], told: str
) -> None:
    """Without it members still notice that the coordinator is gone, and servers that their parent is.

    They say so where they still can: what they printed through the launcher is gone with it.
    """
    program = ready(sandbox, READY, "--no-prefix")
    guard = sandbox.find("guard.py")
    for number in numbers:
        os.kill(guard, number)
    program.signal(signal.SIGKILL)
    program.process.wait()
    sandbox.all_gone()
    errors = program.finish().err
    assert told in errors
    assert "Traceback" not in errors


def test_a_stopped_guard_does_not_hold_the_launcher(sandbox: Sandbox) -> None:
    """Nor may it keep the terminal: it is ended with the job."""
    program = ready(sandbox, READY + "\njob.barrier()")
    os.kill(sandbox.find("guard.py"), signal.SIGSTOP)
    program.signal(signal.SIGINT)
    result = program.finish()
    assert (result.status, result.one_line()) == (130, "tensorwire: the user interrupted the job")
    sandbox.nothing_left()


def test_a_killed_guard_is_reported_and_the_job_continues(sandbox: Sandbox) -> None:
    body = "job.barrier(); print('ready', job.rank)\nwhile not os.path.exists(sys.argv[0] + '-on'): time.sleep(0.02)"
    script = sandbox.script(body)
    program = sandbox.run(script)
    program.expect("ready 0", "ready 1")
    os.kill(sandbox.find("guard.py"), signal.SIGKILL)
    while not program._errors.read_text().endswith("\n"):
        pass
    Path(f"{script}-on").touch()
    result = program.finish()
    assert result.one_line().startswith("tensorwire: the guard was killed by SIGKILL: the job goes on, but if this ")
    assert result.status == 0
    sandbox.nothing_left()


LOST_AFTER = f"{patient(1.0):g}"
SHORT = {"TENSORWIRE_FAILURE_TIMEOUT": LOST_AFTER}


def test_a_stopped_launcher_ends_every_member_and_is_named(sandbox: Sandbox) -> None:
    program = ready(sandbox, READY, **SHORT)
    workers = [program.number(f"pid-{rank}") for rank in (0, 1)]
    program.signal(signal.SIGSTOP)
    for pid in workers:
        # A zombie until its stopped parent reads its status: its end is what pidfd shows.
        wait_for_end(pid)
    program.signal(signal.SIGCONT)
    result = program.finish()
    told = "the job ended: the coordinator is gone: the other side of a connection fell silent"
    errors = result.err.splitlines()
    assert [any(line.startswith(f"tensorwire: worker {r}: {told}") for line in errors) for r in (0, 1)] == [True, True]
    (own,) = [line for line in errors if not line.startswith("tensorwire: worker ")]
    assert own.startswith("tensorwire: the launcher was stopped for ")
    assert own.endswith(" s: the processes of the job gave it up")
    assert result.status == 1
    sandbox.nothing_left()


def test_a_launcher_that_is_stopped_before_anybody_joined_is_named(sandbox: Sandbox) -> None:
    body = """
        print(f"pid-{os.environ['TENSORWIRE_RANK']} {os.getpid()}")
        while not os.path.exists(sys.argv[0] + "-on"): time.sleep(0.02)
        import tensorwire as tw
        tw.init()
    """
    script = sandbox.script(body, init=False)
    program = sandbox.run(script, "--servers", "0", **SHORT)
    workers = [program.number(f"pid-{rank}") for rank in (0, 1)]
    program.signal(signal.SIGSTOP)
    Path(f"{script}-on").touch()
    for pid in workers:
        wait_for_end(pid)
    program.signal(signal.SIGCONT)
    result = program.finish()
    errors = result.err.splitlines()
    assert errors.pop().startswith("tensorwire: the launcher was stopped for ")
    told = f"could not join the job: the other side of a connection fell silent for {LOST_AFTER} s"
    assert sorted(errors) == [f"tensorwire: worker {rank} {told}" for rank in (0, 1)]
    assert result.status == 1
    sandbox.nothing_left()


@pytest.mark.slow
@pytest.mark.parametrize("device", mostly_long(["tcp", "shm"], ["shm"]))
def test_a_job_survives_ctrl_z(sandbox: Sandbox, device: str) -> None:
    body = """
        import torch
        model = torch.nn.Linear(200, 200)
        optimizer = tw.torch.StoreOptimizer(model.named_parameters(), torch.optim.SGD, lr=0.01)
        print("ready", job.rank)
        with job.uneven():
            while not os.path.exists(sys.argv[0] + "-on"):
                optimizer.zero_grad()
                model(torch.full((1, 200), 1.0 + job.rank)).sum().backward()
                optimizer.step()
        print("done", job.rank)
    """
    script = sandbox.script(body)
    program = sandbox.run(script, "--device", device, **SHORT)
    program.expect("ready 0", "ready 1")
    server = sandbox.find("tensorwire.launch.server_process")
    pids = [program.process.pid, server, *(program.number(f"pid-{rank}") for rank in (0, 1))]
    program.signal(signal.SIGTSTP)
    while not all(is_stopped(pid) for pid in pids):
        pass
    time.sleep(2.5 * patient(1.0))  # longer than the silence after which a process counts as lost
    assert all(is_stopped(pid) for pid in pids)
    Path(f"{script}-on").touch()
    program.signal(signal.SIGCONT)
    result = program.finish()
    assert (result.status, result.err) == (0, "")
    assert {"done 0", "done 1"} <= set(result.out.split("\n"))
    sandbox.nothing_left()


@pytest.mark.parametrize("wrapper", ["exec", ""], ids=["the command", "what it starts"])
def test_a_worker_that_is_stopped_before_it_joined_is_named(sandbox: Sandbox, wrapper: str) -> None:
    script = sandbox.script("job.barrier()")
    stops = f"[ $TENSORWIRE_RANK = 1 ] && {wrapper} sh -c 'kill -STOP $$'; exec {sys.executable} {script}"
    program = sandbox.launch("run", "--workers", "2", "--", "sh", "-c", stops, **SHORT)
    result = program.finish()
    assert result.one_line() == f"tensorwire: worker 1 was stopped before it joined the job, {LOST_AFTER} s ago"
    assert result.status == 1
    sandbox.nothing_left()


def test_a_reader_that_has_gone(sandbox: Sandbox) -> None:
    """``tensorwire run ... 2>&1 | head``: a broken pipe changes no status and leaves nothing."""
    script = sandbox.script("job.barrier()\nif job.rank: raise ValueError('x')\njob.barrier()")
    run = shlex.join(run_command(script, "--servers", "0"))
    result = sandbox.start("bash", "-c", f"set -o pipefail; {run} 2>&1 >/dev/null | true").finish()
    assert (result.status, result.err) == (1, "")
    sandbox.nothing_left()
