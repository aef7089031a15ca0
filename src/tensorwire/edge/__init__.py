"""Edges: the path of one tensor from its producer to its consumers."""

from tensorwire.edge.connect import connect_edge
from tensorwire.edge.ends import ConsumerEnd, ProducerEnd, StaticProducer
from tensorwire.edge.pool import Lease, Pool
from tensorwire.edge.received import Received
from tensorwire.edge.static import Consumer, Producer, Word
from tensorwire.edge.tensor import Spec
from tensorwire.edge.varying import BoundedProducer, DynamicProducer

__all__ = [
    "BoundedProducer",
    "Consumer",
    "ConsumerEnd",
    "DynamicProducer",
    "Lease",
    "Pool",
    "Producer",
    "ProducerEnd",
    "Received",
    "Spec",
    "StaticProducer",
    "Word",
    "connect_edge",
]
