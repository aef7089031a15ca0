"""A tensor born in the consumer's slot, there and back: ``target|initiator DEVICE NBYTES``.

Two static edges, one each way, each of one slot. On a device that maps, a step is a signal alone; on another one the
slot is a part of our own memory that ``send`` writes across.
"""

from __future__ import annotations

import sys

from tensorwire.bench.actors.lines import Lines, Run, check, fill, timed
from tensorwire.bench.actors.transfer import SECONDS, counts, make_device, polled, since
from tensorwire.device import Device, RemoteRegion
from tensorwire.edge import Consumer, Producer, Word

_ARRIVAL, _CREDIT, _SLOT = 0, 64, 4096


class Ends:
    """This process's producer on one edge and consumer on the other, over one region a process."""

    def __init__(self, lines: Lines, device: Device, nbytes: int) -> None:
        self.region = device.allocate(_SLOT + nbytes)
        told = lines.hello(f"{device.address.hex()} {self.region.remote().pack().hex()}").split()
        channel = device.connect(bytes.fromhex(told[0]))
        there = RemoteRegion.unpack(bytes.fromhex(told[1]))
        self.producer = Producer(
            channel,
            there.view(_ARRIVAL, 8),
            slots=[there.view(_SLOT, nbytes)],
            source=[] if device.capabilities.maps else [device.allocate(nbytes).view()],
            credit=Word(self.region, _CREDIT, channel),
        )
        self.consumer = Consumer(
            Word(self.region, _ARRIVAL, channel),
            slots=[self.region.view(_SLOT, nbytes).buffer],
            credit=(channel, there.view(_CREDIT, 8)),
        )
        self.at = 0

    def warm_there_and_back(self, count: int) -> None:
        """``there_and_back``, always awake (see ``polled``)."""
        for _ in range(count):
            self.at += 1
            polled(lambda seconds: self.producer.slot(self.at, seconds))
            self.producer.send(self.at)
            polled(lambda seconds: self.consumer.receive(self.at, seconds))
            self.consumer.release(self.at)

    def warm_back(self, count: int) -> None:
        """``back``, always awake."""
        for _ in range(count):
            self.at += 1
            polled(lambda seconds: self.consumer.receive(self.at, seconds))
            self.consumer.release(self.at)
            polled(lambda seconds: self.producer.slot(self.at, seconds))
            self.producer.send(self.at)

    def there_and_back(self, count: int) -> None:
        """Sends, then receives; the initiator's part."""
        producer, consumer = self.producer, self.consumer
        for step in range(self.at + 1, self.at + count + 1):
            producer.slot(step, SECONDS)
            producer.send(step)
            consumer.receive(step, SECONDS)
            consumer.release(step)
        self.at += count

    def back(self, count: int) -> None:
        """Receives, then sends; the target's part."""
        producer, consumer = self.producer, self.consumer
        for step in range(self.at + 1, self.at + count + 1):
            consumer.receive(step, SECONDS)
            consumer.release(step)
            producer.slot(step, SECONDS)
            producer.send(step)
        self.at += count


def measure(ends: Ends, run: Run, role: str) -> tuple[float, dict[str, float]]:
    """The round's bytes are born in the slot before the first step; later steps find them there."""
    # The slot is ours once the step before it was given back.
    slot = ends.producer.slot(ends.at + 1, SECONDS)
    fill(slot, run.round)
    before = counts()
    if role == "initiator":
        seconds = timed(run, ends.there_and_back, ends.warm_there_and_back)
    else:
        seconds = timed(run, ends.back, ends.warm_back)
    counted = since(before)
    ends.producer.flush(SECONDS)
    got = ends.consumer.receive(ends.at, SECONDS)
    check(got, run.round)
    return seconds, counted


def main(role: str, kind: str, nbytes: str) -> None:
    """Runs until its input ends."""
    lines = Lines()
    with make_device(kind) as device:
        ends = Ends(lines, device, int(nbytes))
        for run in lines.runs():
            seconds, counted = measure(ends, run, role)
            lines.answer(seconds if role == "initiator" else 0.0, **counted)


if __name__ == "__main__":
    main(*sys.argv[1:])
