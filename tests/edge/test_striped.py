"""Lanes: an edge keeps to one, a striped edge uses them all, and a slot is seen only when every stripe is there."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from tensorwire._native import Memory
from tensorwire.device import Channel, Completion, Device, RemoteView, View
from tensorwire.device.contract import Signal
from tensorwire.edge import STRIPED_FROM, Producer, Spec, StripedConsumer, StripedProducer, Word, stripes
from tensorwire.edge.static import lane_of
from tensorwire.errors import ArgumentError, WaitTimeout
from tensorwire.observe import counters
from tensorwire.testing import FaultyDevice
from tensorwire.testing.patience import patient
from tests.edge.edges import KINDS, Pair

LANES = 3
NBYTES = 5 * 4096 + 17
FIRST = 4096
SECONDS = patient(60.0)


class Wide(Channel):
    """Several channels to one peer, as one channel with lanes. Counts what goes over each lane."""

    def __init__(self, channels: list[Channel]) -> None:
        super().__init__(channels[0].device, channels[0].life)
        self._lanes = [self, *(Lane(channel) for channel in channels[1:])]
        self.inner = channels[0]
        self.sent = 0

    @property
    def lanes(self) -> Sequence[Channel]:
        return self._lanes

    def write(
        self, local: View, remote: RemoteView, signal: Signal | None = None, *, fence: bool = False
    ) -> Completion:
        self.sent += 1
        return self.inner.write(local, remote, signal, fence=fence)

    def signal(self, target: RemoteView, value: int, *, fence: bool = False) -> Completion:
        self.sent += 1
        return self.inner.signal(target, value, fence=fence)

    def read(self, local: View, remote: RemoteView) -> Completion:
        return self.inner.read(local, remote)

    def fetch_add(self, target: RemoteView, value: int, timeout: float = SECONDS) -> int:
        return self.inner.fetch_add(target, value, timeout)

    def compare_swap(self, target: RemoteView, expected: int, value: int, timeout: float = SECONDS) -> int:
        return self.inner.compare_swap(target, expected, value, timeout)

    def map(self, target: RemoteView) -> Memory | None:
        return self.inner.map(target)

    def close(self) -> None:
        self.inner.close()


class Lane(Wide):
    """A further lane."""

    def __init__(self, channel: Channel) -> None:
        Channel.__init__(self, channel.device, channel.life)
        self._lanes = [self]
        self.inner = channel
        self.sent = 0


def delayed_tcp() -> Device:
    """A device whose lanes overtake each other."""
    return FaultyDevice(KINDS["tcp"](), delay=0.0005)


@pytest.fixture(params=[*KINDS, "delayed tcp"])
def wide(request: pytest.FixtureRequest) -> Iterator[Pair]:
    """Two devices of this process with three lanes each way."""
    kind = KINDS.get(request.param, delayed_tcp)
    a, b = kind(), kind()
    there, back = ([x.connect(y.address) for _ in range(LANES)] for x, y in ((a, b), (b, a)))
    yield Pair(a, b, Wide(there), Wide(back))
    a.close()
    b.close()


def make_striped(
    pair: Pair, count: int, depth: int = 2, nbytes: int = NBYTES, **options: Any
) -> tuple[StripedProducer, StripedConsumer]:
    """An edge of so many stripes."""
    inbox, credit = pair.consumer.allocate(FIRST + depth * nbytes), pair.producer.allocate(8)
    remote = inbox.remote()
    places = [FIRST + i * nbytes for i in range(depth)]
    staging = None if pair.producer.capabilities.maps else pair.producer.allocate(depth * nbytes)
    producer = StripedProducer(
        pair.there,
        [remote.view(8 * i, 8) for i in range(count)],
        slots=[remote.view(at, nbytes) for at in places],
        source=[] if staging is None else [staging.view(i * nbytes, nbytes) for i in range(depth)],
        credit=Word(credit, 0, pair.there),
        **options,
    )
    consumer = StripedConsumer(
        [Word(inbox, 8 * i, pair.back) for i in range(count)],
        slots=[memoryview(inbox)[at : at + nbytes] for at in places],
        credit=(pair.back, credit.remote().view(0, 8)),
        **options,
    )
    return producer, consumer


@pytest.mark.parametrize("count", [1, LANES, 2 * LANES + 1])
def test_a_slot_is_seen_only_when_every_stripe_is_there(wide: Pair, count: int) -> None:
    producer, consumer = make_striped(wide, count)
    steps = 150
    wrong: list[int] = []

    def consume() -> None:
        for step in range(1, steps + 1):
            slot = consumer.receive(step, SECONDS)
            if slot is None or bytes(slot) != bytes([step]) * NBYTES:
                wrong.append(step)
            consumer.release(step)

    thread = threading.Thread(target=consume)
    thread.start()
    for step in range(1, steps + 1):
        producer.slot(step, SECONDS)[:] = bytes([step]) * NBYTES
        producer.send(step)
    producer.flush(SECONDS)
    thread.join()
    assert wrong == []


def test_every_lane_carries_its_stripe(wide: Pair) -> None:
    producer, consumer = make_striped(wide, LANES)
    before = counters.snapshot()
    producer.slot(1, SECONDS)[:] = bytes(NBYTES)
    producer.send(1)
    consumer.receive(1, SECONDS)
    done = counters.since(before)
    assert [lane.sent for lane in wide.there.lanes] == [1] * LANES  # type: ignore[attr-defined]
    assert (done.messages, done.bytes + done.mapped_bytes, done.copies) == (LANES, NBYTES, 0)


def test_one_missing_stripe_holds_the_slot_back(wide: Pair) -> None:
    producer, consumer = make_striped(wide, LANES)
    producer.slot(1, SECONDS)
    for stripe in producer._stripes[:-1]:
        stripe.send(1)
        stripe.flush(SECONDS)
    with pytest.raises(WaitTimeout):
        consumer.receive(1, 0.05)
    assert not consumer.ready(1)
    producer._stripes[-1].send(1)
    consumer.receive(1, SECONDS)
    assert consumer.ready(1)


def test_it_is_filled_and_checked_as_one_tensor(wide: Pair) -> None:
    spec = Spec((64, 101), "float32")
    producer, consumer = make_striped(wide, LANES, nbytes=spec.nbytes, spec=spec)
    tensor = np.arange(64 * 101, dtype=np.float32).reshape(101, 64).T
    producer.fill(1, tensor, SECONDS)
    producer.send(1)
    slot = consumer.receive(1, SECONDS)
    assert slot is not None
    assert (np.frombuffer(slot, np.float32).reshape(spec.shape) == tensor).all()
    with pytest.raises(ArgumentError):
        producer.fill(2, tensor.T)
    with pytest.raises(ArgumentError, match="steps grow"):
        producer.send(1)


@pytest.mark.parametrize("nbytes", [1, 4096, 4097, 3 * 4096])
def test_fewer_pages_than_stripes(wide: Pair, nbytes: int) -> None:
    producer, consumer = make_striped(wide, LANES + 1, 1, nbytes)
    content = random.Random(nbytes).randbytes(nbytes)
    producer.slot(1, SECONDS)[:] = content
    producer.send(1)
    slot = consumer.receive(1, SECONDS)
    assert slot is not None
    assert bytes(slot) == content


def test_an_edge_keeps_to_its_lane_and_edges_spread(wide: Pair) -> None:
    inbox = wide.consumer.allocate(64 * 100)
    remote = inbox.remote()
    words = [remote.view(64 * i, 8) for i in range(100)]
    used = [lane_of(wide.there, word) for word in words]
    assert used == [lane_of(wide.there, remote.view(64 * i, 8)) for i in range(100)]
    assert all(used.count(lane) >= 5 for lane in wide.there.lanes)
    for word in words:
        edge = Producer(wide.there, word)
        edge.send(1)
        edge.send(2)
    counts = [lane.sent for lane in wide.there.lanes]  # type: ignore[attr-defined]
    assert counts == [2 * used.count(lane) for lane in wide.there.lanes]


def test_a_channel_is_its_own_only_lane(pair: Pair) -> None:
    assert list(pair.there.lanes) == [pair.there]
    assert lane_of(pair.there, pair.consumer.allocate(8).remote().view()) is pair.there


def test_how_many_stripes() -> None:
    assert [stripes(n, 4) for n in (0, STRIPED_FROM - 1, STRIPED_FROM)] == [1, 1, 4]
    assert [stripes(n, 4, at_least=0) for n in (0, 4 * 4096)] == [1, 4]
    assert stripes(1 << 30, 1) == 1


def test_a_striped_edge_needs_words_and_slots(pair: Pair) -> None:
    remote = pair.consumer.allocate(64).remote()
    for arrivals, slots in (([], [remote.view(8, 8)]), ([remote.view(0, 8)], [])):
        with pytest.raises(ArgumentError, match="arrival word a stripe"):
            StripedProducer(pair.there, arrivals, slots=slots)
    with pytest.raises(ArgumentError, match="arrival word a stripe"):
        StripedConsumer([])
