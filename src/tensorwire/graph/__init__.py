"""Graphs: which tensors cross between workers, and where each is born. Imports no framework."""

from tensorwire.graph.analysis import Analysis, analyze
from tensorwire.graph.ir import Graph, Node, Output, TensorSpec, Unknown
from tensorwire.graph.plan import Edge, Plan

__all__ = ["Analysis", "Edge", "Graph", "Node", "Output", "Plan", "TensorSpec", "Unknown", "analyze"]
