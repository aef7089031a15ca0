"""Jobs that ``DMLC_`` variables start: the same command in every process, as MXNet's own launcher runs it."""

from __future__ import annotations

import signal

import pytest

from tests import fixtures
from tests.harness.sandbox import Program, Result, Sandbox, free_port
from tests.levels import mostly_long

sandbox = fixtures.sandbox

# Says when the process waits for a scheduler.
LOOKS = """
from tensorwire.control import address
from tensorwire.launch import secret
def saying(wanted):
    def call(*arguments):
        print("looks")
        return wanted(*arguments)
    return call
secret.runtime_folder = saying(secret.runtime_folder)
address.await_name = saying(address.await_name)
"""
BEGINS = """
import tensorwire.mxnet
import mxnet as mx
print("left", [name for name in os.environ if name.startswith("DMLC_")])
kv = mx.kv.create("dist_tensorwire_sync")
out = mx.nd.zeros((4,))
kv.init("key", out)
"""
TRAINS = f"""
{BEGINS}
kv.push("key", mx.nd.ones((4,)) * (kv.rank + 1))
kv.pull("key", out=out)
print("worker", kv.rank, "of", kv.num_workers, "has", out.asnumpy().tolist())
"""
# Worker 1 is there and does nothing; worker 0 waits for its push.
WAITS = f"""
{BEGINS}
kv.barrier()
print("waits")
if kv.rank == 1:
    kv._worker.member.client.lookup("nothing", 600.0)
kv.push("key", out)
kv.pull("key", out=out)
kv.barrier()
"""


class Cluster:
    """The processes of a job of two workers, which run one script."""

    def __init__(self, sandbox: Sandbox, body: str, servers: int = 1, **common: str) -> None:
        self._sandbox, self._script = sandbox, sandbox.script(body, init=False)
        self.common = {
            "DMLC_PS_ROOT_URI": "127.0.0.1",
            "DMLC_PS_ROOT_PORT": str(free_port()),
            "DMLC_NUM_WORKER": "2",
            "DMLC_NUM_SERVER": str(servers),
            **common,
        }

    def start(self, role: str, **variables: str) -> Program:
        return self._sandbox.python(self._script, **{**self.common, "DMLC_ROLE": role, **variables})


def has_worked(workers: list[Result], others: list[Result]) -> None:
    """Every process ended well, and each worker had a rank of its own and the sum of what both pushed."""
    assert [(result.status, result.err) for result in (*workers, *others)] == [(0, "")] * (2 + len(others))
    assert all("left []" in result.out for result in workers)
    lines = sorted(line for result in workers for line in result.out.splitlines() if line.startswith("worker"))
    assert lines == [f"worker {rank} of 2 has [3.0, 3.0, 3.0, 3.0]" for rank in (0, 1)]
    assert not any("left" in result.out for result in others)  # the script went on in no other process


@pytest.mark.parametrize(
    "order",
    mostly_long(
        ["scheduler server worker worker", "worker server scheduler worker", "server worker worker scheduler"],
        ["worker server scheduler worker"],
    ),
)
def test_the_roles_start_in_any_order(sandbox: Sandbox, order: str) -> None:
    cluster, programs = Cluster(sandbox, LOOKS + TRAINS), []
    for role in order.split():
        programs.append((role, cluster.start(role)))
        if not any(role == "scheduler" for role, _ in programs):
            programs[-1][1].expect("looks")
    ended = [(role, program.finish()) for role, program in programs]
    has_worked([r for role, r in ended if role == "worker"], [r for role, r in ended if role != "worker"])
    sandbox.nothing_left()


def test_numbers_that_the_launcher_gives(sandbox: Sandbox) -> None:
    """As MXNet's local launcher counts: the workers first, and then the servers."""
    cluster = Cluster(sandbox, TRAINS, servers=2)
    workers = [
        cluster.start("worker", DMLC_TASK_ID="1"),
        cluster.start("worker", DMLC_TASK_ID="1", DMLC_WORKER_ID="0"),  # which is more exact
    ]
    others = [
        cluster.start("server", DMLC_TASK_ID="2", DMLC_SERVER_ID="1"),
        cluster.start("server", DMLC_TASK_ID="3", DMLC_SERVER_ID="0"),
        cluster.start("scheduler"),
    ]
    results = [program.finish() for program in workers]
    assert ["worker 1 of 2" in results[0].out, "worker 0 of 2" in results[1].out] == [True, True]
    has_worked(results, [program.finish() for program in others])
    sandbox.nothing_left()


