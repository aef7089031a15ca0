"""A stream of tensors over one static edge: ``target|initiator DEVICE NBYTES``; the initiator produces.

Two are on their way at most: the producer makes the next one while the consumer is at the last. A round is over when
the consumer has given everything back. What a round does is its word:

``transfer``: the bytes lie in registered memory before; they are sent, received, and their slot is given back.
``whole``: two tensors are added into registered memory, their sum is sent and summed up.
``alone``: what both ends do in ``whole``, in the same memory, but nothing is sent and nobody waits: the least it takes.
"""

from __future__ import annotations

import functools
import socket
import sys
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from tensorwire.bench.actors.edge_work import Summands, Sums
from tensorwire.bench.actors.lines import Lines, Run, check, fill, timed
from tensorwire.bench.actors.transfer import SECONDS, counts, make_device, polled, since
from tensorwire.device import Device, RemoteRegion, connect_peer
from tensorwire.device.meeting import exchange
from tensorwire.edge import Consumer, Producer, Word

DEPTH = 2
PAGE = 4096
_WORD = 64  # bytes in front of the producer's outbox: how far the consumer is, told at the end of a round

Part = Callable[[int, float], object]  # a step, and how many seconds to wait at most


class Sender(Protocol):
    """A producer. What waits too long raises `WaitTimeout` before anything was sent."""

    def fill(self, round: int) -> None: ...  # puts the round's bytes where `send` finds them
    def send(self, step: int, seconds: float) -> None: ...  # the transfer alone

    # Produces a round's tensor, its ``turn`` th, in registered memory, and sends it as ``step``.
    def make(self, step: int, summands: Summands, turn: int, seconds: float) -> None: ...


class Receiver(Protocol):
    """A consumer. ``latest``: the bytes that were received last, for as long as nothing new is sent."""

    latest: memoryview

    def receive(self, step: int, seconds: float) -> None: ...
    def tensor(self, step: int) -> torch.Tensor: ...
    def release(self, step: int) -> None: ...


class EdgeEnd:
    """One process's end: ``region`` is what the other one's end writes to."""

    def __init__(self, pipe: socket.socket, device: Device, nbytes: int) -> None:
        self.pipe, self.region = pipe, device.allocate(nbytes)
        self.channel = connect_peer(device, pipe)
        self.there = RemoteRegion.unpack(exchange(pipe, self.region.remote().pack(), SECONDS))
        self.at = 0

    def repeat(self, part: Part, count: int) -> None:
        """The next steps."""
        for step in range(self.at + 1, self.at + count + 1):
            part(step, SECONDS)
        self.at += count

    def warm(self, part: Part, count: int) -> None:
        """The same, always awake (see ``polled``)."""
        for step in range(self.at + 1, self.at + count + 1):
            polled(functools.partial(part, step))
        self.at += count


@dataclass(frozen=True)
class Kind:
    """How an edge is made. ``sizes(nbytes, maps)``: bytes of the consumer's inbox and of the producer's outbox."""

    sizes: Callable[[int, bool], tuple[int, int]]
    sender: Callable[[EdgeEnd, int], Sender]
    receiver: Callable[[EdgeEnd, int], Receiver]


def tensor_of(memory: Any) -> torch.Tensor:
    """The values in ``memory``."""
    return torch.frombuffer(memory, dtype=torch.float32)


