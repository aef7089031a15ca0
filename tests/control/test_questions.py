"""Questions from one member to others: each gets its own answers, in time, or none."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from tensorwire.control import Coordinator
from tensorwire.control.client import Client
from tensorwire.control.names import STATS

SECRET = b"0123456789abcdef0123456789abcdef"


@pytest.fixture
def members() -> Iterator[list[Client]]:
    """Two servers of a job that has no worker yet."""
    coordinator = Coordinator(SECRET, workers=1, servers=2)
    made = [Client(coordinator.address, SECRET, "server", index) for index in range(2)]
    yield made
    for each in made:
        each.close(goodbye=True)
    coordinator.close()


def test_all_who_answer_are_heard(members: list[Client]) -> None:
    one, other = members
    other.answer("double", lambda asker, value: 2 * value + asker.encode())
    assert one.ask(["server 1"], "double", b"ab", 60.0) == {"server 1": b"ababserver 0"}
    assert one.ask(["server 1", "worker 0"], "double", b"ab", 0.2) == {"server 1": b"ababserver 0"}
    assert one.ask(["server 1"], STATS, b"", 60.0).keys() == {"server 1"}
    other.answer("double", None)
    assert one.ask(["server 1"], "double", b"ab", 0.1) == {}


def test_a_late_answer_is_none_to_the_next_question(members: list[Client]) -> None:
    one, other = members
    late = threading.Event()

    def call(_: str, value: bytes) -> bytes:
        if value == b"first":
            late.wait(60.0)
        return value

    other.answer("echo", call, slow=True)
    assert one.ask(["server 1"], "echo", b"first", 0.1) == {}

    def second(_: str, value: bytes) -> bytes:
        late.set()
        mine = threading.current_thread()
        while any(t.name == mine.name and t is not mine for t in threading.enumerate()):  # until the first is answered
            pass
        return value

    other.answer("echo", second, slow=True)
    assert one.ask(["server 1"], "echo", b"second", 60.0) == {"server 1": b"second"}
