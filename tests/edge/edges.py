"""Both ends of an edge, in one process."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tensorwire.device import Channel, Device, LoopbackDevice, Region, ShmDevice, TcpDevice
from tensorwire.edge import Consumer, Producer, Spec, Word
from tensorwire.errors import PeerLost
from tensorwire.testing.patterns import SECONDS, asleep

KINDS = {"loopback": LoopbackDevice, "shm": ShmDevice, "tcp": TcpDevice}
FIRST = 64  # where the slots begin: behind the arrival word


@dataclass
class Pair:
    """A producer's and a consumer's device, with channels both ways."""

    producer: Device
    consumer: Device
    there: Channel
    back: Channel


def make_edge(pair: Pair, depth: int, size: int, *, spec: Spec | None = None) -> tuple[Producer, Consumer, Region]:
    """An edge with slots of ``size`` bytes; the region that its slots lie in."""
    inbox = pair.consumer.allocate(FIRST + depth * size)
    credits_ = pair.producer.allocate(64)
    remote = inbox.remote()
    options: dict[str, Any] = {"spec": spec}
    if not pair.producer.capabilities.maps:
        staging = pair.producer.allocate(depth * size)
        options["source"] = [staging.view(i * size, size) for i in range(depth)]
    producer = Producer(
        pair.there,
        remote.view(0, 8),
        slots=[remote.view(FIRST + i * size, size) for i in range(depth)],
        credit=Word(credits_, 0, pair.there),
        **options,
    )
    slots = [memoryview(inbox)[FIRST + i * size : FIRST + (i + 1) * size] for i in range(depth)]
    credit = (pair.back, credits_.remote().view(0, 8))
    consumer = Consumer(Word(inbox, 0, pair.back), slots=slots, credit=credit, spec=spec)
    return producer, consumer, inbox


def lost_while(work: Callable[[], object], then: Callable[[], None]) -> None:
    """``then`` happens while ``work`` sleeps, which must raise `PeerLost`.

    Who was stopped before may be lost already: then there is no sleep to wait for.
    """
    raised: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    assert thread.native_id
    while thread.is_alive() and not asleep(os.getpid(), thread.native_id):
        os.sched_yield()
    then()
    thread.join(SECONDS)
    assert [type(error) for error in raised] == [PeerLost]
