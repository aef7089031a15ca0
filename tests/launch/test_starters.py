"""Jobs that ``tensorwire run`` did not start: torchrun, ranks by hand, Slurm's variables, init's arguments, alone."""

from __future__ import annotations

import contextlib
import json
import signal
import socket
import sys

import pytest

from tests.harness.sandbox import WAITS, Program, Result, Sandbox, free_port

WORKS = """
job.barrier()
print("worker", job.rank, "of", job.num_workers, "with", job.num_servers)
"""
RAISES = """
job.barrier()
if job.rank == 1:
    raise ValueError("broken data")
job.barrier()
"""


def by_hand(sandbox: Sandbox, body: str) -> list[Program]:
    """Two processes with RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT."""
    script = sandbox.script(body)
    common = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    return [sandbox.python(script, RANK=str(rank), **common) for rank in (0, 1)]


def finish(programs: list[Program]) -> list[Result]:
    return [program.finish() for program in programs]


def works(results: list[Result], servers: int = 2) -> None:
    for rank, result in enumerate(results):
        assert (result.status, result.err) == (0, "")
        assert f"worker {rank} of 2 with {servers}" in result.out


COLLECTIVES = """
import numpy
assert job.broadcast({"rank": job.rank, "a": numpy.arange(3)})["rank"] == 0
assert job.all_reduce(numpy.ones(300000)).sum() == 300000 * job.num_workers
assert "torch" not in sys.modules
print("met", job.all_reduce(job.rank == 1, op="max"))
"""


def test_ranks_by_hand_and_collectives_without_torch(sandbox: Sandbox) -> None:
    results = finish(by_hand(sandbox, WORKS + COLLECTIVES))
    works(results)
    assert ["met True" in result.out for result in results] == [True, True]
    sandbox.nothing_left()


def test_the_cluster_of_tf_config(sandbox: Sandbox) -> None:
    cluster = {"chief": [f"127.0.0.1:{free_port()}"], "worker": ["127.0.0.1:1"]}
    script, tasks = sandbox.script(WORKS), ("chief", "worker")
    configs = [json.dumps({"cluster": cluster, "task": {"type": each, "index": 0}}) for each in tasks]
    works(finish([sandbox.python(script, TF_CONFIG=config) for config in configs]))
    sandbox.nothing_left()


def test_the_other_ranks_may_start_first(sandbox: Sandbox) -> None:
    """Rank 1 looks for the secret before rank 0 has begun."""
    body = f"""
from tensorwire.launch import secret
import tensorwire as tw
wanted = secret.runtime_folder
def looking():
    print("looks")
    return wanted()
secret.runtime_folder = looking
job = tw.init(servers=1)
{WORKS}"""
    script, port = sandbox.script(body, init=False), str(free_port())
    one = sandbox.python(script, RANK="1", WORLD_SIZE="2", MASTER_PORT=port)
    one.expect("looks")
    zero = sandbox.python(script, RANK="0", WORLD_SIZE="2", MASTER_PORT=port)
    works(finish([zero, one]), servers=1)
    sandbox.nothing_left()


def test_the_other_ranks_may_start_first_on_several_machines(sandbox: Sandbox) -> None:
    """Rank 1 has the secret and waits for rank 0's coordinator; its server, which does not wait, is not there yet."""
    body = f"""
import tensorwire as tw
from tensorwire.launch import joining
wanted = joining.connect
def connect(*arguments):
    print("waits")
    return wanted(*arguments)
joining.connect = connect
job = tw.init()
{WORKS}"""
    script, secret = sandbox.script(body, init=False), sandbox.secret()
    # A way to write 127.0.0.1 that does not show that it is this machine.
    place = {"WORLD_SIZE": "2", "MASTER_ADDR": "0x7f.0.0.1", "MASTER_PORT": str(free_port())}
    one = sandbox.python(script, RANK="1", TENSORWIRE_SECRET_FILE=secret, **place)
    one.expect("waits")
    assert not any("tensorwire.launch.server_process" in command for command in sandbox.processes().values())
    zero = sandbox.python(script, RANK="0", TENSORWIRE_SECRET_FILE=secret, **place)
    works(finish([zero, one]))
    sandbox.nothing_left()


def test_slurm(sandbox: Sandbox) -> None:
    script = sandbox.script(WORKS)
    common = {"SLURM_NTASKS": "2", "SLURM_NNODES": "1", "SLURM_STEP_ID": "0", "SLURM_JOB_ID": str(free_port())}
    programs = [sandbox.python(script, SLURM_PROCID=str(r), TENSORWIRE_SERVERS="1", **common) for r in (0, 1)]
    works(finish(programs), servers=1)
    sandbox.nothing_left()


