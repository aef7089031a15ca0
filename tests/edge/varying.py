"""Both ends of an edge whose tensors vary, in one process."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from tensorwire.edge import (
    BoundedConsumer,
    BoundedProducer,
    DynamicConsumer,
    DynamicProducer,
    Pool,
    Received,
    Ring,
    Spec,
    Value,
)
from tensorwire.testing.patience import patient
from tests.edge.edges import Pair

SECONDS = patient(60.0)
LIMIT = 64 << 20
EDGES = ["bounded", "dynamic"]

Sender = BoundedProducer | DynamicProducer
Receiver = BoundedConsumer | DynamicConsumer


def make_bounded(pair: Pair, depth: int, bound: int) -> tuple[BoundedProducer, BoundedConsumer]:
    """A bounded edge."""
    ring = Ring(depth, bound)
    mapped = pair.producer.capabilities.maps
    inbox = pair.consumer.allocate(ring.nbytes)
    outbox = pair.producer.allocate(ring.words_nbytes if mapped else ring.nbytes)
    producer = BoundedProducer(pair.there, inbox.remote().view(), outbox.view(), ring=ring)
    return producer, BoundedConsumer(pair.back, inbox.view(), outbox.remote().view(), ring=ring)


def make_dynamic(pair: Pair, depth: int, limit: int = LIMIT, **options: Any) -> tuple[DynamicProducer, DynamicConsumer]:
    """A dynamic edge, with a pool for each end that needs one."""
    ring = Ring(depth)
    inbox, outbox = pair.consumer.allocate(ring.nbytes), pair.producer.allocate(ring.nbytes)
    pool = Pool(pair.producer, limit=limit)
    producer = DynamicProducer(pair.there, inbox.remote().view(), outbox.view(), ring=ring, pool=pool, **options)
    reads_into = None if pair.consumer.capabilities.maps else Pool(pair.consumer, limit=limit)
    return producer, DynamicConsumer(pair.back, inbox.view(), outbox.remote().view(), ring=ring, pool=reads_into)


def make(kind: str, pair: Pair, depth: int, bound: int) -> tuple[Sender, Receiver]:
    """An edge of that kind for tensors of up to ``bound`` bytes."""
    return make_bounded(pair, depth, bound) if kind == "bounded" else make_dynamic(pair, depth)


def born(producer: Sender, step: int, content: bytes, spec: Spec) -> None:
    """Sends a tensor that was born in registered memory."""
    if isinstance(producer, BoundedProducer):
        producer.slot(step, SECONDS)[: len(content)] = content
        producer.send(step, spec)
    else:
        lease = producer.room(len(content), SECONDS)
        lease.memory[:] = content
        producer.send(step, lease, spec, timeout=SECONDS)


def copied(producer: Sender, step: int, tensor: Any) -> None:
    """Sends a tensor that was born elsewhere."""
    producer.fill(step, tensor, SECONDS)
    producer.send(step)


def tensor_of(received: Received | Value) -> Received:
    """What was received, which is a tensor."""
    assert isinstance(received, Received), received
    return received


def array_of(received: Received | Value) -> np.ndarray[Any, Any]:
    """The tensor that was received, in its memory, as numpy shows it."""
    tensor = tensor_of(received)
    return np.frombuffer(tensor.memory, tensor.spec.dtype).reshape(tensor.spec.shape)


def torch_of(received: Received | Value) -> torch.Tensor:
    """The tensor that was received, in its memory, as torch shows it. It must be writable, and not empty."""
    tensor = tensor_of(received)
    return torch.frombuffer(tensor.memory, dtype=getattr(torch, tensor.spec.dtype)).view(tensor.spec.shape)
