"""Edges over several queue pairs: each keeps to its own.

What holds for bounded and dynamic edges on every device runs here, too: the tests that are imported.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest

from tensorwire.device import VerbsDevice
from tensorwire.edge import Consumer, Producer, Word
from tensorwire.edge.static import lane_of
from tests.edge.edges import Pair
from tests.edge.test_dynamic import test_a_sender_may_let_go_at_once, test_the_same_memory_step_after_step
from tests.edge.test_varying import (
    kind,
    test_another_shape_every_step,
    test_memory_comes_back_in_any_order,
    test_steady_state_costs_nothing,
)
from tests.rdma.wire import ADDRESSES

__all__ = [
    "kind",
    "test_a_sender_may_let_go_at_once",
    "test_another_shape_every_step",
    "test_memory_comes_back_in_any_order",
    "test_steady_state_costs_nothing",
    "test_the_same_memory_step_after_step",
]

LANES = 3
SECONDS = 60.0


@pytest.fixture
def pair() -> Iterator[Pair]:
    """The producer on rxa, the consumer on rxb."""
    ports = zip(("rxa", "rxb"), ADDRESSES, strict=True)
    a, b = (VerbsDevice(port, interface=interface, queue_pairs=LANES) for port, interface in ports)
    with a, b, a.connect(b.address) as there, b.connect(a.address) as back:
        yield Pair(a, b, there, back)


def test_many_edges_spread_over_the_queue_pairs(pair: Pair) -> None:
    edges, depth = 12, 2
    inbox, credits_ = pair.consumer.allocate(1 << 20), pair.producer.allocate(4096)
    staging, remote, back = pair.producer.allocate(1 << 20), inbox.remote(), credits_.remote()
    ends, used = [], set()
    for i in range(edges):
        word, places = 64 * i, [4096 * (1 + depth * i + at) for at in range(depth)]
        producer = Producer(
            pair.there,
            remote.view(word, 8),
            slots=[remote.view(at, 4096) for at in places],
            source=[staging.view(at, 4096) for at in places],
            credit=Word(credits_, word, pair.there),
        )
        slots = [inbox.view(at, 4096).buffer for at in places]
        consumer = Consumer(Word(inbox, word, pair.back), slots=slots, credit=(pair.back, back.view(word, 8)))
        ends.append((producer, consumer))
        used.add(lane_of(pair.there, remote.view(word, 8)))
    assert len(used) > 1
    for step, (i, (producer, consumer)) in itertools.product(range(1, 21), enumerate(ends)):
        producer.slot(step, SECONDS)[:] = bytes([i * 20 + step]) * 4096
        producer.send(step)
        if i % 2:  # some are looked at much later
            assert bytes(consumer.receive(step, SECONDS) or b"") == bytes([i * 20 + step]) * 4096
            consumer.release(step)
        elif step % depth == 0:
            for late in range(step - depth + 1, step + 1):
                assert bytes(consumer.receive(late, SECONDS) or b"") == bytes([i * 20 + late]) * 4096
                consumer.release(late)
