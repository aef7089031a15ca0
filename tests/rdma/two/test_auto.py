"""``auto`` between two machines: verbs where a first write arrives; else tcp; the same at both ends."""

from __future__ import annotations

import contextlib
import secrets
import sys
from collections.abc import Iterator

import pytest

from tensorwire.control import Coordinator
from tests.rdma.two.conftest import Far
from tests.rdma.two.reaching import reach
from tests.rdma.wire import FAR


def routes(far: Far, *environment: str) -> list[str]:
    """By what each of two workers reaches the other: here, and in the second guest."""
    secret = secrets.token_hex(32)
    with contextlib.closing(Coordinator(secret.encode(), workers=2, servers=0, interface=FAR[0])) as job:
        command = (sys.executable, "-m", "tests.rdma.two.reaching", job.address, secret, "1")
        far.start("run", "env", *environment, *command)
        here = reach(job.address, secret, 0)
        return [here, far.finish().strip()]


def test_verbs_is_taken_between_machines(far: Far) -> None:
    for route in routes(far):
        assert route == "verbs: not shm: the processes run on different machines; a first write arrived"


@pytest.fixture
def island(far: Far) -> Iterator[str]:
    """Another device of the second guest, at an address that the first one has no way to."""

    def say(command: str) -> None:
        far.call("run", *command.split())

    say("ip link add island type dummy")
    say("ip address add 10.66.0.1/24 dev island")
    say("ip link set island up")
    say("rdma link add rxi type rxe netdev island")
    yield "rxi"
    say("rdma link delete rxi")
    say("ip link delete island")


def test_queue_pairs_that_connect_and_carry_nothing_are_not_taken(far: Far, island: str) -> None:
    for route in routes(far, f"TENSORWIRE_VERBS_PORT={island}"):
        assert route.startswith("tcp: not shm: the processes run on different machines; not verbs: ")
