"""A stream of tensors over one edge: ``target|initiator DEVICE KIND NBYTES``; the initiator produces.

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

import torch

from tensorwire.bench.actors.edge_kinds import StaticReceiver, StaticSender, make_receiver, make_sender, sizes
from tensorwire.bench.actors.edge_work import Summands, Sums
from tensorwire.bench.actors.lines import Lines, Run, check, timed
from tensorwire.bench.actors.transfer import SECONDS, counts, make_device, polled, since
from tensorwire.device import Device, RemoteRegion, connect_peer
from tensorwire.device.meeting import exchange
from tensorwire.edge import Word

_WORD = 64  # bytes in front of the producer's outbox: how far the consumer is, told at the end of a round

Part = Callable[[int, float], object]  # a step, and how many seconds to wait at most


class EdgeEnd:
    """One process's end: ``region`` is what the other one's end writes to."""

    def __init__(self, pipe: socket.socket, device: Device, nbytes: int) -> None:
        self.region = device.allocate(nbytes)
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


def initiate(lines: Lines, device: Device, kind: str, nbytes: int) -> None:
    """The producer, until its input ends."""
    with socket.socket(socket.AF_UNIX) as pipe:
        pipe.connect(lines.hello())
        end = EdgeEnd(pipe, device, _WORD + sizes(kind, nbytes, maps=device.capabilities.maps)[1])
        sender = make_sender(kind, end.channel, pipe, end.there.view(), end.region.view(_WORD), nbytes)
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


def target(lines: Lines, device: Device, kind: str, nbytes: int) -> None:
    """The consumer, until its input ends."""
    with _accepted(lines) as pipe:
        end = EdgeEnd(pipe, device, sizes(kind, nbytes, maps=device.capabilities.maps)[0])
        receiver = make_receiver(kind, end.channel, pipe, end.region.view(), end.there.view(_WORD), nbytes)
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
    """A connection of the initiator, by which the ends are connected; a path, as it may be in another namespace."""
    with tempfile.TemporaryDirectory() as folder, socket.socket(socket.AF_UNIX) as listener:
        path = f"{folder}/edge"
        listener.bind(path)
        listener.listen()
        lines.hello(path)
        return listener.accept()[0]


def alone(run: Run, part: Callable[[], object]) -> float:
    """The seconds of what an end does beside the transfer."""

    def repeat(count: int) -> None:
        for _ in range(count):
            part()

    return timed(run, repeat)


def main(role: str, kind_of_device: str, kind: str, nbytes: str) -> None:
    """Runs until its input ends."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # the peer's memory is read-only, and only read
    lines = Lines()
    with make_device(kind_of_device) as device:
        (target if role == "target" else initiate)(lines, device, kind, int(nbytes))


if __name__ == "__main__":
    main(*sys.argv[1:])