def test_arguments_of_init_and_a_second_job(sandbox: Sandbox) -> None:
    body = f"""
import tensorwire as tw
for number in range(2):
    with tw.init(rank=int(sys.argv[1]), world_size=2, rendezvous="127.0.0.1:{free_port()}", servers=1) as job:
        job.barrier()
        print("worker", job.rank, "of 2 with 1 in job", number)
"""
    script = sandbox.script(body, init=False)
    for rank, result in enumerate(finish([sandbox.python(script, str(rank)) for rank in (0, 1)])):
        assert (result.status, result.err) == (0, "")
        assert [f"worker {rank} of 2 with 1 in job {n}" in result.out for n in (0, 1)] == [True, True]
    sandbox.nothing_left()


def test_alone_and_again(sandbox: Sandbox) -> None:
    body = """
        from tensorwire.errors import ArgumentError
        try:
            tw.init()
        except ArgumentError as error:
            print("refused:", error)
        print(repr(job))
        job.close()
        job.close()
        print(repr(job))
        again = tw.init(servers=2)
        again.barrier()
        print(again.num_servers)
    """
    result = sandbox.python(sandbox.script(body)).finish()
    assert (result.status, result.err) == (0, "")
    assert "refused: init() was already called in this process; close() that job first" in result.out
    for state in ("running", "left"):
        assert f"<tensorwire.Job: worker 0 of 1, 1 server, started alone, {state}>" in result.out
    assert result.out.split()[-1] == "2"
    sandbox.nothing_left()


@pytest.mark.parametrize("name", ["TENSORWIRE_SERVER_THREADS", "TENSORWIRE_TIMEOUT"])
def test_a_setting_that_others_would_stumble_over_is_refused_first(sandbox: Sandbox, name: str) -> None:
    result = sandbox.python(sandbox.script("print('on')"), **{name: "x"}).finish()
    assert (result.status, result.out.strip()) == (1, "")
    assert result.err.splitlines()[-1].startswith(f"tensorwire.errors.ArgumentError: {name} must be a ")
    sandbox.nothing_left()


def test_python_reports_an_exception_of_a_worker_alone(sandbox: Sandbox) -> None:
    result = sandbox.python(sandbox.script("raise ValueError('x')")).finish()
    assert (result.status, result.err.count("Traceback"), result.err.splitlines()[-1]) == (1, 1, "ValueError: x")
    assert "tensorwire:" not in result.err
    sandbox.nothing_left()


def test_an_exception_ends_the_other_rank_in_one_line(sandbox: Sandbox) -> None:
    good, bad = finish(by_hand(sandbox, RAISES))
    assert bad.status == good.status == 1
    assert bad.err.splitlines()[-1] == "ValueError: broken data"
    assert bad.err.count("Traceback") == 1
    assert good.one_line() == "tensorwire: worker 0: the job ended: worker 1 raised ValueError: broken data"
    sandbox.nothing_left()


def test_a_rank_that_computes_on_without_descriptors_is_ended(sandbox: Sandbox) -> None:
    """Nobody else would end it, and what its end needs besides cannot be had."""
    body = """
        import resource
        if job.rank == 0:
            resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
            try:
                while True:
                    os.dup(0)
            except OSError:
                pass
        job.barrier()
        if job.rank == 1:
            raise ValueError("bad data")
        while True:
            time.sleep(0.01)
    """
    results = finish(by_hand(sandbox, body))
    assert [result.status for result in results] == [1, 1]
    sandbox.all_gone()  # rank 0 could not wait for what it had started
    sandbox.nothing_left()


@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_rank_ends_the_other_and_leaves_nothing(sandbox: Sandbox, victim: int) -> None:
    """Rank 0 has the coordinator as its child, and each rank a server: they must not stay behind."""
    programs = by_hand(sandbox, f"job.barrier(); print('ready')\n{WAITS}")
    for program in programs:
        program.expect("ready")
    programs[victim].signal(signal.SIGKILL)
    survivor = programs[1 - victim].finish()
    assert survivor.status == 1
    told = f"worker {victim} is gone: its connection closed without a word"
    assert survivor.one_line() == f"tensorwire: worker {1 - victim}: the job ended: {told}"
    sandbox.all_gone()
    programs[victim].finish()
    sandbox.nothing_left()


def test_a_rank_that_fails_before_the_others_joined(sandbox: Sandbox) -> None:
    """Rank 1 joins as nobody; rank 0 waits, and hears of it as soon as it is interrupted itself."""
    script, port = sandbox.script("job.barrier()"), str(free_port())
    zero = sandbox.python(script, RANK="0", WORLD_SIZE="2", MASTER_PORT=port)
    one = sandbox.python(script, RANK="4", WORLD_SIZE="5", MASTER_PORT=port).finish()
    assert one.err.splitlines()[-1].startswith("tensorwire.errors.ProtocolError: this job has no worker 4")
    zero.signal(signal.SIGINT)
    result = zero.finish()
    assert result.status == -signal.SIGINT
    assert result.err.splitlines()[-1] == "KeyboardInterrupt"
    sandbox.nothing_left()


