"""The address book, barriers and comparisons, through real connections."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial

import pytest

from tensorwire.control import Client, Coordinator, frames, waits
from tensorwire.errors import AlreadyPublished, JobEnded, PlanMismatch, ProtocolError, RemoteAccessError, WaitTimeout
from tensorwire.observe import counters
from tests.control.conftest import Jobs
from tests.harness.sandbox import every


@pytest.fixture
def pair(jobs: Jobs) -> tuple[Coordinator, Client, Client]:
    """A job of two workers and a server, the workers there."""
    coordinator = jobs.coordinator(workers=2, servers=1)
    return coordinator, jobs.client(coordinator), jobs.client(coordinator, "worker", 1)


Pair = tuple[Coordinator, Client, Client]


def test_what_was_published_is_found(pair: Pair) -> None:
    _, first, second = pair
    first.publish("key", b"value")
    assert second.lookup("key") == b"value"
    assert first.lookup("key") == b"value"


def test_a_lookup_waits_for_the_publication(pair: Pair) -> None:
    _, first, second = pair

    def publish() -> None:
        while not second._pending:  # the lookup is on its way
            pass
        first.publish("key", b"late")

    found, _ = every([partial(second.lookup, "key"), publish])
    assert found == b"late"


def test_an_entry_is_published_once(pair: Pair) -> None:
    _, first, second = pair
    first.publish("key", b"value")
    for member in (first, second):
        with pytest.raises(AlreadyPublished, match="'key' was published before"):
            member.publish("key", b"other")
    assert second.lookup("key") == b"value"


def test_who_asks_may_say_whose_entry_it_takes(pair: Pair, jobs: Jobs) -> None:
    coordinator, _, second = pair
    server = jobs.client(coordinator, "server", 0)
    second.publish("store/0", b"x" * (2 * frames.PART_BYTES))
    assert server.lookup("store/0", owner="worker 1") == b"x" * (2 * frames.PART_BYTES)
    with pytest.raises(RemoteAccessError, match="'store/0' was published by worker 1, which only worker 0 may do"):
        server.lookup("store/0", owner="worker 0")


def test_what_all_servers_need_no_more_is_gone(jobs: Jobs) -> None:
    coordinator = jobs.coordinator(workers=1, servers=2)
    worker, *servers = (jobs.client(coordinator, *who) for who in (("worker", 0), ("server", 0), ("server", 1)))
    for key in ("store/1", "store/1/server 0", "store/10"):
        worker.publish(key, b"value")
    for server in servers:
        assert server.lookup("store/1/server 0") == b"value"  # the other one may still need it
        server.forget("store/1")
        with pytest.raises(RemoteAccessError, match="'store/1/server 9' is over"):
            server.lookup("store/1/server 9")
    while coordinator._book._entries.keys() != {"store/10"}:
        pass
    assert worker.lookup("store/10") == b"value"


def test_an_entry_for_some_is_refused_to_others(pair: Pair, jobs: Jobs) -> None:
    coordinator, first, second = pair
    server = jobs.client(coordinator, "server", 0)
    first.publish("door", b"capability", to=["server 0"])
    assert server.lookup("door") == b"capability"
    for member in (first, second):
        with pytest.raises(RemoteAccessError, match=f"'door' is not for {member.name}"):
            member.lookup("door")
    assert not coordinator.ended.is_set()


def test_a_lookup_that_waits_too_long(pair: Pair) -> None:
    _, first, _ = pair
    with pytest.raises(WaitTimeout, match=r"nobody published 'key' \(waited 0.1 s\)"):
        first.lookup("key", timeout=0.1)
    with pytest.raises(WaitTimeout):
        first.lookup("key", timeout=-3.0)


@pytest.mark.parametrize("size", [0, 1, frames.PART_BYTES, frames.PART_BYTES + 1, 3 * frames.MOST_BYTES + 17])
def test_values_of_any_size(pair: Pair, size: int) -> None:
    _, first, second = pair
    value = os.urandom(size)
    found, _ = every([partial(second.lookup, "big"), partial(first.publish, "big", value)])
    assert found == value


def test_a_value_beyond_all_parts_is_refused_before_it_is_sent(pair: Pair) -> None:
    coordinator, first, _ = pair
    with pytest.raises(ProtocolError, match="'spec' is 33 MiB; the address book takes 32 MiB"):
        first.publish("spec", bytes(33 << 20))
    with pytest.raises(ProtocolError, match="above the limit"):
        first.publish("key", b"", to=["worker 1"] * (1 << 18))
    assert not coordinator.ended.is_set()
    assert coordinator.members == ["worker 0", "worker 1"]


def test_a_barrier_is_passed_by_all_or_none(pair: Pair) -> None:
    _, first, second = pair
    with pytest.raises(WaitTimeout, match="barrier 'b': only worker 0 of 2 came"):
        first.barrier("b", 2, timeout=0.1)
    # Who gave up does not count: the second would pass alone.
    with pytest.raises(WaitTimeout, match="only worker 1 of 2"):
        second.barrier("b", 2, timeout=0.1)
    assert every([partial(m.barrier, "b", 2) for m in (first, second)]) == [None, None]


def test_a_barrier_can_be_used_again(pair: Pair) -> None:
    _, first, second = pair
    for _ in range(3):
        assert every([partial(m.barrier, "b", 2) for m in (first, second)]) == [None, None]
    with pytest.raises(WaitTimeout):
        first.barrier("b", 2, timeout=0.1)


def test_a_barrier_has_one_size(pair: Pair) -> None:
    _, first, second = pair
    with pytest.raises(WaitTimeout):
        first.barrier("b", 2, timeout=0.0)
    with pytest.raises(ProtocolError, match="barrier 'b' is one of 2, not of 1, members"):
        second.barrier("b", 1)


def test_nobody_waits_for_a_worker_that_has_left(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tensorwire.control.book.LEFT_SECONDS", 0.1)
    _, first, second = pair
    first.close(goodbye=True)
    with pytest.raises(JobEnded, match="worker 0 left the job while worker 1 waits for it in barrier 'b'"):
        second.barrier("b", 2)


def test_equal_plans_pass(pair: Pair) -> None:
    coordinator, first, second = pair
    assert every([partial(m.compare, "plan", b"digest", "text", 2) for m in (first, second)]) == [False, False]
    assert not coordinator.ended.is_set()


def mismatch(pair: Pair, first: str, second: str) -> str:
    """What people are told when two workers' plans differ."""
    coordinator, one, two = pair
    texts = {one: first, two: second}

    def compare(member: Client) -> Callable[[], None]:
        return partial(member.compare, "the model", texts[member].encode()[:40], texts[member], 2)

    errors = every([compare(one), compare(two)])
    assert {type(e) for e in errors} <= {PlanMismatch, JobEnded}
    assert coordinator.ended.wait()
    for member in (one, two):
        assert member.ended.wait()
        assert member.cause == coordinator.cause
    return str(coordinator.cause)


