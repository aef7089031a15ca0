"""A connection to the coordinator that two threads close, and listeners of the job's end of which one fails."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from tensorwire.control import Cause, Member
from tensorwire.testing.patterns import SECONDS
from tests.control.conftest import SECRET, Jobs


def twice(close: Callable[[], object], is_over: Callable[[], bool]) -> list[bool]:
    """Whether it was over when each of two calls came back."""
    both, over = threading.Barrier(2), list[bool]()

    def run() -> None:
        both.wait(SECONDS)
        close()
        over.append(is_over())

    threads = [threading.Thread(target=run) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SECONDS)
    return over


def test_either_of_two_who_close_comes_back_when_it_is_over(jobs: Jobs) -> None:
    for _ in range(5):
        coordinator = jobs.coordinator(workers=2, servers=0)
        client = jobs.client(coordinator)
        over = twice(
            lambda client=client: client.close(goodbye=True), lambda client=client: not client._thread.is_alive()
        )  # type: ignore[misc]
        assert over == [True, True]
        member = Member(coordinator.address, SECRET, "worker", 1, device="tcp")
        acceptor = member.devices["tcp"]._acceptor  # type: ignore[attr-defined]
        over = twice(member.close, lambda acceptor=acceptor: acceptor._listener.fileno() < 0)  # type: ignore[misc]
        assert over == [True, True]
        assert coordinator.ended.wait(SECONDS)
        assert coordinator.cause is None  # each said goodbye, once


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_listener_that_raises_keeps_no_other_from_being_told(jobs: Jobs) -> None:
    coordinator = jobs.coordinator()
    client = jobs.client(coordinator)
    told = [threading.Event() for _ in range(2)]

    def fail(_: Cause | None) -> None:
        told[0].set()
        raise KeyError("mine")

    client.on_end(fail)
    client.on_end(lambda _: told[1].set())
    coordinator.end(Cause("worker 1", "ran out of data"))
    assert all(each.wait(SECONDS) for each in told)
    assert str(client.error()) == "worker 1 ran out of data"
