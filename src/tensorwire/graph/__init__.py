"""What crosses machines, and where each tensor is born. No framework is imported here."""

from tensorwire.graph.ir import Graph, Node, Output, TensorSpec, Unknown
from tensorwire.graph.plan import Analysis, Edge, Plan, analyze

__all__ = ["Analysis", "Edge", "Graph", "Node", "Output", "Plan", "TensorSpec", "Unknown", "analyze"]
