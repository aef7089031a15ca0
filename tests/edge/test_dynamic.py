"""Dynamic edges: who may use which memory, and until when; pools of both ends."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
import torch

from tensorwire.device import RemoteView
from tensorwire.edge import DynamicConsumer, DynamicProducer, Lease, Pool, Ring, Spec
from tensorwire.edge.header import HEADER
from tensorwire.edge.pool import block_nbytes
from tensorwire.errors import ArgumentError, OutOfMemory, ProtocolError, RemoteAccessError, WaitTimeout
from tensorwire.observe import counters
from tests.edge.edges import Pair
from tests.edge.varying import LIMIT, SECONDS, array_of, make_dynamic, tensor_of, torch_of

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


def test_a_sender_that_wants_to_overwrite_waits(pair: Pair) -> None:
    producer, consumer = make_dynamic(pair, 2)
    lease = filled(producer, 1)
    assert not lease.busy
    producer.send(1, lease, SPEC)
    assert lease.busy
    with pytest.raises(ArgumentError, match=r"wait\(\) for it, or take other memory"):
        _ = lease.memory
    for _ in range(2):
        with pytest.raises(WaitTimeout):
            lease.wait(0.01)
    received = consumer.receive(1, SECONDS)
    if pair.producer.capabilities.maps:  # elsewhere it was read
        with pytest.raises(WaitTimeout):
            lease.wait(0.01)
    assert np.all(array_of(received) == 1)
    del received
    lease.wait(SECONDS)
    assert not lease.busy
    lease.memory[:] = b"\2" * NBYTES
    producer.send(2, lease, SPEC)
    assert np.all(array_of(consumer.receive(2, SECONDS)) == 2)


def test_a_send_needs_what_was_filled_for_its_step(pair: Pair) -> None:
    producer, consumer = make_dynamic(pair, 2)
    with pytest.raises(ArgumentError, match=r"nothing lies there for step 1: call fill\(1, tensor\)"):
        producer.send(1)
    producer.fill(1, np.arange(3))
    with pytest.raises(ArgumentError, match="nothing lies there for step 2"):
        producer.send(2)
    producer.fill(1, np.arange(4))  # in its place
    producer.send(1)
    assert np.array_equal(array_of(consumer.receive(1, SECONDS)), np.arange(4))
    with pytest.raises(ArgumentError, match="step 1 after 1"):
        producer.fill(1, np.arange(3))
    with pytest.raises(ArgumentError, match="nothing lies there for step 2"):
        producer.send(2)
    wrong: Any = np.arange(3)
    with pytest.raises(ArgumentError, match=r"a lease of room\(\) or fill\(\), not ndarray"):
        producer.send(2, wrong)


def test_one_tensor_for_two_consumers(pair: Pair) -> None:
    (one, first), (two, second) = make_dynamic(pair, 2), make_dynamic(pair, 2)
    before = counters.snapshot()
    lease = one.fill(1, np.arange(10))
    one.send(1)
    two.send(1, lease)
    assert np.array_equal(array_of(first.receive(1, SECONDS)), np.arange(10))
    with pytest.raises(WaitTimeout):
        lease.wait(0.01)  # the other one has not read it
    assert np.array_equal(array_of(second.receive(1, SECONDS)), np.arange(10))
    lease.wait(SECONDS)
    assert counters.since(before).copies == 1


def test_the_same_memory_step_after_step(pair: Pair) -> None:
    producer, consumer = make_dynamic(pair, 2)
    lease = filled(producer, 7)
    for step in range(1, 200):
        producer.send(step, lease, SPEC, timeout=SECONDS)
        assert np.all(array_of(consumer.receive(step, SECONDS)) == 7)
    assert len(lease._readers) <= 2


def test_a_part_of_a_lease(pair: Pair) -> None:
    producer, consumer = make_dynamic(pair, 4)
    lease = producer.room(64)
    lease.memory[:] = bytes(range(64))
    producer.send(1, lease, Spec((8,), "uint8"), offset=3)
    producer.send(2, lease, Spec((0,), "uint8"), offset=64)
    assert bytes(tensor_of(consumer.receive(1, SECONDS)).memory) == bytes(range(3, 11))
    assert bytes(tensor_of(consumer.receive(2, SECONDS)).memory) == b""
    for offset, nbytes in ((0, 65), (1, 64), (-1, 8), (65, 0)):
        with pytest.raises(ArgumentError, match="this lease of 64 bytes has no"):
            producer.send(3, lease, Spec((nbytes,), "uint8"), offset=offset)
    with pytest.raises(ArgumentError, match="has no tensor"):
        producer.send(3, lease)
    lease.release()
    with pytest.raises(ArgumentError, match="was released"):
        producer.send(3, lease, Spec((1,), "uint8"))
    assert not consumer.ready()


def test_memory_of_another_device(pair: Pair) -> None:
    producer, _ = make_dynamic(pair, 2)
    with pytest.raises(ArgumentError, match="another device"):
        producer.send(1, Pool(pair.consumer, limit=LIMIT).lease(8), Spec((8,), "uint8"))
    ring = Ring(1)
    inbox, outbox = pair.consumer.allocate(ring.nbytes), pair.producer.allocate(ring.nbytes)
    wrong = Pool(pair.consumer, limit=LIMIT)
    with pytest.raises(ArgumentError, match="the pool of an edge is of its channel's device"):
        DynamicProducer(pair.there, inbox.remote().view(), outbox.view(), ring=ring, pool=wrong)
    if not pair.consumer.capabilities.maps:
        with pytest.raises(ArgumentError, match="needs a pool to read into"):
            DynamicConsumer(pair.back, inbox.view(), outbox.remote().view(), ring=ring)


def test_tensors_of_torch_outlive_everything(pair: Pair) -> None:
    producer, consumer = make_dynamic(pair, 4, access="write")
    pool = producer._pool
    producer.fill(1, torch.arange(24.0).view(2, 3, 4))
    producer.send(1)
    tensor = torch_of(consumer.receive(1, SECONDS))
    part = tensor[1].t()
    del tensor, producer, consumer  # the pool knows what is lent
    for _ in range(20):
        pool.lease(96).memory[:] = b"\xff" * 96
    assert torch.equal(part, torch.arange(12.0, 24.0).view(3, 4).t())
    if pair.producer.capabilities.maps:
        assert pool.leased_bytes == block_nbytes(96)
    del part
    ring: Any = pool._borrowers[0]
    ring.wait_until(lambda: not ring.in_flight, SECONDS)  # the credit may be on its way
    assert pool.leased_bytes == 0


def test_what_is_looked_at_in_place_is_read_only_unless_said(pair: Pair) -> None:
    for access in ("read", "write"):
        producer, consumer = make_dynamic(pair, 2, access=access)
        producer.send(1, filled(producer, 3), SPEC)
        memory = tensor_of(consumer.receive(1, SECONDS)).memory
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


def test_memory_that_another_edge_of_the_pool_got_back(pair: Pair) -> None:
    """An edge that is idle does not keep what its consumer is done with."""
    ring = Ring(4)
    pool, ends = Pool(pair.producer, limit=2 << 20), []
    for _ in range(2):
        inbox, outbox = pair.consumer.allocate(ring.nbytes), pair.producer.allocate(ring.nbytes)
        into = Pool(pair.consumer, limit=LIMIT)
        producer = DynamicProducer(pair.there, inbox.remote().view(), outbox.view(), ring=ring, pool=pool)
        ends.append((producer, DynamicConsumer(pair.back, inbox.view(), outbox.remote().view(), ring=ring, pool=into)))
    (idle, consumer), (other, _) = ends
    for step in (1, 2):
        idle.send(step, filled(idle, step, 1 << 20), Spec((1 << 20,), "uint8"))
        consumer.receive(step, SECONDS)
    idle._ring._outbox.region.wait(idle._ring._outbox.offset, 2, SECONDS, pair.there)
    assert other.room(2 << 20, SECONDS).nbytes == 2 << 20


def test_a_consumer_whose_pool_is_full_may_try_again(pair: Pair) -> None:
    if pair.consumer.capabilities.maps:
        pytest.skip("this device reads in place")
    producer, consumer = make_dynamic(pair, 4)
    consumer._pool = Pool(pair.consumer, limit=1 << 20)
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
    assert len(consumer._mapped) <= 1


def test_slabs_come_and_go(pair: Pair) -> None:
    """A pool that gave its slabs back, and got others: the consumer sees the new ones."""
    producer, consumer = make_dynamic(pair, 2)
    for step in range(1, 30):
        producer.send(step, filled(producer, step, 300_000 + step), Spec((300_000 + step,), "uint8"), timeout=SECONDS)
        assert np.all(array_of(consumer.receive(step, SECONDS)) == step)
        outbox = producer._ring._outbox
        outbox.region.wait(outbox.offset, step, SECONDS, pair.there)
        producer._ring.collect()
        producer._pool.trim()
        assert producer._pool.registered_bytes == 0
        assert len(consumer._mapped) <= 1


@pytest.mark.parametrize(
    ("field", "value", "why"),
    [
        (40 + 1, b"\x09", "malformed header"),
        (24, (2**40).to_bytes(8, "little"), "malformed header"),
        (40 + 2, (2**47).to_bytes(6, "little"), "malformed|refused"),
        (40 + 8, b"verbs\0\0\0", "same kind"),
    ],
)
def test_headers_that_lead_elsewhere(pair: Pair, field: int, value: bytes, why: str) -> None:
    """Another access, an offset, a length, or a device: refused, and the right one is received afterwards.

    In the first step, when the consumer has never seen the region, and in the second.
    """
    producer, consumer = make_dynamic(pair, 2)
    for step in (1, 2):
        producer.send(step, filled(producer, step), SPEC)
        producer.flush(SECONDS)
        consumer._ring.inbox.region.wait(0, step, SECONDS, pair.back)
        header = consumer._ring.memory[consumer._ring.ring.slot(step - 1) :][:HEADER]
        right = bytes(header)
        header[field : field + len(value)] = value
        if len(value) == 6:  # a region said to be larger than it is
            header[24:32] = (2**46).to_bytes(8, "little")
        with pytest.raises((ProtocolError, RemoteAccessError), match=why):
            consumer.receive(step, SECONDS)
        header[:] = right
        assert np.all(array_of(consumer.receive(step, SECONDS)) == step)
