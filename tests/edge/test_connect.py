"""Edges between two processes that are set up in one call at each end; here the other process is a thread."""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from tensorwire.device import Device, TcpDevice, connect_peer
from tensorwire.edge import ConsumerEnd, ProducerEnd, Spec, connect_edge
from tensorwire.edge.connect import _Offer
from tensorwire.errors import (
    ArgumentError,
    PeerLost,
    ProtocolError,
    TensorwireError,
    Unsupported,
    WaitTimeout,
)
from tests.edge.edges import KINDS

SECONDS = 60.0
SPEC = Spec((5, 3), "float32")
EDGES: dict[str, dict[str, Any]] = {
    "static": {"spec": SPEC},
    "bounded": {"bound": 1000},
    "dynamic": {},
}


def side_by_side(*calls: Callable[[], Any]) -> list[Any]:
    """What each returned or raised."""
    results: list[Any] = [None] * len(calls)

    def run(i: int) -> None:
        try:
            results[i] = calls[i]()
        except TensorwireError as error:
            results[i] = error

    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


@contextlib.contextmanager
def met(kind: str) -> Iterator[tuple[Any, Any, Any, Any]]:
    """Two pipes' ends, and a channel at each."""
    a, b = multiprocessing.Pipe()
    with KINDS[kind]() as here, KINDS[kind]() as there, a, b:
        forth, back = side_by_side(lambda: connect_peer(here, a, SECONDS), lambda: connect_peer(there, b, SECONDS))
        with forth, back:
            yield a, b, forth, back


def connected(pipes: tuple[Any, Any, Any, Any], **options: Any) -> tuple[ProducerEnd, ConsumerEnd]:
    a, b, forth, back = pipes
    ends = side_by_side(
        lambda: connect_edge(forth, a, "producer", **options), lambda: connect_edge(back, b, "consumer", **options)
    )
    for end in ends:
        if isinstance(end, Exception):
            raise end
    return ends[0], ends[1]


@pytest.mark.parametrize("device", KINDS)
@pytest.mark.parametrize("kind", EDGES)
def test_the_same_code_for_every_kind(device: str, kind: str) -> None:
    with met(device) as pipes:
        producer, consumer = connected(pipes, **EDGES[kind])
        with producer, consumer:
            wrong: Any = np.arange(3)
            with pytest.raises(ArgumentError, match="must be an int, not ndarray: the step comes first, as in fill"):
                producer.fill(wrong, 1, SECONDS)
            for step in map(np.int64, range(1, 8)):
                producer.fill(step, torch.full((3, 5), float(step)).T, SECONDS)  # type: ignore[arg-type]
                producer.send(step)  # type: ignore[arg-type]
                with consumer.receive(int(step), SECONDS) as received:
                    assert received.spec == SPEC
                    assert (received.numpy() == step).all()
            assert not consumer.ready()
            producer.flush(SECONDS)


@pytest.mark.parametrize("device", KINDS)
@pytest.mark.parametrize("kind", EDGES)
def test_what_is_kept_is_not_overwritten(device: str, kind: str) -> None:
    """Slots may go back in any order; a static edge waits for the oldest."""
    with met(device) as pipes:
        producer, consumer = connected(pipes, depth=3, **EDGES[kind])
        kept = []
        for step in (1, 2, 3):
            producer.fill(step, np.full((5, 3), step, np.float32), SECONDS)
            producer.send(step)
            kept.append(consumer.receive(step, SECONDS).numpy())
        del kept[1]
        gc.collect()
        if kind == "static":
            with pytest.raises(WaitTimeout):
                producer.fill(4, np.zeros((5, 3), np.float32), 0.01)
        assert [int(array[0, 0]) for array in kept] == [1, 3]
        del kept[0]
        gc.collect()
        for step in (4, 5):
            producer.fill(step, np.full((5, 3), step, np.float32), SECONDS)
            producer.send(step)
            assert (consumer.receive(step, SECONDS).numpy() == step).all()
        assert (kept[0] == 3).all()
        del kept
        gc.collect()
        producer.close(SECONDS)
        consumer.close()


@pytest.mark.parametrize("device", ["shm", "tcp"])
@pytest.mark.parametrize("kind", EDGES)
def test_a_producer_may_close_before_the_consumer_has_looked(device: str, kind: str) -> None:
    with met(device) as pipes:
        producer, consumer = connected(pipes, **EDGES[kind])
        producer.fill(1, np.full((5, 3), 7, np.float32), SECONDS)
        producer.send(1)

        def leave() -> None:
            producer.close(SECONDS)
            pipes[2].close()
            pipes[2].device.close()

        def look() -> float:
            with consumer.receive(1, SECONDS) as received:
                return float(received.numpy().sum())

        assert side_by_side(leave, look) == [None, 105.0]
        with pytest.raises(PeerLost):
            consumer.receive(2, SECONDS)
        consumer.close()
        for _ in range(2):
            producer.close()


