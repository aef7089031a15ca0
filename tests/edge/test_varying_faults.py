"""Bounded and dynamic edges between processes that are killed, stopped and forked."""

from __future__ import annotations

import contextlib
import gc
import hashlib
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from tensorwire.device import Channel, Device
from tensorwire.device.meeting import exchange
from tensorwire.edge import Spec, connect_edge
from tensorwire.errors import PeerLost, WaitTimeout
from tests.edge.edges import lost_while
from tests.edge.varying import EDGES, SECONDS, array_of, arrived, born, copied, group_of, incoming, outgoing
from tests.harness.forked import LOST_AFTER, NEVER, Forked, quick, receive, send

BOUND = 1 << 20
LIMIT = 64 << 20
BIG = 32 << 20  # more than all sockets on the way hold

End = Any


def connect(kind: str, role: Any, device: Device, pipe: socket.socket) -> tuple[End, Channel]:
    """Both processes do this, and have an edge."""
    channel = device.connect(exchange(pipe, device.address, SECONDS))
    options: dict[str, Any] = {"bound": BOUND} if kind == "bounded" else {"limit": LIMIT}
    return connect_edge(channel, pipe, role, **options), channel


OTHER = {"producer": "consumer", "consumer": "producer"}


@contextlib.contextmanager
def edge(
    device_kind: str, kind: str, role: str, far: Callable[[End, socket.socket], object], lost_after: float
) -> Iterator[tuple[End, Forked, Channel]]:
    """Our end, as ``role``; the other one is of a forked process that does ``far``."""

    def serve(pipe: socket.socket) -> None:
        with quick(device_kind, lost_after=NEVER) as device:
            far(connect(kind, OTHER[role], device, pipe)[0], pipe)
            with contextlib.suppress(EOFError):
                receive(pipe)

    def ours() -> tuple[End, Forked, Channel]:
        end, channel = connect(kind, role, device, peer.pipe)
        return end, peer, channel

    with quick(device_kind, lost_after=lost_after) as device, Forked(serve) as peer:
        yield ours()  # and keep nothing of it: tests drop their end


