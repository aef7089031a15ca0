"""The stream of ``tensorwire bench edge`` over other edges: ``target|initiator DEVICE NBYTES bounded|dynamic``."""

from __future__ import annotations

import functools
import sys

import torch

from tensorwire.bench.actors import edge
from tensorwire.bench.actors.edge import DEPTH, PAGE, EdgeEnd, Kind, Receiver, Sender, tensor_of
from tensorwire.bench.actors.edge_work import Summands
from tensorwire.bench.actors.lines import fill
from tensorwire.edge import ConsumerEnd, Lease, Received, Spec, connect_edge
from tensorwire.edge.pool import SLAB, block_nbytes

_SECONDS = 120.0  # only a guard against hangs


class BoundedSender(Sender):
    """The bound is the size itself. Its first steps, before all rounds, tell which memory its banks are."""

    def __init__(self, end: EdgeEnd, nbytes: int) -> None:
        self._producer = connect_edge(end.channel, end.pipe, "producer", depth=DEPTH, bound=nbytes)
        self._spec = Spec((nbytes // 4,), "float32")
        self._slots = []
        for step in range(1, DEPTH + 1):
            self._slots.append(self._producer.slot(step))
            self._producer.send(step, self._spec)

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

    def __init__(self, end: EdgeEnd, nbytes: int) -> None:
        self._producer = connect_edge(end.channel, end.pipe, "producer", depth=DEPTH, limit=_limit(nbytes))
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
    """Its tensors lie where the header says. ``first``: steps before all rounds."""

    def __init__(self, consumer: ConsumerEnd, first: int) -> None:
        self._consumer, self._first = consumer, first
        self.latest = memoryview(b"")
        self._received: Received | None = None
        for step in range(1 - first, 1):
            self.receive(step, _SECONDS)
            self.release(step)

    def receive(self, step: int, seconds: float) -> None:
        self._received = self._consumer.receive(self._first + step, seconds)
        self.latest = self._received.memory

    def tensor(self, step: int) -> torch.Tensor:
        return tensor_of(self.latest)

    def release(self, step: int) -> None:
        assert self._received is not None
        self._received.release()


def _consumer(end: EdgeEnd, nbytes: int, bound: int | None) -> ConsumerEnd:
    return connect_edge(end.channel, end.pipe, "consumer", depth=DEPTH, bound=bound, limit=_limit(nbytes))


def _limit(nbytes: int) -> int:
    return DEPTH * max(SLAB, block_nbytes(nbytes))


_page_each = functools.partial(Kind, lambda nbytes, maps: (PAGE, PAGE))  # such an edge has its memory for itself
KINDS = {
    "bounded": _page_each(BoundedSender, lambda end, n: VaryingReceiver(_consumer(end, n, n), DEPTH)),
    "dynamic": _page_each(DynamicSender, lambda end, n: VaryingReceiver(_consumer(end, n, None), 0)),
}


def main(role: str, kind_of_device: str, nbytes: str, kind: str) -> None:
    """Runs until its input ends."""
    edge.main(role, kind_of_device, nbytes, kind=KINDS[kind])


if __name__ == "__main__":
    main(*sys.argv[1:])
