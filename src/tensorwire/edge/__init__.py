"""Edges: the path of one tensor from its producer to its consumer."""

from tensorwire.edge.static import Consumer, Producer, Word

__all__ = ["Consumer", "Producer", "Word"]
