"""The three kinds of edges as ``bench edge`` uses them: float32 tensors of one size, at most two in flight."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch

from tensorwire.bench.actors.edge_work import Summands
from tensorwire.bench.actors.lines import fill
from tensorwire.device import Channel, RemoteView, View
from tensorwire.device.meeting import Meeting
from tensorwire.edge import (
    BoundedProducer,
    Consumer,
    ConsumerEnd,
    DynamicProducer,
    Lease,
    Producer,
    Received,
    Spec,
    Word,
    connect_edge,
)
from tensorwire.edge.pool import SLAB, block_nbytes

DEPTH = 2
_PAGE = 4096
_SECONDS = 120.0  # only a guard against hangs


def tensor_of(memory: Any) -> torch.Tensor:
    """The values in ``memory``."""
    return torch.frombuffer(memory, dtype=torch.float32)


class Sender(Protocol):
    """A producer. What waits too long raises `WaitTimeout` before anything was sent."""

    def fill(self, round: int) -> None:
        """Puts the round's bytes where ``send`` finds them."""

    def send(self, step: int, seconds: float) -> None:
        """The transfer alone: what lies there."""

    def make(self, step: int, summands: Summands, turn: int, seconds: float) -> None:
        """Produces a round's tensor, its ``turn`` th, in registered memory, and sends it as ``step``."""


class Receiver(Protocol):
    """A consumer. ``latest``: the bytes that were received last, for as long as nothing new is sent."""

    latest: memoryview

    def receive(self, step: int, seconds: float) -> None:
        """Waits for ``step``."""

    def tensor(self, step: int) -> torch.Tensor:
        """What was received."""

    def release(self, step: int) -> None:
        """Gives its slot back."""


class StaticSender(Sender):
    """The tensors over the slots are made once."""

    def __init__(self, channel: Channel, inbox: RemoteView, outbox: View, nbytes: int) -> None:
        maps = channel.device.capabilities.maps
        region = outbox.region
        self._producer = Producer(
            channel,
            inbox.region.view(inbox.offset, 8),
            slots=[inbox.region.view(inbox.offset + at, nbytes) for at in static_slots(nbytes)],
            source=[] if maps else [region.view(outbox.offset + at, nbytes) for at in static_slots(nbytes)],
            credit=Word(region, outbox.offset, channel),
        )
        self._slots = [self._producer.slot(step) for step in (DEPTH, DEPTH - 1)]
        self.tensors = [tensor_of(slot) for slot in self._slots]

    def fill(self, round: int) -> None:
        for slot in self._slots:
            fill(slot, round)

    def send(self, step: int, seconds: float) -> None:
        self._producer.slot(step, seconds)
        self._producer.send(step)

    def make(self, step: int, summands: Summands, turn: int, seconds: float) -> None:
        self._producer.slot(step, seconds)
        summands.add(turn, self.tensors[step % DEPTH])
        self._producer.send(step)


def static_slots(nbytes: int) -> Sequence[int]:
    """Where the slots of a static edge begin, after its word."""
    return [_PAGE + i * _pages(nbytes) for i in range(DEPTH)]