def test_different_plans_end_the_job_and_show_the_lines_that_differ(pair: Pair) -> None:
    told = mismatch(pair, "a [2, 3] float32\nb [4] float32", "a [2, 5] float32\nb [4] float32")
    assert "does not agree with worker" in told
    assert "on the model" in told
    for part in ("worker 0", "worker 1", "a [2, 3] float32", "a [2, 5] float32"):
        assert part in told
    assert "b [4]" not in told


def test_the_difference_of_huge_plans_is_cut_short(pair: Pair) -> None:
    lines = [f"layer.{i}.weight {'é' * 50} [{i}]" for i in range(20_000)]
    told = mismatch(pair, "\n".join(lines), "\n".join(["x" * 100_000, *reversed(lines)]))
    assert len(told) < 10_000
    assert "lines more" in told


def gather(member: Client, call: str = "sum", value: bytes = b"", **options: float) -> Callable[[], list[bytes]]:
    return partial(member.gather, "collective 1", call, value, 2, **options)


def test_values_are_gathered_in_the_order_of_the_members(pair: Pair) -> None:
    _, first, second = pair
    for _ in range(2):
        assert every([gather(second, value=b"second"), gather(first, value=b"first")]) == [[b"first", b"second"]] * 2


def test_all_members_learn_of_different_calls(jobs: Jobs) -> None:
    coordinator = jobs.coordinator(workers=3)
    members = [jobs.client(coordinator, "worker", index) for index in range(3)]
    calls = ["sum", "barrier", "sum"]
    errors = every([partial(m.gather, "1", call, b"", 3) for m, call in zip(members, calls, strict=True)])
    assert [type(error) for error in errors] == [PlanMismatch] * 3
    assert "worker 1 called barrier" in str(errors[1])  # the others may be told before the third comes
    assert not coordinator.ended.is_set()
    assert every([partial(m.gather, "1", "sum", b"", 3) for m in members]) == [[b"", b"", b""]] * 3