@pytest.fixture(params=["shm", "tcp"])
def far_kind(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(params=EDGES)
def kind(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(params=["killed", "stopped"])
def how(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


def idle(end: End, pipe: socket.socket) -> None:
    """Does nothing."""


def patience(how: str) -> float:
    """After how much silence a peer is lost that ends like this: a death is told at once."""
    return NEVER if how == "killed" else LOST_AFTER


def finish(peer: Forked, how: str) -> None:
    if how == "killed":
        peer.kill()
    else:
        peer.stop()


def tensors(step: int) -> torch.Tensor:
    """Another one every step."""
    return torch.arange(step * 37 % 5000, dtype=torch.int32).view(-1, 1)[:: 1 + step % 3]


def consume(end: End, pipe: socket.socket) -> None:
    digest = hashlib.sha256()
    for step in range(1, 201):
        digest.update(bytes(end.receive(step, SECONDS).memory))
    send(pipe, digest.hexdigest())


def test_between_processes(far_kind: str, kind: str) -> None:
    with edge(far_kind, kind, "producer", consume, NEVER) as (producer, peer, _):
        digest = hashlib.sha256()
        for step in range(1, 201):
            copied(producer, step, tensors(step))
            digest.update(tensors(step).contiguous().numpy().tobytes())
        assert receive(peer.pipe) == digest.hexdigest()


def test_a_producer_whose_consumer_ends(far_kind: str, kind: str, how: str) -> None:
    """It waits for a slot."""
    with edge(far_kind, kind, "producer", idle, patience(how)) as (producer, peer, channel):
        for step in (1, 2):
            born(producer, step, b"x" * 1000, Spec((1000,), "uint8"))
        lost_while(lambda: copied(producer, 3, np.zeros(3)), lambda: finish(peer, how))
        assert channel.lost
        with pytest.raises(PeerLost):
            born(producer, 3, b"x", Spec((1,), "uint8"))


def test_a_producer_that_waits_to_close(far_kind: str, how: str) -> None:
    with edge(far_kind, "dynamic", "producer", idle, patience(how)) as (producer, peer, _):
        copied(producer, 1, np.arange(10))
        lost_while(lambda: group_of(producer).drain(SECONDS), lambda: finish(peer, how))
        assert len(group_of(producer)._payloads) == 1  # a stopped process may go on reading it
        producer.close(SECONDS)


def test_a_consumer_whose_producer_ends(far_kind: str, kind: str, how: str) -> None:
    def send_one(producer: End, pipe: socket.socket) -> None:
        born(producer, 1, b"before", Spec((6,), "uint8"))
        producer.flush(SECONDS)
        send(pipe, "sent")

    with edge(far_kind, kind, "consumer", send_one, patience(how)) as (consumer, peer, _):
        assert receive(peer.pipe) == "sent"
        received = consumer.receive(1, SECONDS)
        lost_while(lambda: consumer.receive(2, SECONDS), lambda: finish(peer, how))
        assert bytes(received.memory) == b"before"  # stays readable, whoever had made it
        received.release()
        with pytest.raises(PeerLost):
            consumer.receive(2, SECONDS)


def send_big(producer: End, pipe: socket.socket) -> None:
    born(producer, 1, bytes(range(256)) * (BIG // 256), Spec((BIG,), "uint8"))
    producer.flush(SECONDS)
    send(pipe, "sent")


def test_a_producer_that_is_stopped_while_it_is_read() -> None:
    """The consumer may wait again; its memory is nobody else's meanwhile, and the credit comes after the read."""
    with edge("tcp", "dynamic", "consumer", send_big, NEVER) as (consumer, peer, _):
        assert receive(peer.pipe) == "sent"
        arrived(consumer, 1)
        peer.stop()
        for _ in range(3):
            with pytest.raises(WaitTimeout, match="goes on"):
                consumer.receive(1, 0.01)
        assert incoming(consumer)._pool.leased_bytes == BIG
        assert held(consumer) == [1]
        peer.resume()
        received = consumer.receive(1, SECONDS)
        assert np.array_equal(array_of(received)[-256:], np.arange(256))
        assert held(consumer) == []


def test_a_consumer_that_is_dropped_while_it_reads() -> None:
    with edge("tcp", "dynamic", "consumer", send_big, NEVER) as (consumer, peer, channel):
        assert receive(peer.pipe) == "sent"
        arrived(consumer, 1)
        peer.stop()
        with pytest.raises(WaitTimeout):
            consumer.receive(1, 0.01)
        over = threading.Event()
        incoming(consumer)._reading.completion.on_done(lambda _: over.set())
        pool = incoming(consumer)._pool
        del consumer
        gc.collect()  # the error knew the frames that it came from
        assert pool.leased_bytes == BIG
        peer.kill()
        assert over.wait(SECONDS)
        assert channel.lost


def test_a_producer_that_is_killed_while_it_is_read(how: str) -> None:
    with edge("tcp", "dynamic", "consumer", send_big, patience(how)) as (consumer, peer, _):
        assert receive(peer.pipe) == "sent"
        arrived(consumer, 1)
        peer.stop()
        lost_while(lambda: consumer.receive(1, SECONDS), lambda: finish(peer, how))
        gc.collect()  # the error knows the frames that it came from
        assert incoming(consumer)._pool.leased_bytes == 0
        assert incoming(consumer)._reading is None


def test_a_forked_child_gives_nothing_back(far_kind: str, kind: str) -> None:
    """What it drops is its parent's, who still looks at it."""

    def send_and_look(producer: End, pipe: socket.socket) -> None:
        born(producer, 1, b"before", Spec((6,), "uint8"))
        if receive(pipe):  # the credit may be on its way
            producer._group.drain(SECONDS)
        send(pipe, given_back(producer))
        copied(producer, 2, np.arange(2))
        assert receive(pipe) == "look again"
        producer._group.drain(SECONDS)
        send(pipe, True)

    with edge(far_kind, kind, "consumer", send_and_look, NEVER) as (consumer, peer, _):
        received = consumer.receive(1, SECONDS)
        if far_kind == "tcp" and kind == "dynamic":  # it was read, and nothing is kept
            incoming(consumer).give_credits()
        before = held(consumer)

        def drop(pipe: socket.socket) -> None:
            received.release()
            send(pipe, "dropped")

        with Forked(drop) as child:
            assert receive(child.pipe) == "dropped"
        assert bytes(received.memory) == b"before"
        send(peer.pipe, before == [])
        assert receive(peer.pipe) == (before == [])
        received.release()
        with consumer.receive(2, SECONDS) as second:
            assert array_of(second).tolist() == [0, 1]
        send(peer.pipe, "look again")
        assert receive(peer.pipe) is True


def held(consumer: End) -> list[int]:
    """The steps whose banks the consumer looks into."""
    return sorted(bank.step for bank in incoming(consumer)._banks if bank.held)


def given_back(producer: End) -> bool:
    """Whether the consumer has let go of the first step."""
    bank: bool = outgoing(producer).has_read(1, 0)
    return bank