@pytest.mark.parametrize("carrier", ["socket", "function"])
def test_other_connections_than_a_pipe(carrier: str) -> None:
    a, b = socket.socketpair()

    def function(sock: socket.socket) -> Callable[[bytes], bytes]:
        def swap(ours: bytes) -> bytes:
            sock.sendall(ours)
            return sock.recv(1 << 16)

        return swap

    ends = (a, b) if carrier == "socket" else (function(a), function(b))
    with a, b, KINDS["shm"]() as here, KINDS["shm"]() as there:
        forth, back = side_by_side(
            lambda: connect_peer(here, ends[0], SECONDS), lambda: connect_peer(there, ends[1], SECONDS)
        )
        producer, consumer = connected((*ends, forth, back), bound=100)
        with forth, back, producer, consumer:
            assert a.gettimeout() is None
            producer.fill(1, np.arange(4), SECONDS)
            producer.send(1)
            assert consumer.receive(1, SECONDS).numpy().tolist() == [0, 1, 2, 3]


DIFFER: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({"bound": 100}, {"bound": 200}, "bound is 100 here and 200 there"),
    ({"bound": 100}, {}, "kind is 'bounded' here and 'dynamic' there"),
    ({"spec": SPEC}, {"spec": Spec((3, 5), "float32")}, r"shape is \(5, 3\) here and \(3, 5\) there"),
    ({"depth": 2}, {"depth": 3}, "depth is 2 here and 3 there"),
]


@pytest.mark.parametrize(("here", "there", "why"), DIFFER)
def test_ends_that_differ_are_refused_at_both(here: dict[str, Any], there: dict[str, Any], why: str) -> None:
    with met("shm") as (a, b, forth, back):
        one, other = side_by_side(
            lambda: connect_edge(forth, a, "producer", **here), lambda: connect_edge(back, b, "consumer", **there)
        )
        assert isinstance(other, ArgumentError)
        with pytest.raises(ArgumentError, match=why):
            raise one


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"spec": SPEC, "bound": 5}, "not both"),
        ({"depth": 0}, "depth of such an edge must be 1 to 250, not 0"),
        ({"depth": 251}, "depth of such an edge must be 1 to 250, not 251"),
        ({"bound": -1}, "0 bytes or more"),
    ],
)
def test_edges_that_cannot_be(options: dict[str, Any], why: str) -> None:
    with met("loopback") as (a, _, forth, _):
        with pytest.raises(ArgumentError, match=why):
            connect_edge(forth, a, "producer", **options)
        wrong: Any = "sender"
        with pytest.raises(ArgumentError, match="'producer' or 'consumer', not 'sender'"):
            connect_edge(forth, a, wrong)
        nothing: Any = 5
        with pytest.raises(
            ArgumentError, match="must be a socket, a function, or an object with send_bytes and recv_bytes; not int"
        ):
            connect_edge(forth, nothing, "producer")


def test_two_of_one_side() -> None:
    with met("loopback") as (a, b, forth, back):
        results = side_by_side(lambda: connect_edge(forth, a, "producer"), lambda: connect_edge(back, b, "producer"))
        assert all("both ends are the producer's" in str(error) for error in results)


def test_devices_that_differ() -> None:
    a, b = multiprocessing.Pipe()
    with a, b, KINDS["shm"]() as here, KINDS["tcp"]() as there:
        one, other = side_by_side(lambda: connect_peer(here, a, SECONDS), lambda: connect_peer(there, b, SECONDS))
        assert str(one) == "the devices differ: shm here, tcp there"
        assert isinstance(other, ArgumentError)


GARBAGE = [b"", b"\xc1", b"x" * 100, msgspec.msgpack.encode({"type": "tensorwire edge 2"}), bytes(1 << 16)]


@pytest.mark.parametrize("garbage", GARBAGE)
def test_garbage_from_the_other_process(garbage: bytes) -> None:
    a, b = multiprocessing.Pipe()
    with TcpDevice() as device, device.connect(device.address) as channel, a, b:
        for call in (lambda: connect_peer(device, a), lambda: connect_edge(channel, a, "producer")):
            b.send_bytes(garbage)
            with pytest.raises(ProtocolError, match="the same version"):
                call()


def test_hostile_numbers_in_an_offer() -> None:
    good = {"type": "tensorwire edge 2", "side": "consumer", "memory": bytes(32)}
    edge = {"kind": "static", "depth": 2, "dtype": "float32", "shape": [5, 3], "bound": 0}
    assert msgspec.msgpack.decode(msgspec.msgpack.encode({**good, "edge": edge}), type=_Offer).side == "consumer"
    for change in ({"depth": 0}, {"depth": 2**40}, {"shape": [-1]}, {"shape": [0] * 65}, {"bound": -1}, {"kind": "x"}):
        with pytest.raises(msgspec.ValidationError):
            msgspec.msgpack.decode(msgspec.msgpack.encode({**good, "edge": {**edge, **change}}), type=_Offer)


def test_a_process_that_ends_or_says_nothing() -> None:
    a, b = multiprocessing.Pipe()
    with KINDS["shm"]() as device, a:
        with pytest.raises(WaitTimeout, match="sent nothing within"):
            connect_peer(device, a, 0.01)
        b.close()
        with pytest.raises(PeerLost, match="the connection to the other process ended"):
            connect_peer(device, a, SECONDS)


def test_nothing_is_left_of_a_refused_end() -> None:
    with met("shm") as (a, b, forth, _):
        device: Device = forth.device
        b.send_bytes(b"garbage")
        with pytest.raises(ProtocolError):
            connect_edge(forth, a, "producer", bound=1000)
        gc.collect()
        assert all(region.closed for region in device._regions)
        with pytest.raises((ArgumentError, Unsupported)):
            connect_edge(forth, a, "producer", spec=Spec((1,), "object"))
