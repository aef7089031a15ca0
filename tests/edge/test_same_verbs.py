"""``fill(step, tensor)``, then ``send(step)``: the same on every kind of edge."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tensorwire.edge import Received, StripedConsumer, StripedProducer, Word
from tensorwire.errors import ArgumentError
from tests.edge.edges import Pair, make_edge
from tests.edge.varying import SECONDS, make

KINDS = ["static", "checked", "striped", "bounded", "dynamic"]
TENSOR = np.arange(6000, dtype=np.int64).reshape(60, 100)


def make_any(kind: str, pair: Pair) -> tuple[Any, Any]:
    """Both ends of an edge of that kind, for ``TENSOR``."""
    if kind in ("bounded", "dynamic"):
        return make(kind, pair, 2, TENSOR.nbytes)
    if kind != "striped":
        producer, consumer, _ = make_edge(pair, 2, TENSOR.nbytes, checked=kind == "checked")
        return producer, consumer
    memory = pair.consumer.allocate(4096 + TENSOR.nbytes)
    remote, words = memory.remote(), (0, 64)
    source = [] if pair.producer.capabilities.maps else [pair.producer.allocate(TENSOR.nbytes).view()]
    arrivals = [remote.view(at, 8) for at in words]
    credit = pair.producer.allocate(8)
    return (
        StripedProducer(
            pair.there, arrivals, slots=[remote.view(4096)], source=source, credit=Word(credit, 0, pair.there)
        ),
        StripedConsumer(
            [Word(memory, at, pair.back) for at in words],
            slots=[memory.view(4096).buffer],
            credit=(pair.back, credit.remote().view()),
        ),
    )


@pytest.mark.parametrize("kind", KINDS)
def test_fill_and_send(pair: Pair, kind: str) -> None:
    producer, consumer = make_any(kind, pair)
    for step in range(1, 6):
        producer.fill(step, (TENSOR + step).T, SECONDS)
        producer.send(step)
        received = consumer.receive(step, SECONDS)
        assert bytes(received.memory if isinstance(received, Received) else received) == (TENSOR + step).T.tobytes()
        received.release() if isinstance(received, Received) else consumer.release(step)
    producer.flush(SECONDS)


@pytest.mark.parametrize("kind", KINDS)
def test_a_tensor_in_the_steps_place_is_named(pair: Pair, kind: str) -> None:
    producer, _ = make_any(kind, pair)
    with pytest.raises(ArgumentError, match=r"a step is an int, not ndarray: the step comes first, as in fill\(1, t"):
        producer.fill(TENSOR, 1, SECONDS)
    producer.fill(np.int64(1), TENSOR, SECONDS)
