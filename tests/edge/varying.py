"""Both ends of an edge whose tensors vary, in one process."""

from __future__ import annotations

import queue
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch

from tensorwire.edge import BoundedProducer, ConsumerEnd, DynamicProducer, ProducerEnd, Received, Spec, connect_edge
from tensorwire.edge.group import EdgeGroup
from tensorwire.edge.varying import VaryingConsumer
from tensorwire.testing.patience import patient
from tests.edge.edges import Pair

SECONDS = patient(60.0)
LIMIT = 64 << 20
EDGES = ["bounded", "dynamic"]

Sender = BoundedProducer | DynamicProducer


def connected(pair: Pair, **options: Any) -> tuple[ProducerEnd, ConsumerEnd]:
    """An edge between the two devices."""
    forth: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    back: queue.SimpleQueue[bytes] = queue.SimpleQueue()

    def swap(ours: queue.SimpleQueue[bytes], theirs: queue.SimpleQueue[bytes]) -> Any:
        def call(message: bytes) -> bytes:
            ours.put(message)
            return theirs.get(timeout=SECONDS)

        return call

    with ThreadPoolExecutor(1) as other:
        consumer = other.submit(connect_edge, pair.back, swap(back, forth), "consumer", timeout=SECONDS, **options)
        producer = connect_edge(pair.there, swap(forth, back), "producer", timeout=SECONDS, **options)
        return producer, consumer.result(SECONDS)


def make_dynamic(pair: Pair, depth: int, limit: int = LIMIT, **options: Any) -> tuple[DynamicProducer, VaryingConsumer]:
    """A dynamic edge, with a pool at each end."""
    producer, consumer = connected(pair, depth=depth, limit=limit, **options)
    assert isinstance(producer, DynamicProducer)
    assert isinstance(consumer, VaryingConsumer)
    return producer, consumer


def make(kind: str, pair: Pair, depth: int, bound: int) -> tuple[Sender, VaryingConsumer]:
    """An edge of that kind for tensors of up to ``bound`` bytes."""
    producer, consumer = connected(pair, depth=depth, **({"bound": bound} if kind == "bounded" else {"limit": LIMIT}))
    assert isinstance(producer, Sender)
    assert isinstance(consumer, VaryingConsumer)
    return producer, consumer


def bank_of(consumer: VaryingConsumer, step: int) -> memoryview:
    """The bank in which the ``step``-th tensor has arrived, as the consumer sees it."""
    its = incoming(consumer)
    return its._banks[its._words.load(8 * (step % 256)) & 255].memory


def incoming(consumer: VaryingConsumer) -> Any:
    """What an end receives."""
    return group_of(consumer)._in["producer"]


def outgoing(producer: Sender) -> Any:
    """What an end sends."""
    return group_of(producer)._out["consumer"]


def group_of(end: Sender | VaryingConsumer) -> EdgeGroup:
    """The one edge's group at one end."""
    return end._group


def arrived(consumer: VaryingConsumer, step: int) -> None:
    """Waits until the ``step``-th tensor is there, and looks at nothing."""
    its = incoming(consumer)
    its._words.wait(8 * (step % 256), step << 8, SECONDS, its._channel)


def born(producer: Sender, step: int, content: bytes, spec: Spec, timeout: float = SECONDS) -> None:
    """Sends a tensor that was born in registered memory."""
    if isinstance(producer, BoundedProducer):
        producer.slot(step, timeout)[: len(content)] = content
        producer.send(step, spec)
    else:
        lease = producer.room(len(content), timeout)
        lease.memory[:] = content
        producer.send(step, lease, spec, timeout)


def copied(producer: Sender, step: int, tensor: Any, timeout: float = SECONDS) -> None:
    """Sends a tensor that was born elsewhere."""
    producer.fill(step, tensor, timeout)
    if isinstance(producer, DynamicProducer):
        producer.send(step, timeout=timeout)
    else:
        producer.send(step)


def array_of(received: Received) -> np.ndarray[Any, Any]:
    """The tensor that was received, in its memory, as numpy shows it."""
    return np.frombuffer(received.memory, received.spec.dtype).reshape(received.spec.shape)


def torch_of(received: Received) -> torch.Tensor:
    """The tensor that was received, in its memory, as torch shows it. It must be writable, and not empty."""
    return torch.frombuffer(received.memory, dtype=getattr(torch, received.spec.dtype)).view(received.spec.shape)