def _slots(nbytes: int) -> list[int]:
    """Where the slots begin, after the edge's word; and where they end."""
    return [PAGE + i * -(-nbytes // PAGE) * PAGE for i in range(DEPTH + 1)]


class StaticSender(Sender):
    """The tensors over the slots are made once."""

    def __init__(self, end: EdgeEnd, nbytes: int) -> None:
        *starts, _ = _slots(nbytes)
        maps, region = end.channel.device.capabilities.maps, end.region
        self._producer = Producer(
            end.channel,
            end.there.view(0, 8),
            slots=[end.there.view(at, nbytes) for at in starts],
            source=[] if maps else [region.view(_WORD + at, nbytes) for at in starts],
            credit=Word(region, _WORD, end.channel),
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


class StaticReceiver(Receiver):
    """The tensors over the slots are made once."""

    def __init__(self, end: EdgeEnd, nbytes: int) -> None:
        *starts, _ = _slots(nbytes)
        self._slots = [end.region.view(at, nbytes).buffer for at in starts]
        credit = (end.channel, end.there.view(_WORD, 8))
        self._consumer = Consumer(Word(end.region, 0, end.channel), slots=self._slots, credit=credit)
        self.tensors = [tensor_of(slot) for slot in self._slots]
        self.latest = self._slots[0]

    def receive(self, step: int, seconds: float) -> None:
        self._consumer.receive(step, seconds)
        self.latest = self._slots[step % DEPTH]

    def tensor(self, step: int) -> torch.Tensor:
        return self.tensors[step % DEPTH]

    def release(self, step: int) -> None:
        self._consumer.release(step)


# A slot that is mapped needs no memory of the producer's.
STATIC = Kind(lambda n, maps: (_slots(n)[-1], PAGE if maps else _slots(n)[-1]), StaticSender, StaticReceiver)


def initiate(lines: Lines, device: Device, kind: Kind, nbytes: int) -> None:
    """The producer, until its input ends."""
    with socket.socket(socket.AF_UNIX) as pipe:
        pipe.connect(lines.hello())
        end = EdgeEnd(pipe, device, _WORD + kind.sizes(nbytes, device.capabilities.maps)[1])
        sender = kind.sender(end, nbytes)
    summands, done = Summands(nbytes // 4), Word(end.region, 0, end.channel)
    before = 0  # steps of earlier rounds

    def repeat(part: Part, count: int) -> None:
        end.repeat(part, count)
        done.wait(end.at, SECONDS)

    def warm(part: Part, count: int) -> None:
        end.warm(part, count)
        polled(functools.partial(done.wait, end.at))

    def whole(step: int, seconds: float) -> None:
        sender.make(step, summands, step - before, seconds)

    for run in lines.runs():
        before, earlier = end.at, counts()
        if run.word == "transfer":
            sender.fill(run.round)
        else:
            summands.prepare(run.round)
        part = sender.send if run.word == "transfer" else whole
        if run.word == "alone":
            assert isinstance(sender, StaticSender)
            seconds = alone(run, functools.partial(summands.add, 1, sender.tensors[0]))
        else:
            seconds = timed(run, functools.partial(repeat, part), functools.partial(warm, part))
        lines.answer(seconds, **since(earlier))


def target(lines: Lines, device: Device, kind: Kind, nbytes: int) -> None:
    """The consumer, until its input ends."""
    with _accepted(lines) as pipe:
        end = EdgeEnd(pipe, device, kind.sizes(nbytes, device.capabilities.maps)[0])
        receiver = kind.receiver(end, nbytes)
    sums, done = Sums(nbytes // 4), end.there.view(0, 8)

    def transfer(step: int, seconds: float) -> None:
        receiver.receive(step, seconds)
        receiver.release(step)

    def whole(step: int, seconds: float) -> None:
        receiver.receive(step, seconds)
        sums.take(receiver.tensor(step))
        receiver.release(step)

    for run in lines.runs():
        earlier = counts()
        if run.word == "alone":
            assert isinstance(receiver, StaticReceiver)
            lines.answer(alone(run, functools.partial(sums.take, receiver.tensors[1])))
            sums.found.clear()
            continue
        part = transfer if run.word == "transfer" else whole
        end.warm(part, run.warm)
        end.channel.signal(done, end.at)
        end.repeat(part, run.count)
        end.channel.signal(done, end.at)
        if run.word == "transfer":
            check(receiver.latest, run.round)
        else:
            sums.check(run.round, run.warm + run.count, receiver.latest)
        lines.answer(**since(earlier))


def _accepted(lines: Lines) -> socket.socket:
    """A connection of the initiator, by which the ends are connected."""
    with tempfile.TemporaryDirectory() as folder, socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"{folder}/edge")
        listener.listen()
        lines.hello(f"{folder}/edge")
        return listener.accept()[0]


def alone(run: Run, part: Callable[[], object]) -> float:
    """The seconds of what an end does beside the transfer."""

    def repeat(count: int) -> None:
        for _ in range(count):
            part()

    return timed(run, repeat)


def main(role: str, kind_of_device: str, nbytes: str, *, kind: Kind = STATIC) -> None:
    """Runs until its input ends."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # the peer's memory is read-only, and only read
    lines = Lines()
    with make_device(kind_of_device) as device:
        (target if role == "target" else initiate)(lines, device, kind, int(nbytes))


if __name__ == "__main__":
    main(*sys.argv[1:])
