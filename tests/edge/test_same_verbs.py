"""``fill(step, tensor)``, then ``send(step)``: the same on every kind of edge."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tensorwire.edge import ConsumerEnd, ProducerEnd, Spec
from tensorwire.errors import ArgumentError
from tests.edge.edges import Pair
from tests.edge.varying import SECONDS, connected

TENSOR = np.arange(6000, dtype=np.int64).reshape(60, 100)
KINDS: dict[str, dict[str, Any]] = {
    "static": {"spec": Spec((100, 60), "int64")},
    "bounded": {"bound": TENSOR.nbytes},
    "dynamic": {},
}


def make_any(kind: str, pair: Pair) -> tuple[ProducerEnd, ConsumerEnd]:
    """Both ends of an edge of that kind, for ``TENSOR``."""
    return connected(pair, **KINDS[kind])


@pytest.mark.parametrize("kind", KINDS)
def test_fill_and_send(pair: Pair, kind: str) -> None:
    producer, consumer = make_any(kind, pair)
    for step in range(1, 6):
        producer.fill(step, (TENSOR + step).T, SECONDS)
        producer.send(step)
        with consumer.receive(step, SECONDS) as received:
            assert bytes(received.memory) == (TENSOR + step).T.tobytes()
    producer.flush(SECONDS)


@pytest.mark.parametrize("kind", KINDS)
def test_a_tensor_in_the_steps_place_is_named(pair: Pair, kind: str) -> None:
    producer, _ = make_any(kind, pair)
    wrong: Any = TENSOR
    with pytest.raises(
        ArgumentError, match=r"the step must be an int, not ndarray: the step comes first, as in fill\(1, t"
    ):
        producer.fill(wrong, 1, SECONDS)
    step: Any = np.int64(1)
    producer.fill(step, TENSOR.T, SECONDS)