def _pages(nbytes: int) -> int:
    return -(-nbytes // _PAGE) * _PAGE


class StaticReceiver(Receiver):
    """The tensors over the slots are made once."""

    def __init__(self, channel: Channel, inbox: View, outbox: RemoteView, nbytes: int) -> None:
        region = inbox.region
        self._slots = [region.view(inbox.offset + at, nbytes).buffer for at in static_slots(nbytes)]
        credit = (channel, outbox.region.view(outbox.offset, 8))
        self._consumer = Consumer(Word(region, inbox.offset, channel), slots=self._slots, credit=credit)
        self.tensors = [tensor_of(slot) for slot in self._slots]
        self.latest = self._slots[0]

    def receive(self, step: int, seconds: float) -> None:
        self._consumer.receive(step, seconds)
        self.latest = self._slots[step % DEPTH]

    def tensor(self, step: int) -> torch.Tensor:
        return self.tensors[step % DEPTH]

    def release(self, step: int) -> None:
        self._consumer.release(step)


class BoundedSender(Sender):
    """The bound is the size itself. Its first steps, before all rounds, tell which memory its banks are."""

    def __init__(self, producer: BoundedProducer) -> None:
        self._producer = producer
        self._spec = Spec((producer.bound // 4,), "float32")
        self._slots = []
        for step in range(1, DEPTH + 1):
            self._slots.append(producer.slot(step))
            producer.send(step, self._spec)

    def fill(self, round: int) -> None:
        for slot in self._slots:
            fill(slot, round)

    def send(self, step: int, seconds: float) -> None:
        self._producer.slot(DEPTH + step, seconds)
        self._producer.send(DEPTH + step, self._spec)

    def make(self, step: int, summands: Summands, turn: int, seconds: float) -> None:
        summands.add(turn, tensor_of(self._producer.slot(DEPTH + step, seconds)))
        self._producer.send(DEPTH + step, self._spec)


class DynamicSender(Sender):
    """A lease a tensor; for the transfer alone one that is sent again and again."""

    def __init__(self, producer: DynamicProducer, nbytes: int) -> None:
        self._producer = producer
        self._spec = Spec((nbytes // 4,), "float32")
        self._lease: Lease | None = None

    def fill(self, round: int) -> None:
        self._lease = None
        self._lease = self._producer.room(self._spec.nbytes)
        fill(self._lease.memory, round)

    def send(self, step: int, seconds: float) -> None:
        assert self._lease is not None
        self._producer.send(step, self._lease, self._spec, seconds)

    def make(self, step: int, summands: Summands, turn: int, seconds: float) -> None:
        self._lease = None
        lease = self._producer.room(self._spec.nbytes, seconds)
        summands.add(turn, tensor_of(lease.memory))
        self._producer.send(step, lease, self._spec, seconds)


class VaryingReceiver(Receiver):
    """Of a bounded or dynamic edge: its tensors lie where the header says."""

    def __init__(self, consumer: ConsumerEnd, first: int) -> None:
        self._consumer, self._first = consumer, first
        self.latest = memoryview(b"")
        self._received: Received | None = None
        for step in range(1, first + 1):
            self._take(step, _SECONDS)
            self.release(step)

    def _take(self, step: int, seconds: float) -> None:
        self._received = self._consumer.receive(step, seconds)
        self.latest = self._received.memory

    def receive(self, step: int, seconds: float) -> None:
        self._take(self._first + step, seconds)

    def tensor(self, step: int) -> torch.Tensor:
        return tensor_of(self.latest)

    def release(self, step: int) -> None:
        assert self._received is not None
        self._received.release()


def sizes(kind: str, nbytes: int, *, maps: bool) -> tuple[int, int]:
    """Bytes of the consumer's inbox and of the producer's outbox; ``maps``: a slot there needs none here."""
    if kind != "static":  # it has its memory for itself
        return _PAGE, _PAGE
    whole = _PAGE + DEPTH * _pages(nbytes)
    return whole, _PAGE if maps else whole


def make_sender(kind: str, channel: Channel, pipe: Meeting, inbox: RemoteView, outbox: View, nbytes: int) -> Sender:
    """The producer of an edge for tensors of ``nbytes``."""
    if kind == "static":
        return StaticSender(channel, inbox, outbox, nbytes)
    end = connect_edge(channel, pipe, "producer", depth=DEPTH, bound=_bound(kind, nbytes), limit=_limit(nbytes))
    if isinstance(end, BoundedProducer):
        return BoundedSender(end)
    assert isinstance(end, DynamicProducer)
    return DynamicSender(end, nbytes)


def make_receiver(kind: str, channel: Channel, pipe: Meeting, inbox: View, outbox: RemoteView, nbytes: int) -> Receiver:
    """Its consumer."""
    if kind == "static":
        return StaticReceiver(channel, inbox, outbox, nbytes)
    end = connect_edge(channel, pipe, "consumer", depth=DEPTH, bound=_bound(kind, nbytes), limit=_limit(nbytes))
    return VaryingReceiver(end, DEPTH if kind == "bounded" else 0)


def _bound(kind: str, nbytes: int) -> int | None:
    return nbytes if kind == "bounded" else None


def _limit(nbytes: int) -> int:
    return DEPTH * max(SLAB, block_nbytes(nbytes))
