"""Edges: the path of one tensor from its producer to its consumer."""

from tensorwire.edge.checked import CheckedConsumer, CheckedProducer
from tensorwire.edge.static import TRAILER, Consumer, Producer, Word
from tensorwire.edge.striped import STRIPED_FROM, StripedConsumer, StripedProducer, stripes
from tensorwire.edge.tensor import Spec

__all__ = [
    "STRIPED_FROM",
    "TRAILER",
    "CheckedConsumer",
    "CheckedProducer",
    "Consumer",
    "Producer",
    "Spec",
    "StripedConsumer",
    "StripedProducer",
    "Word",
    "stripes",
]