def test_who_gave_up_gathering_may_come_again(pair: Pair) -> None:
    _, first, second = pair
    with pytest.raises(WaitTimeout, match="sum: only worker 0 of 2 came"):
        gather(first, value=b"old", timeout=0.1)()
    with pytest.raises(WaitTimeout, match="only worker 1 of 2"):
        gather(second, timeout=0.1)()
    assert every([gather(first, value=b"new"), gather(second)]) == [[b"new", b""]] * 2


def test_nobody_gathers_with_a_worker_that_has_left(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tensorwire.control.book.LEFT_SECONDS", 0.1)
    _, first, second = pair
    first.close(goodbye=True)
    with pytest.raises(JobEnded, match="worker 0 left the job while worker 1 waits for it in sum"):
        gather(second)()


def test_more_than_one_answer_holds_is_refused(pair: Pair) -> None:
    _, first, _ = pair
    with pytest.raises(ProtocolError, match="sum: 917505 bytes are too many"):
        gather(first, value=bytes(frames.GATHERED_BYTES + 1))()


def test_rpcs_are_counted(pair: Pair) -> None:
    _, first, _ = pair
    before = counters.snapshot()
    first.publish("key", b"value")
    first.lookup("key")
    first.barrier("alone", 1)
    first.compare("plan", b"d", "t", 1)
    assert counters.since(before).rpcs == 4


def test_requests_end_with_the_job_and_with_the_connection(pair: Pair) -> None:
    _, first, second = pair

    def close() -> None:
        while not first._pending:
            pass
        first.close()

    error, _ = every([partial(first.lookup, "never"), close])
    assert isinstance(error, JobEnded)
    assert second.ended.wait()
    for request in (
        partial(second.publish, "k", b"v"),
        partial(second.lookup, "k"),
        partial(second.barrier, "b", 2),
        partial(second.compare, "p", b"", "", 2),
    ):
        with pytest.raises(JobEnded, match="worker 0 is gone"):
            request()


def test_a_worker_that_waits_says_for_whom(
    pair: Pair, jobs: Jobs, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    coordinator, first, second = pair
    server = jobs.client(coordinator, "server", 0)
    monkeypatch.setattr(waits, "FIRST_SECONDS", 0.01)
    monkeypatch.setattr(waits, "MOST_SECONDS", 0.01)

    def said(end: str) -> None:
        """Waits until worker 0 has said so."""
        while not any(m.startswith("worker 0 has waited ") and m.endswith(f" s {end}") for m in caplog.messages):
            assert not coordinator.ended.is_set()

    def others() -> None:
        said("in barrier 'b' for worker 1")
        second.barrier("b", 2)
        said("in job.barrier() for worker 1")
        second.gather("g", "job.barrier()", b"", 2)
        said("for worker 1 to join the job")
        second.publish("card/worker 1", b"x")
        said("for worker 1 to publish 'store/0/worker 1/worker 0'")
        second.publish("store/0/worker 1/worker 0", b"x")

    def one() -> None:
        first.barrier("b", 2)
        first.gather("g", "job.barrier()", b"", 2)
        first.lookup("card/worker 1")
        first.lookup("store/0/worker 1/worker 0")

    def idle() -> None:
        server.lookup("card/worker 1")

    every([one, others, idle])
    first.waits("step 12 of store/0", "", 2.0)
    said("in step 12 of store/0 for worker 1")
    second.waits("step 12 of store/0")
    said("in step 12 of store/0 for the servers")
    first.waits("step 13 of store/0", "its servers")
    said("in step 13 of store/0 for its servers")
    assert not any("server 0 has" in message for message in caplog.messages)
    for member in (first, second):
        member.waits()
        member.publish(f"done {member.name}", b"")  # it has heard of the end
    caplog.clear()
    first.clock()
    assert caplog.messages == []