def test_a_rank_that_ends_early_does_not_take_its_server_along(sandbox: Sandbox) -> None:
    """Rank 1 is done; its server and rank 0's coordinator serve on until rank 0 is done too."""
    body = """
        import socket
        job.barrier()
        if job.rank == 0:
            print("waits")
            server = socket.create_server(("127.0.0.1", int(os.environ["GATE"])))
            server.accept()
            job._worker.member.card("server 1")
            print("server 1 is there")
    """
    gate = free_port()
    script, port = sandbox.script(body), str(free_port())
    common = {"WORLD_SIZE": "2", "MASTER_PORT": port, "GATE": str(gate)}
    zero, one = (sandbox.python(script, RANK=str(r), **common) for r in (0, 1))
    zero.expect("waits")
    assert any("tensorwire.launch.server_process" in command for command in sandbox.processes().values())
    while one.process.poll() is None:
        with contextlib.suppress(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", gate)).close()
            break
    for result in finish([zero, one]):
        assert (result.status, result.err) == (0, "")
    assert "server 1 is there" in zero.finish().out
    sandbox.nothing_left()


def test_a_busy_rendezvous_port_is_one_line(sandbox: Sandbox) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = str(other.getsockname()[1])
        result = sandbox.python(sandbox.script(""), RANK="0", WORLD_SIZE="2", MASTER_PORT=port).finish()
    told = f"the coordinator cannot listen on 127.0.0.1:{port}: Address already in use"
    assert result.err.splitlines()[-1] == f"tensorwire.errors.ControlError: {told}"
    sandbox.nothing_left()


def test_several_machines_need_a_secret_file(sandbox: Sandbox) -> None:
    result = sandbox.python(sandbox.script(""), RANK="0", WORLD_SIZE="2", MASTER_ADDR="10.0.0.1").finish()
    assert result.status == 1
    assert "tensorwire.errors.ArgumentError: a job on several machines needs a secret they share" in result.err
    sandbox.nothing_left()


# ---- torchrun: each of its processes imports torch


def torchrun(sandbox: Sandbox, body: str) -> Program:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    return sandbox.start(*command, sandbox.script(body), OMP_NUM_THREADS="1")


@pytest.mark.slow
def test_torchrun(sandbox: Sandbox) -> None:
    """Collectives, a process group beside the store of its agent, and a second job."""
    body = """
        import torch
        from torch import distributed
        job.barrier()
        print("worker", job.rank, "of", job.num_workers, "with", job.num_servers, "local", job.local_rank)
        print("met", job.broadcast("both"), job.all_reduce(1))
        assert os.environ["TORCHELASTIC_USE_AGENT_STORE"] == "True"
        job.init_process_group()
        total = torch.full((3,), float(job.rank + 1))
        distributed.all_reduce(total)
        print("sum", *total.tolist(), distributed.get_backend())
        job.close()
        job = tw.init(servers=1)
        job.barrier()
        print("again", job.rank, job.num_servers)
    """
    result = torchrun(sandbox, body).finish()
    assert result.status == 0, result.err
    assert sorted(line for line in result.out.splitlines() if line.startswith(("worker", "again", "met", "sum"))) == [
        "again 0 1",
        "again 1 1",
        *["met both 2"] * 2,
        *["sum 3.0 3.0 3.0 gloo"] * 2,
        "worker 0 of 2 with 2 local 0",
        "worker 1 of 2 with 2 local 1",
    ]
    sandbox.nothing_left()


@pytest.mark.slow
def test_an_exception_under_torchrun(sandbox: Sandbox) -> None:
    result = torchrun(sandbox, RAISES).finish()
    assert result.status == 1
    assert result.err.count("ValueError: broken data\n") == 2  # in the traceback, and on the other rank
    assert "tensorwire: worker 0: the job ended: worker 1 raised ValueError: broken data" in result.err
    sandbox.all_gone()
    sandbox.nothing_left()


@pytest.mark.slow
def test_an_interrupt_under_torchrun(sandbox: Sandbox) -> None:
    program = torchrun(sandbox, f"job.barrier(); print('ready', job.rank)\n{WAITS}")
    program.expect("ready 0", "ready 1")
    program.signal(signal.SIGINT)
    assert program.finish().status != 0
    sandbox.all_gone()
    sandbox.nothing_left()
