"""Edges with a content check: a flipped bit, a stale slot and an end that does not check are seen."""

from __future__ import annotations

import sys

import pytest

from tensorwire.edge import TRAILER, CheckedConsumer, CheckedProducer, Consumer, Producer, Spec, Word
from tensorwire.errors import ArgumentError, ContentMismatch, Unsupported
from tensorwire.observe import counters
from tensorwire.testing.patience import patient
from tests.edge.edges import FIRST, Pair, make_edge

NBYTES = 4099
SECONDS = patient(60.0)
CONTENT = bytes(range(256)) * 16 + b"end"


def sent(pair: Pair) -> tuple[CheckedProducer, CheckedConsumer, memoryview]:
    """An edge over which step 1 was sent, and the slot it lies in."""
    producer, consumer, inbox = make_edge(pair, 1, NBYTES, checked=True)
    assert isinstance(producer, CheckedProducer)
    assert isinstance(consumer, CheckedConsumer)
    producer.slot(1, SECONDS)[:] = CONTENT
    producer.send(1)
    producer.flush(SECONDS)
    return producer, consumer, memoryview(inbox)[FIRST:]


def test_what_was_sent_is_received(pair: Pair) -> None:
    before = counters.snapshot()
    producer, consumer, _ = sent(pair)
    assert counters.since(before).messages == 1  # the checksum travels with its payload
    assert producer.nbytes == NBYTES
    slot = consumer.receive(1, SECONDS)
    assert slot is not None
    assert bytes(slot) == CONTENT
    consumer.release(1)
    producer.slot(2, SECONDS)[:5] = b"other"
    producer.send(2)
    again = consumer.receive(2, SECONDS)
    assert again is not None
    assert bytes(again[:6]) == b"other" + CONTENT[5:6]


@pytest.mark.parametrize("at", [0, NBYTES // 2, NBYTES - 1, NBYTES + 8, NBYTES + TRAILER - 1])
def test_one_flipped_bit_is_seen(pair: Pair, at: int) -> None:
    _, consumer, slot = sent(pair)
    consumer.receive(1, SECONDS)
    slot[at] ^= 1
    with pytest.raises(ContentMismatch, match=r"step 1 from .* is not what was sent"):
        consumer.receive(1, SECONDS)
    slot[at] ^= 1
    consumer.receive(1, SECONDS)


def test_the_bytes_of_another_step_are_seen(pair: Pair) -> None:
    producer, consumer, slot = sent(pair)
    old = bytes(slot)
    consumer.receive(1, SECONDS)
    consumer.release(1)
    producer.slot(2, SECONDS)[:3] = b"new"
    producer.send(2)
    producer.flush(SECONDS)
    consumer.receive(2, SECONDS)
    slot[:] = old
    with pytest.raises(ContentMismatch):
        consumer.receive(2, SECONDS)


def test_a_producer_that_does_not_check_is_seen(pair: Pair) -> None:
    size = NBYTES + TRAILER
    producer, plain, inbox = make_edge(pair, 1, size)
    consumer = CheckedConsumer(plain._arrival, slots=plain._slots)
    producer.slot(1, SECONDS)[:] = bytes(size)
    producer.send(1)
    with pytest.raises(ContentMismatch, match="has no checksum: make the producer a CheckedProducer"):
        consumer.receive(1, SECONDS)
    assert inbox.load(0) == 1


def test_ends_that_differ_are_refused_where_a_spec_says_the_size(pair: Pair) -> None:
    spec = Spec((1024,), "float32")
    inbox = pair.consumer.allocate(64 + spec.nbytes + TRAILER)
    word, remote = Word(inbox, 0, pair.back), inbox.remote()
    sizes = {False: spec.nbytes, True: spec.nbytes + TRAILER}
    for checked, size in sizes.items():
        wrong, right = sizes[not checked], size
        make_consumer = CheckedConsumer if checked else Consumer
        make_producer = CheckedProducer if checked else Producer
        staging = pair.producer.allocate(wrong)
        source = [] if pair.producer.capabilities.maps else [staging.view()]
        with pytest.raises(ArgumentError, match="is it on at both ends"):
            make_consumer(word, slots=[memoryview(inbox)[64 : 64 + wrong]], spec=spec)
        with pytest.raises(ArgumentError, match="is it on at both ends"):
            make_producer(pair.there, remote.view(0, 8), slots=[remote.view(64, wrong)], source=source, spec=spec)
        make_consumer(word, slots=[memoryview(inbox)[64 : 64 + right]], spec=spec)


def test_there_is_no_check_without_a_payload(pair: Pair) -> None:
    inbox = pair.consumer.allocate(64)
    with pytest.raises(ArgumentError, match="needs slots"):
        CheckedProducer(pair.there, inbox.remote().view(0, 8))
    with pytest.raises(ArgumentError, match="needs slots"):
        CheckedConsumer(Word(inbox, 0, pair.back))
    with pytest.raises(ArgumentError, match="needs slots"):
        CheckedConsumer(Word(inbox, 0, pair.back), slots=[memoryview(inbox)[:8]])
    producer, _, _ = sent(pair)
    with pytest.raises(ArgumentError, match="the whole of its slot"):
        producer.send(2, nbytes=0)


def test_steps_still_grow(pair: Pair) -> None:
    producer, consumer, slot = sent(pair)
    before = bytes(slot)
    for step in (1, 0):
        with pytest.raises(ArgumentError, match="steps grow"):
            producer.send(step)
    assert bytes(slot) == before
    consumer.receive(1, SECONDS)


def test_without_the_package_it_says_what_to_install(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "xxhash", None)
    with pytest.raises(Unsupported, match=r"pip install '\.\[check\]'"):
        make_edge(pair, 1, 64, checked=True)
