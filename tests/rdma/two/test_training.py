"""A job on two machines: a worker and the server in this guest, another worker in the second. It trains, bit for bit as
over tcp, and it ends as it should when the other machine dies or the link goes."""

from __future__ import annotations

import secrets
import signal
import subprocess
import time
from collections.abc import Iterator
from typing import Any

import pytest

from tensorwire.control import Coordinator
from tests.rdma.two.capture import Capture
from tests.rdma.two.conftest import Far
from tests.rdma.two.roles import Roles
from tests.rdma.two.training import CUT_AT, STEPS, Trained
from tests.rdma.wire import FAR

pytestmark = [pytest.mark.usefixtures("warmed"), pytest.mark.timeout(300)]
SERVER = 0  # the place of processes in this guest
LOSS = ("tc", "qdisc", "replace", "dev", "eth0", "root", "netem", "loss", "2%")
NO_LOSS = ("tc", "qdisc", "delete", "dev", "eth0", "root")
READS = 400
PUSHES = 100
PARAMETERS = 64 * 256 + 256 + 256 * 10 + 10


class Job:
    """One job on both guests."""

    def __init__(self, far: Far, device: str, **options: int) -> None:
        self._far = far
        secret = secrets.token_hex(32)
        self.coordinator = Coordinator(secret.encode(), workers=2, servers=1, interface=FAR[0])
        self.here = Roles()
        common = (self.coordinator.address, secret, device, 2)
        self.here.start_server(*common)
        reads = options.get("reads")
        names = [options.get(name, 0) for name in ("cut", "die")]
        arguments = ("train_and_read", reads) if reads else ("train", *names)
        if pushes := options.get("pushes"):
            arguments = ("read_and_push_files", pushes)
        self.here.start_worker(*common, 0, *arguments)
        far.call("start_worker", *common, 1, *arguments)

    def results(self) -> list[tuple[str, Any]]:
        """What both workers say, when all is over."""
        found = self.here.results() + self._far.call("worker_results")
        self.coordinator.close()
        return found


def trained(far: Far, device: str) -> list[Trained]:
    """What the workers of a job say in which nothing failed."""
    job = Job(far, device)
    results = job.results()
    assert [error for error, _ in results] == ["", ""], results
    assert job.coordinator.cause is None
    return [result for _, result in results]


@pytest.fixture(scope="module")
def over_tcp(far: Far, warmed: None) -> str:
    """The parameters that training over tcp ends with."""
    first, second = trained(far, "tcp")
    assert first.digest == second.digest
    assert first.loss < 1.5
    print(f"\nover tcp: parameters {first.digest[:16]}, loss {first.loss:.3f}")
    return first.digest


def test_training_is_the_same_as_over_tcp_and_its_tensors_go_by_rdma(far: Far, over_tcp: str) -> None:
    with Capture("eth0") as seen:
        results = trained(far, "verbs")
    assert {(result.digest, result.route) for result in results} == {(over_tcp, "verbs")}
    sent = results[1].payload  # by the worker in the second guest: gradients, to the server in this one
    assert sent >= STEPS * 4 * PARAMETERS
    print(
        f"\nover verbs: parameters {results[0].digest[:16]}; the other worker handed {sent} bytes to its device;"
        f" on the cable: {dict(seen.bytes)}"
    )
    assert seen.lost == 0
    assert seen.bytes["roce", "in"] >= sent
    assert seen.bytes["roce", "out"] >= STEPS * 4 * PARAMETERS
    # The control connections' own words, in all of the job; not even one step's tensors are among them.
    assert seen.bytes["tcp", "in"] + seen.bytes["tcp", "out"] < 4 * PARAMETERS


@pytest.fixture
def lossy(far: Far) -> Iterator[None]:
    """Each side loses 2 % of what it sends."""
    subprocess.run(LOSS, check=True)
    far.call("run", *LOSS)
    yield
    subprocess.run(NO_LOSS, check=True)
    far.call("run", *NO_LOSS)


def test_training_is_the_same_where_packets_are_lost(far: Far, over_tcp: str, lossy: None) -> None:
    results = trained(far, "verbs")
    assert {(result.digest, result.route) for result in results} == {(over_tcp, "verbs")}
    shown = subprocess.run(["tc", "-s", "qdisc", "show", "dev", "eth0"], capture_output=True, text=True).stdout
    dropped = int(shown.split("dropped ")[1].split(",")[0])
    print(f"\nwith loss: parameters {results[0].digest[:16]}; {dropped} packets of this side were lost")
    assert dropped > 0


def test_a_reader_on_the_other_machine_reads_no_torn_version(far: Far) -> None:
    job = Job(far, "auto", reads=READS)
    (_, nothing), (error, read) = job.results()
    assert (nothing, error) == (None, "")
    print(f"\n{read}")
    assert (read.route, read.reads) == ("verbs", READS)
    assert read.versions > READS // 20
    assert job.coordinator.cause is None


def test_a_process_on_the_other_machine_reads_files_and_pushes_by_writing(far: Far) -> None:
    job = Job(far, "auto", pushes=PUSHES)
    (_, nothing), (error, read) = job.results()
    assert (nothing, error) == (None, "")
    print(f"\n{read}")
    assert (read.route, read.reads) == ("verbs", PUSHES)
    assert read.versions > 2
    assert job.coordinator.cause is None


def test_a_killed_worker_on_the_other_machine_ends_the_job_here(far: Far) -> None:
    job = Job(far, "verbs", die=STEPS // 2)
    assert far.call("worker_ended") == -signal.SIGKILL
    start = time.monotonic()
    assert job.here.ended(SERVER) != 0
    print(f"\nkill -9: the job had ended here {time.monotonic() - start:.2f} s after the other worker")
    (mine, _), (theirs, _) = job.results()
    assert theirs == "died"
    assert "worker 1" in mine
    assert job.coordinator.cause is not None
    assert job.coordinator.cause.who == "worker 1"


def test_a_cut_cable_ends_the_job_on_both_machines(far: Far) -> None:
    job = Job(far, "verbs", cut=STEPS // 2)
    job.coordinator.ended.wait(60.0)
    seconds = time.monotonic() - float(CUT_AT.read_text())
    assert job.coordinator.cause is not None
    print(f"\nlink down: the job had ended here {seconds:.2f} s later: {job.coordinator.cause}")
    assert job.here.ended(SERVER) != 0
    subprocess.run(["ip", "link", "set", "eth0", "up"], check=True)  # for the agent's connection
    (mine, _), (theirs, _) = job.results()
    assert mine
    assert theirs
