"""Who is in a job, and what a member that breaks the rules brings about."""

from __future__ import annotations

import contextlib
import os
import queue

import pytest

from tensorwire.control import Cause, Client, Member, frames
from tensorwire.errors import JobEnded, PeerLost, ProtocolError, RemoteAccessError, TensorwireError, WaitTimeout
from tensorwire.testing.patience import patient
from tests.control import wire
from tests.control.conftest import SECRET, Jobs


@pytest.mark.parametrize(
    ("role", "index"), [("worker", 2), ("worker", -1), ("server", 1), ("boss", 0), ("launcher", -1), ("worker", 2**63)]
)
def test_an_identity_that_the_job_does_not_have(jobs: Jobs, role: str, index: int) -> None:
    coordinator = jobs.coordinator(workers=2, servers=1)
    with pytest.raises(ProtocolError) as caught:
        Client(coordinator.address, SECRET, role, index)
    assert f"this job has no {role} {index}" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert coordinator.members == []


def test_a_rank_joins_once(jobs: Jobs) -> None:
    coordinator = jobs.coordinator()
    jobs.client(coordinator, "worker", 1)
    with pytest.raises(ProtocolError, match="worker 1 is already in this job"):
        Client(coordinator.address, SECRET, "worker", 1)
    assert not coordinator.ended.is_set()
    assert coordinator.members == ["worker 1"]


def test_who_has_left_does_not_come_again(jobs: Jobs) -> None:
    coordinator = jobs.coordinator()
    member = jobs.client(coordinator)
    jobs.client(coordinator, "worker", 1)
    member.close(goodbye=True)
    with pytest.raises(ProtocolError, match="worker 0 has left this job"):
        Client(coordinator.address, SECRET, "worker", 0)


def test_another_version_is_refused(jobs: Jobs) -> None:
    with wire.authenticated(jobs.coordinator()) as sock:
        sock.sendall(frames.encode(frames.Join(frames.VERSION + 1, "worker", 0, 1, "host")))
        answer = wire.receive(sock)
        assert answer.type == "ProtocolError"
        assert answer.error == f"this job speaks control version {frames.VERSION}, not {frames.VERSION + 1}"
        assert wire.ends(sock)


def test_the_first_frame_is_a_join(jobs: Jobs) -> None:
    coordinator = jobs.coordinator()
    with wire.authenticated(coordinator) as sock:
        sock.sendall(frames.encode(frames.Publish(1, "key", b"value")))
        assert wire.receive(sock).error == "the first frame must be a join"
        assert wire.ends(sock)
    assert not coordinator.ended.is_set()


def test_joining_after_the_end_raises_its_cause(jobs: Jobs) -> None:
    coordinator = jobs.coordinator()
    coordinator.end(Cause("worker 1", "ran out of data"))
    with pytest.raises(JobEnded, match="worker 1 ran out of data"):
        Client(coordinator.address, SECRET, "worker", 0)


BROKEN = {
    "length 0": bytes(4),
    "length above the limit": b"\xff\xff\xff\xff",
    "not msgpack": b"\x00\x00\x00\x01\xc1",
    "unknown kind": b"\x00\x00\x00\x0a\x81\xa4kind\xa3fly",
    "a second join": frames.encode(frames.Join(1, "worker", 0, 1, "h")),
    "an answer": frames.encode(frames.Answer(1)),
    "a welcome": frames.encode(frames.Welcome("", 0, 1, 1, 1.0, 10.0)),
    "an end": frames.encode(frames.End()),
}


@pytest.mark.parametrize("what", BROKEN)
def test_a_member_that_breaks_the_protocol_ends_the_job_by_name(jobs: Jobs, what: str) -> None:
    coordinator = jobs.coordinator()
    other = jobs.client(coordinator, "worker", 1)
    with wire.joined(coordinator) as sock:
        sock.sendall(BROKEN[what])
        assert other.ended.wait()
    assert other.cause is not None
    assert other.cause.who == "worker 0"
    assert other.cause.what.startswith("broke the control protocol: ")
    with pytest.raises(JobEnded, match="worker 0 broke"):
        other.lookup("anything")


