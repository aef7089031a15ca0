"""Bounded edges: what fits into a slot, where it is born, and that no more than that is sent."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tensorwire.edge import Spec
from tensorwire.edge.header import HEADER
from tensorwire.errors import ArgumentError
from tensorwire.observe import counters
from tests.edge.edges import Pair
from tests.edge.varying import SECONDS, array_of, make_bounded, tensor_of

BOUND = 1000


def test_mapped_tensors_are_born_in_the_consumers_slot(pair: Pair) -> None:
    producer, consumer = make_bounded(pair, 2, BOUND)
    assert producer.mapped == pair.producer.capabilities.maps
    slot = producer.slot(1, SECONDS)
    assert slot.nbytes == producer.bound == BOUND
    slot[:4] = b"born"
    at = consumer._ring.ring.slot(0) + HEADER
    assert (bytes(consumer._ring.memory[at : at + 4]) == b"born") == producer.mapped  # before it was sent
    producer.send(1, Spec((4,), "uint8"))
    received = tensor_of(consumer.receive(1, SECONDS))
    assert bytes(received.memory) == b"born"
    inbox = consumer._ring.inbox.region
    received.memory[0] = 66  # its own memory, also to write
    assert memoryview(inbox)[at] == 66


def test_only_what_is_used_is_sent(pair: Pair) -> None:
    if pair.producer.capabilities.maps:
        pytest.skip("no byte is sent")
    producer, consumer = make_bounded(pair, 2, BOUND)
    before = counters.snapshot()
    producer.slot(1)[:] = b"x" * BOUND
    producer.send(1, Spec((10,), "uint8"))
    assert tensor_of(consumer.receive(1, SECONDS)).memory.nbytes == 10
    producer.flush(SECONDS)
    at = consumer._ring.ring.slot(0) + HEADER
    assert bytes(consumer._ring.memory[at : at + 11]) == b"x" * 10 + b"\0"
    assert counters.since(before).bytes == HEADER + 10 + 8  # and the credit's record


def test_what_does_not_fit(pair: Pair) -> None:
    producer, consumer = make_bounded(pair, 1, BOUND)
    with pytest.raises(ArgumentError, match=r"up to 1000 bytes, and uint8\[1001\] has 1001"):
        producer.fill(1, np.zeros(1001, np.uint8))
    producer.slot(1)
    with pytest.raises(ArgumentError, match="up to 1000 bytes"):
        producer.send(1, Spec((126,), "float64"))
    with pytest.raises(ArgumentError, match="up to 8 dimensions"):
        producer.send(1, Spec((1,) * 9, "int8"))
    producer.send(1, Spec((125,), "float64"))
    assert tensor_of(consumer.receive(1, SECONDS)).spec.shape == (125,)


def test_what_was_not_prepared(pair: Pair) -> None:
    producer, consumer = make_bounded(pair, 2, BOUND)
    with pytest.raises(ArgumentError, match=r"call slot\(\) or fill\(\) before send"):
        producer.send(1, Spec((1,), "int8"))
    with pytest.raises(ArgumentError, match="needs the spec"):
        producer.send(1)
    for refused in (torch.zeros(2, requires_grad=True), np.array([object()]), torch.zeros(2, device="meta"), b"bytes"):
        with pytest.raises(ArgumentError):
            producer.fill(1, refused)
        with pytest.raises(ArgumentError, match="needs the spec"):
            producer.send(1)
    producer.fill(1, np.arange(3))
    producer.slot(1)  # what was filled may be gone
    with pytest.raises(ArgumentError, match="needs the spec"):
        producer.send(1)
    assert not consumer.ready()
    producer.fill(1, np.arange(3))
    producer.send(1)
    producer.flush(SECONDS)
    assert consumer.ready()
    assert np.array_equal(array_of(consumer.receive(1, SECONDS)), np.arange(3))


def test_an_error_takes_the_slot_that_was_handed_out(pair: Pair) -> None:
    """A producer that fails while it computes into its slot needs no other one."""
    producer, consumer = make_bounded(pair, 1, BOUND)
    producer.slot(1, SECONDS)[:] = b"y" * BOUND
    producer.send_value(1, "instead")
    assert consumer.receive(1, SECONDS) == "instead"


def test_a_step_that_was_prepared_may_be_sent_as_a_later_one(pair: Pair) -> None:
    producer, consumer = make_bounded(pair, 1, BOUND)
    first = producer.slot(1, SECONDS)
    second = producer.slot(2, SECONDS)
    first[:1] = b"z"
    assert second[:1] == b"z"
    producer.send(2, Spec((1,), "uint8"))
    assert bytes(tensor_of(consumer.receive(2, SECONDS)).memory) == b"z"