def test_several_machines_share_a_file(sandbox: Sandbox) -> None:
    # A way to write 127.0.0.1 that does not show that it is this machine.
    there = {"DMLC_PS_ROOT_URI": "0x7f.0.0.1", "TENSORWIRE_SECRET_FILE": sandbox.secret()}
    cluster = Cluster(sandbox, LOOKS + TRAINS, **there)
    early = [cluster.start("worker"), cluster.start("server")]
    for program in early:
        program.expect("looks")
    worker, scheduler = cluster.start("worker"), cluster.start("scheduler")
    first, server, second, last = (program.finish() for program in (*early, worker, scheduler))
    has_worked([first, second], [server, last])
    sandbox.nothing_left()


@pytest.mark.parametrize("killed", mostly_long(["worker 1", "server 0"], ["worker 1"]))
def test_a_killed_process_ends_all_others_with_one_message(sandbox: Sandbox, killed: str) -> None:
    cluster = Cluster(sandbox, WAITS)
    scheduler = cluster.start("scheduler")
    programs = {"server 0": cluster.start("server")}
    programs |= {f"worker {rank}": cluster.start("worker", DMLC_WORKER_ID=str(rank)) for rank in (0, 1)}
    for name in ("worker 0", "worker 1"):
        programs[name].expect("waits")
    victim = programs.pop(killed)
    victim.signal(signal.SIGKILL)
    assert victim.finish().status == -signal.SIGKILL
    ended = scheduler.finish()
    assert ended.one_line() == f"tensorwire: {killed} is gone: its connection closed without a word"
    others = [program.finish() for program in programs.values()]
    assert [ended.status, *((result.status, result.err) for result in others)] == [1, (1, ""), (1, "")]
    sandbox.nothing_left()


def test_an_exception_is_printed_once(sandbox: Sandbox) -> None:
    body = f'{BEGINS}\nkv.barrier()\nif kv.rank == 1:\n    raise ValueError("broken data")\nkv.barrier()'
    cluster = Cluster(sandbox, body)
    programs = [cluster.start(role) for role in ("scheduler", "server", "worker", "worker")]
    scheduler, *others = (program.finish() for program in programs)
    assert scheduler.message().startswith("tensorwire: worker 1 raised ValueError: broken data\nTraceback ")
    assert [scheduler.status, *((r.status, r.err) for r in others)] == [1, *[(1, "")] * 3]
    sandbox.nothing_left()


def test_who_is_too_many_is_refused_and_a_signal_ends_the_job(sandbox: Sandbox) -> None:
    cluster = Cluster(sandbox, WAITS)
    scheduler, *others = (cluster.start(role) for role in ("scheduler", "server", "worker", "worker"))
    for worker in others[1:]:
        worker.expect("waits")
    where = f"the job at 127.0.0.1:{cluster.common['DMLC_PS_ROOT_PORT']}"
    refused: list[tuple[dict[str, str], str]] = [
        ({}, f"all 2 workers have come to {where} before: two jobs at one place?"),
        (
            {"DMLC_WORKER_ID": "1"},
            f"worker 1 has come to {where} before: two jobs at one place?",
        ),
        (
            {"DMLC_NUM_WORKER": "5", "DMLC_WORKER_ID": "4"},
            "the scheduler runs a job of 2 workers and 1 servers, not of 5 and 1: give all processes the "
            "same DMLC_NUM_WORKER and DMLC_NUM_SERVER",
        ),
    ]
    late = [cluster.start("worker", **variables) for variables, _ in refused]
    for program, (_, message) in zip(late, refused, strict=True):
        result = program.finish()
        assert (result.status, result.out.strip()) == (1, "")
        assert result.err.splitlines()[-1] == f"tensorwire.errors.ArgumentError: {message}"
    scheduler.signal(signal.SIGTERM)
    ended = scheduler.finish()
    assert (ended.status, ended.one_line()) == (128 + signal.SIGTERM, "tensorwire: SIGTERM ended the job")
    assert [(r.status, r.err) for r in (program.finish() for program in others)] == [(1, "")] * 3
    sandbox.nothing_left()