def test_a_frame_cut_off_is_a_member_that_is_gone(jobs: Jobs) -> None:
    coordinator = jobs.coordinator()
    other = jobs.client(coordinator, "worker", 1)
    with wire.joined(coordinator) as sock:
        sock.sendall(frames.encode(frames.Publish(1, "key", b"value"))[:-1])
    assert other.ended.wait()
    assert str(other.cause) == "worker 0 is gone: its connection closed without a word"


def test_the_job_ends_well_when_every_worker_has_left(jobs: Jobs) -> None:
    causes: list[Cause | None] = []
    coordinator = jobs.coordinator(on_end=causes.append)
    server, first, second = (jobs.client(coordinator, r, i) for r, i in [("server", 0), ("worker", 0), ("worker", 1)])
    first.close(goodbye=True)
    assert not coordinator.ended.is_set()
    second.bye()
    assert server.ended.wait()
    assert second.ended.wait()
    assert server.cause is None
    with pytest.raises(JobEnded, match="the job has ended"):
        server.lookup("store")
    coordinator.close()
    assert causes == [None]


def test_an_orderly_leave_is_known_before_the_process_exit(jobs: Jobs) -> None:
    """A goodbye and the launcher's report come by different ways, in any order."""
    coordinator = jobs.coordinator(workers=1)
    member = jobs.client(coordinator)
    coordinator.left("worker", 0, 0)  # before the goodbye was read
    member.close(goodbye=True)
    assert coordinator.ended.wait()
    assert coordinator.cause is None


def test_the_last_words_win_over_the_exit_status(jobs: Jobs) -> None:
    coordinator = jobs.coordinator()
    member = jobs.client(coordinator)
    coordinator.left("worker", 0, 1)
    member.fail(Cause("worker 0", "raised ValueError: x", "Traceback"))
    assert coordinator.ended.wait()
    assert coordinator.cause == Cause("worker 0", "raised ValueError: x", "Traceback")


def test_a_failure_after_an_orderly_leave_does_not_overtake_the_goodbyes_of_others(jobs: Jobs) -> None:
    coordinator = jobs.coordinator()
    first, second = jobs.client(coordinator), jobs.client(coordinator, "worker", 1)
    second.close(goodbye=True)
    coordinator.left("worker", 1, 1)
    first.bye()
    assert coordinator.ended.wait()
    assert coordinator.cause is None


@pytest.mark.parametrize(
    ("status", "how"),
    [
        (3, "worker 1 exited with status 3"),
        (-9, "worker 1 was killed by SIGKILL"),
        (-40, "worker 1 was killed by signal 40"),
        (0, "worker 1 exited without joining the job: its script has to call tensorwire.init()"),
    ],
)
def test_a_process_that_ends_before_everyone_joined_ends_the_job(jobs: Jobs, status: int, how: str) -> None:
    coordinator = jobs.coordinator()
    member = jobs.client(coordinator)
    coordinator.left("worker", 1, status)
    with pytest.raises(JobEnded):
        member.barrier("joined", 2)
    assert str(member.cause) == how


@pytest.mark.parametrize(
    ("status", "told"),
    [(-11, "was killed by SIGSEGV"), (None, "is gone: its connection closed without a word")],
)
def test_a_better_account_replaces_a_second_hand_one(jobs: Jobs, status: int | None, told: str) -> None:
    """That a process is gone is one, too, without a launcher that knows how it ended."""
    coordinator = jobs.coordinator()
    first, second = jobs.client(coordinator), jobs.client(coordinator, "worker", 1)
    second.fail(Cause("worker 1", "lost worker 0", settle=1000.0))
    second.barrier("mine", 1)  # so it was heard
    first.close()  # gone without a word
    if status is not None:
        coordinator.left("worker", 0, status)
    assert second.ended.wait()
    assert str(second.cause) == f"worker 0 {told}"


