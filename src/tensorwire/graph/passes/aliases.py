"""Which values share memory."""

from __future__ import annotations

from tensorwire.graph.ir import GIVEN, Graph, Node


class Aliases:
    """Every value has one root: whose memory it shows. ``written``: the roots that some node changes in place."""

    def __init__(self, graph: Graph) -> None:
        self._root: dict[str, Node] = {}
        for node in graph.nodes:
            self._root[node.name] = node if node.alias is None else self._root[node.alias]
        self._views = [node for node in graph.nodes if node.alias is not None and not node.writes]
        self.written = {self._root[name].name for node in graph.nodes for name in node.writes}

    def root(self, name: str) -> Node:
        """The node whose memory ``name`` shows: itself, if it is not a view."""
        return self._root[name]

    def changed_views(self) -> set[str]:
        """The views of what several workers were given and somebody changes: each worker needs them of its own
        memory.
        """
        shared = {name for name in self.written if (root := self._root[name]).kind in GIVEN and _on_several(root)}
        return {node.name for node in self._views if self._root[node.name].name in shared}


def _on_several(node: Node) -> bool:
    return node.present is None or len(node.present) > 1
