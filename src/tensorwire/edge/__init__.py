"""Edges: the path of one tensor from its producer to its consumer."""

from tensorwire.edge.bounded import BoundedConsumer, BoundedProducer
from tensorwire.edge.checked import CheckedConsumer, CheckedProducer
from tensorwire.edge.connect import connect_edge
from tensorwire.edge.dynamic import DynamicConsumer, DynamicProducer
from tensorwire.edge.ends import ConsumerEnd, ProducerEnd
from tensorwire.edge.header import NO_VALUE, Value
from tensorwire.edge.pool import Lease, Pool
from tensorwire.edge.received import Received
from tensorwire.edge.ring import Ring
from tensorwire.edge.static import TRAILER, Consumer, Producer, Word
from tensorwire.edge.striped import STRIPED_FROM, StripedConsumer, StripedProducer, stripes
from tensorwire.edge.tensor import Spec

__all__ = [
    "NO_VALUE",
    "STRIPED_FROM",
    "TRAILER",
    "BoundedConsumer",
    "BoundedProducer",
    "CheckedConsumer",
    "CheckedProducer",
    "Consumer",
    "ConsumerEnd",
    "DynamicConsumer",
    "DynamicProducer",
    "Lease",
    "Pool",
    "Producer",
    "ProducerEnd",
    "Received",
    "Ring",
    "Spec",
    "StripedConsumer",
    "StripedProducer",
    "Value",
    "Word",
    "connect_edge",
    "stripes",
]
