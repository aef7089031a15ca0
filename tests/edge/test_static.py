"""Static edges: rings, credits, either side first, born in the slot where mapped."""

from __future__ import annotations

import threading

import pytest

from tensorwire.edge import Producer
from tensorwire.errors import ArgumentError, PeerLost, RegionClosed, RemoteAccessError, WaitTimeout
from tensorwire.observe import counters
from tests.edge.edges import Pair, lost_while, make_edge

NBYTES = 4096


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_thousand_steps_in_a_ring(pair: Pair, depth: int) -> None:
    producer, consumer, _ = make_edge(pair, depth, NBYTES)
    wrong: list[int] = []

    def consume() -> None:
        for step in range(1, 1001):
            slot = consumer.receive(step, 60.0)
            assert slot is not None
            if bytes(slot) != bytes([step % 251]) * NBYTES:
                wrong.append(step)
            consumer.release(step)

    thread = threading.Thread(target=consume)
    thread.start()
    for step in range(1, 1001):
        producer.slot(step, 60.0)[:] = bytes([step % 251]) * NBYTES
        producer.send(step)
    thread.join()
    assert wrong == []


def test_the_producer_may_come_first(pair: Pair) -> None:
    producer, consumer, _ = make_edge(pair, 2, NBYTES)
    for step in (1, 2):
        producer.slot(step, 60.0)[:] = bytes([step]) * NBYTES
        producer.send(step)
    with pytest.raises(WaitTimeout):
        producer.slot(3, 0.01)  # no credit yet
    for step in (1, 2):
        slot = consumer.receive(step, 60.0)
        assert slot is not None
        assert slot[0] == step
        consumer.release(step)
    producer.slot(3, 60.0)


def test_the_consumer_may_come_first(pair: Pair) -> None:
    producer, consumer, _ = make_edge(pair, 1, NBYTES)
    assert not consumer.ready(1)
    with pytest.raises(WaitTimeout):
        consumer.receive(1, 0.01)
    producer.slot(1, 60.0)[:5] = b"hello"
    producer.send(1)
    slot = consumer.receive(1, 60.0)
    assert slot is not None
    assert consumer.ready(1)
    assert bytes(slot[:5]) == b"hello"


def test_mapped_edges_are_born_in_the_slot(pair: Pair) -> None:
    producer, consumer, inbox = make_edge(pair, 1, NBYTES)
    maps = pair.producer.capabilities.maps
    assert producer.mapped == maps
    slot = producer.slot(1, 60.0)
    slot[:3] = b"abc"
    assert (bytes(memoryview(inbox)[64:67]) == b"abc") == maps  # there already, before it was sent
    before = counters.snapshot()
    producer.send(1)
    consumer.receive(1, 60.0)
    sent = counters.since(before)
    assert sent.messages == 1
    assert sent.copies == 0
    assert (sent.mapped_bytes, sent.bytes) == ((NBYTES, 0) if maps else (0, NBYTES))


def test_a_signal_without_payload(pair: Pair) -> None:
    producer, consumer, _ = make_edge(pair, 1, NBYTES)
    before = counters.snapshot()
    producer.send(1, nbytes=0)
    consumer.receive(1, 60.0)
    assert counters.since(before).bytes == 0


def test_flush_says_what_did_not_arrive(pair: Pair) -> None:
    producer, _, inbox = make_edge(pair, 2, NBYTES)
    inbox.close()
    producer.send(1)
    with pytest.raises((RemoteAccessError, PeerLost)):
        producer.flush(60.0)


def test_only_what_was_used_is_sent(pair: Pair) -> None:
    producer, consumer, _inbox = make_edge(pair, 1, NBYTES)
    producer.slot(1, 60.0)[:] = b"x" * NBYTES
    before = counters.snapshot()
    producer.send(1, nbytes=100)
    slot = consumer.receive(1, 60.0)
    assert slot is not None
    assert bytes(slot[:100]) == b"x" * 100
    sent = counters.since(before)
    assert sent.mapped_bytes + sent.bytes == 100


def test_steps_must_grow(pair: Pair) -> None:
    producer, _, _ = make_edge(pair, 1, NBYTES)
    producer.send(5, nbytes=0)
    for step in (5, 4):
        with pytest.raises(ArgumentError, match="steps grow"):
            producer.send(step)


def test_a_lost_peer_wakes_both_ends(pair: Pair) -> None:
    producer, consumer, _ = make_edge(pair, 1, NBYTES)
    producer.slot(1, 60.0)
    producer.send(1)
    lost_while(lambda: producer.slot(2, 60.0), pair.consumer.close)
    with pytest.raises(RegionClosed):  # the consumer's own device is what closed
        consumer.receive(2, 60.0)


def test_an_unmapped_edge_needs_matching_sources(pair: Pair) -> None:
    inbox = pair.consumer.allocate(8192)
    wrong = pair.producer.allocate(100)
    remote = inbox.remote()
    with pytest.raises(ArgumentError, match="one source view per slot"):
        Producer(pair.there, remote.view(0, 8), slots=[remote.view(64, 200)], source=[wrong.view(0, 100)])