def test_a_failure_of_any_size_is_reported(jobs: Jobs) -> None:
    coordinator = jobs.coordinator()
    first, second = jobs.client(coordinator), jobs.client(coordinator, "worker", 1)
    first.fail(Cause("worker 0", "raised OSError: \udcff" + "x" * 3_000_000, "t\n" * 3_000_000))
    assert second.ended.wait()
    assert second.cause is not None
    assert second.cause.what.startswith("raised OSError: ?x")


def test_nobody_listens() -> None:
    with pytest.raises(PeerLost, match=r"no coordinator answers at 127.0.0.1:1 \(Connection refused\)"):
        Client("127.0.0.1:1", SECRET, "worker", 0)
    with pytest.raises(PeerLost, match="cannot find the coordinator's machine"):
        Client("no.such.host.invalid:1", SECRET, "worker", 0)


def test_a_forked_child_does_not_keep_the_connection_open(jobs: Jobs) -> None:
    """A data loader that outlives its killed worker must not hide that death."""
    coordinator = jobs.coordinator()
    member = jobs.client(coordinator)
    other = jobs.client(coordinator, "worker", 1)
    hold, release = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(release)
        os.read(hold, 1)
        os._exit(0)
    os.close(hold)
    try:
        member.close()
        assert other.ended.wait()
        assert str(other.cause).startswith("worker 0 is gone")
    finally:
        os.close(release)
        os.waitpid(child, 0)


@pytest.mark.parametrize("error", [PeerLost("gone"), RemoteAccessError("no open region has that key")])
def test_a_peer_that_is_gone_or_closed_its_memory_is_explained_by_the_end_of_the_job(
    jobs: Jobs, error: TensorwireError
) -> None:
    coordinator = jobs.coordinator(workers=2, servers=0)
    member = Member(coordinator.address, SECRET, "worker", 0, device="tcp")
    try:
        other = jobs.client(coordinator, index=1)
        other.fail(Cause("worker 1", "raised OutOfMemory: no room"))
        explained = member.explain(error)
        assert isinstance(explained, JobEnded)
        assert "no room" in str(explained)
        assert member.explain(WaitTimeout("late")).args == ("late",)
    finally:
        member.close()


@pytest.mark.parametrize("device", ["shm", "tcp"])
def test_a_peer_that_is_lost_is_named_as_people_know_it(jobs: Jobs, device: str) -> None:
    coordinator = jobs.coordinator()
    address = coordinator.address
    with contextlib.ExitStack() as members:
        first, second = (Member(address, SECRET, "worker", i, device=device) for i in range(2))
        members.callback(first.close)
        members.callback(second.close)
        channel, lost = first.channel("worker 1"), queue.SimpleQueue[str]()
        channel.on_lost(lost.put)
        second.devices[device].close()
        assert lost.get(timeout=patient(60.0)).startswith(f"{device}: worker 1 is lost: ")


def test_a_wait_in_a_step_is_told_only_where_it_is_long(jobs: Jobs, monkeypatch: pytest.MonkeyPatch) -> None:
    member = Member(jobs.coordinator().address, SECRET, "worker", 0, device="tcp")
    told: list[tuple[str, str, float]] = []
    monkeypatch.setattr(
        member.client, "waits", lambda place="", whom="", seconds=0.0: told.append((place, whom, seconds))
    )

    class Late:
        def __init__(self, seconds: float) -> None:
            self.left = seconds

        def __call__(self, timeout: float) -> None:
            self.left -= timeout
            if self.left > 0:
                raise WaitTimeout("a signal did not reach 1")

    def place() -> tuple[str, str]:
        return "step 1 of store/0", ""

    try:
        member.wait(Late(1.0), 40.0, place)
        with pytest.raises(WaitTimeout, match="a signal did not reach 1"):
            member.wait(Late(9.0), 1.0, place)
        assert told == []
        member.wait(Late(9.0), 40.0, place)
        assert told == [("step 1 of store/0", "", 2.0), ("", "", 0.0)]
        with pytest.raises(WaitTimeout, match="worker 0 has waited 40 s in step 1 of store/0 for another worker"):
            member.wait(Late(90.0), 40.0, place)
        assert told[2:] == told[:2]
    finally:
        member.close()
