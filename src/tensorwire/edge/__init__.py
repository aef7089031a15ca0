"""Edges: the path of one tensor from its producer to its consumer."""

from tensorwire.edge.checked import CheckedConsumer, CheckedProducer
from tensorwire.edge.static import TRAILER, Consumer, Producer, Word
from tensorwire.edge.tensor import Spec

__all__ = ["TRAILER", "CheckedConsumer", "CheckedProducer", "Consumer", "Producer", "Spec", "Word"]
