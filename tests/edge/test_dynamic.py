"""Dynamic edges: who may use which memory, and until when; pools of both ends."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
import torch

from tensorwire.device import RemoteView
from tensorwire.edge import DynamicProducer, Lease, Pool, Spec
from tensorwire.edge.header import HEADER
from tensorwire.edge.pool import block_nbytes
from tensorwire.errors import ArgumentError, OutOfMemory, ProtocolError, RemoteAccessError, WaitTimeout
from tests.edge.edges import Pair
from tests.edge.varying import (
    LIMIT,
    SECONDS,
    array_of,
    arrived,
    bank_of,
    group_of,
    incoming,
    make_dynamic,
    torch_of,
)

NBYTES = 1000
SPEC = Spec((NBYTES,), "uint8")


def filled(producer: DynamicProducer, value: int, nbytes: int = NBYTES) -> Lease:
    lease = producer.room(nbytes, SECONDS)
    lease.memory[:] = bytes([value]) * nbytes
    return lease


def test_a_sender_may_let_go_at_once(pair: Pair) -> None:
    """What it had sent is not what the next rooms are made of."""
    producer, consumer = make_dynamic(pair, 8)
    for step in range(1, 9):
        with filled(producer, step) as lease:
            producer.send(step, lease, SPEC)
        del lease
    for value in range(100, 120):
        filled(producer, value)
    for step in range(1, 9):
        assert np.all(array_of(consumer.receive(step, SECONDS)) == step)


def test_the_same_memory_step_after_step(pair: Pair) -> None:
    producer, consumer = make_dynamic(pair, 2)
    lease = filled(producer, 7)
    for step in range(1, 200):
        producer.send(step, lease, SPEC, SECONDS)
        assert np.all(array_of(consumer.receive(step, SECONDS)) == 7)
    assert len(group_of(producer)._payloads) <= 2


def test_memory_of_another_device(pair: Pair) -> None:
    producer, _ = make_dynamic(pair, 2)
    with pytest.raises(ArgumentError, match="another device"):
        producer.send(1, Pool(pair.consumer, limit=LIMIT).lease(8), Spec((8,), "uint8"))


def test_what_does_not_lie_in_its_lease(pair: Pair) -> None:
    producer, consumer = make_dynamic(pair, 4)
    lease = producer.room(64)
    with pytest.raises(ArgumentError, match="this lease of 64 bytes has no"):
        producer.send(1, lease, Spec((65,), "uint8"))
    with pytest.raises(ArgumentError, match="has no tensor"):
        producer.send(1, lease)
    lease.release()
    with pytest.raises(ArgumentError, match="was released"):
        producer.send(1, lease, Spec((1,), "uint8"))
    assert not consumer.ready()


def test_a_send_needs_what_was_filled_for_its_step(pair: Pair) -> None:
    producer, consumer = make_dynamic(pair, 2)
    with pytest.raises(ArgumentError, match=r"nothing was written for step 1: call fill\(1, tensor\)"):
        producer.send(1)
    producer.fill(1, np.arange(3))
    with pytest.raises(ArgumentError, match="nothing was written for step 2"):
        producer.send(2)
    producer.fill(1, np.arange(4))  # in its place
    producer.send(1)
    assert np.array_equal(array_of(consumer.receive(1, SECONDS)), np.arange(4))
    with pytest.raises(ArgumentError, match="step 1 after 1"):
        producer.fill(1, np.arange(3))
    with pytest.raises(ArgumentError, match="nothing was written for step 2"):
        producer.send(2)
    wrong: Any = np.arange(3)
    with pytest.raises(ArgumentError, match=r"a lease of room\(\), not ndarray"):
        producer.send(2, wrong)


def test_tensors_of_torch_outlive_everything(pair: Pair) -> None:
    producer, consumer = make_dynamic(pair, 4, access="write")
    pool = producer._pool
    producer.fill(1, torch.arange(24.0).view(2, 3, 4))
    producer.send(1)
    tensor = torch_of(consumer.receive(1, SECONDS))
    part = tensor[1].t()
    group = group_of(producer)
    del tensor, producer, consumer  # the group knows what is lent
    for _ in range(20):
        pool.lease(96).memory[:] = b"\xff" * 96
    assert torch.equal(part, torch.arange(12.0, 24.0).view(3, 4).t())
    if pair.producer.capabilities.maps:
        assert pool.leased_bytes == block_nbytes(96)
    del part
    group.drain(SECONDS)  # the credit may be on its way
    assert pool.leased_bytes == 0


def test_what_is_looked_at_in_place_is_read_only_unless_said(pair: Pair) -> None:
    for access in ("read", "write"):
        producer, consumer = make_dynamic(pair, 2, access=access)
        producer.send(1, filled(producer, 3), SPEC)
        memory = consumer.receive(1, SECONDS).memory
        assert memory.readonly == (access == "read" and pair.producer.capabilities.maps)


def test_a_producer_waits_for_room(pair: Pair) -> None:
    """Its pool is full of what the consumer has yet to read."""
    producer, consumer = make_dynamic(pair, 8, limit=3 << 20)
    for step in (1, 2, 3):
        producer.send(step, filled(producer, step, 1 << 20), Spec((1 << 20,), "uint8"))
    for _ in range(2):
        with pytest.raises(WaitTimeout):
            producer.room(1 << 20, 0.01)
    got: list[Lease] = []
    thread = threading.Thread(target=lambda: got.append(producer.room(1 << 20, SECONDS)))
    thread.start()
    assert np.all(array_of(consumer.receive(1, SECONDS)) == 1)
    thread.join(SECONDS)
    assert got[0].memory.nbytes == 1 << 20
    for step in (2, 3):
        assert np.all(array_of(consumer.receive(step, SECONDS)) == step)
    mine = [producer.room(1 << 20, SECONDS) for _ in range(2)]
    with pytest.raises(OutOfMemory, match="raise its limit"):  # nothing is on its way: waiting would be in vain
        producer.room(1 << 20, SECONDS)
    del mine


def test_a_consumer_whose_pool_is_full_may_try_again(pair: Pair) -> None:
    if pair.consumer.capabilities.maps:
        pytest.skip("this device reads in place")
    producer, consumer = make_dynamic(pair, 4)
    incoming(consumer)._pool = Pool(pair.consumer, limit=1 << 20)
    for step in (1, 2):
        producer.send(step, filled(producer, step, 1 << 20), Spec((1 << 20,), "uint8"))
    first = consumer.receive(1, SECONDS)
    for _ in range(2):
        with pytest.raises(OutOfMemory):
            consumer.receive(2, SECONDS)
    del first
    assert np.all(array_of(consumer.receive(2, SECONDS)) == 2)


def test_closed_slabs_cannot_be_reached(pair: Pair) -> None:
    producer, consumer = make_dynamic(pair, 4)
    pool = producer._pool
    producer.send(1, filled(producer, 1), SPEC)
    consumer.receive(1, SECONDS)
    lease = filled(producer, 2)
    remote = RemoteView(lease.slab.region.remote("read"), lease.offset, NBYTES)
    target = pair.consumer.allocate(NBYTES)
    pair.back.read(target.view(), remote).wait(SECONDS)
    stale = lease.slab
    producer.send(2, lease, SPEC)
    stale.region.close()  # as no producer does: this one is in flight
    with pytest.raises(RemoteAccessError):
        pair.back.read(target.view(), remote).wait(SECONDS)
    for _ in range(2):
        with pytest.raises(RemoteAccessError):
            consumer.receive(2, SECONDS)
    assert pool.leased_bytes > 0
    assert len(incoming(consumer)._mapped) <= 1


def test_slabs_come_and_go(pair: Pair) -> None:
    """A pool that gave its slabs back, and got others: the consumer sees the new ones."""
    producer, consumer = make_dynamic(pair, 2)
    for step in range(1, 30):
        producer.send(step, filled(producer, step, 300_000 + step), Spec((300_000 + step,), "uint8"), timeout=SECONDS)
        assert np.all(array_of(consumer.receive(step, SECONDS)) == step)
        group_of(producer).drain(SECONDS)
        producer._pool.trim()
        assert producer._pool.registered_bytes == 0
        assert len(incoming(consumer)._mapped) <= 1


@pytest.mark.parametrize(
    ("field", "value", "why"),
    [
        (40 + 1, b"\x09", "malformed header"),
        (24, (2**40).to_bytes(8, "little"), "malformed header"),
        (40 + 2, (2**47).to_bytes(6, "little"), "malformed|refused|points beyond"),
        (40 + 8, b"verbs\0\0\0", "points to no memory of"),
    ],
)
def test_headers_with_another_target_are_refused(pair: Pair, field: int, value: bytes, why: str) -> None:
    """Another access, an offset, a length, or a device: refused, and the right one is received afterwards.

    In the first step, when the consumer has never seen the region, and in the second.
    """
    producer, consumer = make_dynamic(pair, 2)
    for step in (1, 2):
        producer.send(step, filled(producer, step), SPEC)
        producer.flush(SECONDS)
        arrived(consumer, step)
        header = bank_of(consumer, step)[:HEADER]
        right = bytes(header)
        header[field : field + len(value)] = value
        if len(value) == 6:  # a region said to be larger than it is
            header[24:32] = (2**46).to_bytes(8, "little")
        with pytest.raises((ProtocolError, RemoteAccessError), match=why):
            consumer.receive(step, SECONDS)
        header[:] = right
        assert np.all(array_of(consumer.receive(step, SECONDS)) == step)