def test_a_process_that_never_joins_ends_the_job(sandbox: Sandbox) -> None:
    body = f"""
import tensorwire.mxnet
from tensorwire.mxnet import dmlc
sys.exit(dmlc.run_scheduler(dmlc.Process("scheduler", "127.0.0.1:{free_port()}", 1, 1, None), 0.25))
"""
    result = sandbox.python(sandbox.script(body, init=False)).finish()
    message = "tensorwire: worker 0 did not join the job within 0.25 s: was it started, and did it end?"
    assert (result.status, result.one_line()) == (1, message)
    sandbox.nothing_left()


def test_a_launcher_of_ours_wins(sandbox: Sandbox) -> None:
    script = sandbox.script(TRAINS, init=False)
    result = sandbox.run(script, DMLC_ROLE="server", DMLC_NUM_WORKER="7").finish()
    assert (result.status, result.err) == (0, "")
    for rank in (0, 1):
        assert f"worker {rank} of 2 has [3.0, 3.0, 3.0, 3.0]" in result.out
    assert result.out.count("left []") == 2
    sandbox.nothing_left()


WRONG = [
    ({"DMLC_ROLE": "boss"}, "DMLC_ROLE must be scheduler, server or worker, not 'boss'"),
    ({"DMLC_ROLE": ""}, "DMLC_ROLE is not set"),
    ({"DMLC_PS_ROOT_URI": ""}, "DMLC_PS_ROOT_URI is not set"),
    ({"DMLC_PS_ROOT_PORT": ""}, "DMLC_PS_ROOT_PORT is not set"),
    ({"DMLC_PS_ROOT_PORT": "http"}, "DMLC_PS_ROOT_PORT must be a whole number, not 'http'"),
    ({"DMLC_PS_ROOT_PORT": "65536"}, "DMLC_PS_ROOT_PORT must be at most 65535, not 65536"),
    ({"DMLC_NUM_WORKER": "0"}, "DMLC_NUM_WORKER must be at least 1, not 0"),
    ({"DMLC_NUM_SERVER": "-1"}, "DMLC_NUM_SERVER must be at least 1, not -1"),
    ({"DMLC_NUM_SERVER": "99999"}, "DMLC_NUM_SERVER: at most 65536, not 99999"),
    ({"DMLC_WORKER_ID": "2"}, "DMLC_WORKER_ID must be from 0 to 1, because there are 2, not 2"),
    ({"DMLC_TASK_ID": "-1"}, "DMLC_TASK_ID must be from 0 to 1, because there are 2, not -1"),
    ({"DMLC_PS_ROOT_URI": "10.0.0.1"}, "a job on several machines needs a secret they share"),
    ({"DMLC_PS_ROOT_URI": "10.0.0.1", "DMLC_ROLE": "scheduler"}, "a job on several machines needs a secret"),
]


def test_wrong_variables_are_refused_at_once(sandbox: Sandbox) -> None:
    cluster = Cluster(sandbox, TRAINS)
    programs = [cluster.start("worker", **variables) for variables, _ in WRONG]
    for program, (_, message) in zip(programs, WRONG, strict=True):
        result = program.finish()
        assert (result.status, result.out.strip()) == (1, "")
        assert f"\ntensorwire.errors.ArgumentError: {message}" in result.err
    sandbox.nothing_left()


def test_mxnet_must_not_have_come_before(sandbox: Sandbox) -> None:
    body = f"import numpy\nvars(numpy)['bool'] = bool\nimport mxnet\n{TRAINS}"
    result = Cluster(sandbox, body).start("worker").finish()
    assert (result.status, result.out.strip()) == (1, "")
    assert "ArgumentError: import tensorwire.mxnet before mxnet: " in result.err.splitlines()[-1]
