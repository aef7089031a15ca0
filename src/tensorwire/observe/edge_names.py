"""The names of a graph's edges in spans, by which those of one tensor match across workers."""

from __future__ import annotations

from tensorwire.observe.spans import Span

_GRAPH = "graph "


def edge_of(graph: str, edge: str) -> str:
    """How spans name an edge: in pushes and waits of one run of a graph, the same on all workers."""
    return f"{_GRAPH}{graph}, {edge}"


def of_graph(span: Span) -> bool:
    """Whether a span is about an edge of a graph, or about the memory of one, not about a store."""
    return span.what.startswith(_GRAPH)
