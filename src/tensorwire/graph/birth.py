"""Where a tensor that crosses is born: the operator whose output allocation is moved into registered memory.

From the value that is sent the walk goes back through views and in-place operators to whoever allocated the memory.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from tensorwire.graph.crossing import Crossings
from tensorwire.graph.ir import GIVEN, INPUT, ITEM, PARAMETER, SAVED, Graph, Node

_WHY_GIVEN = {INPUT: "an input of the caller", PARAMETER: "a parameter", SAVED: "kept from the forward graph"}


@dataclass(frozen=True, slots=True)
class Birth:
    """``root``: the value whose memory it is. ``operator`` allocates that as its output number ``index``; None where it
    has to be copied, and ``why`` says why."""

    root: str
    operator: str | None = None
    index: int = 0
    why: str = ""


class Aliases:
    """Who shares memory with whom: every value has one root."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._root: dict[str, str] = {}
        self.shared: dict[str, list[str]] = defaultdict(list)  # by root, in order
        for node in graph.nodes:
            root = node.name if node.alias is None else self._root[node.alias]
            self._root[node.name] = root
            self.shared[root].append(node.name)

    def root(self, name: str) -> str:
        """The value whose memory ``name`` shows."""
        return self._root[name]


def callers(graph: Graph, crossing: Crossings, aliases: Aliases) -> set[tuple[str, str]]:
    """The values, by their root, whose memory users get into their hands, and the hosts on which they do."""
    return {
        (aliases.root(output.name), host)
        for output in graph.outputs
        if output.caller
        for host in output.to or crossing.holds[output.name]
    }


def births(graph: Graph, crossing: Crossings, aliases: Aliases) -> dict[str, Birth]:
    """The birth of every value that is sent."""
    given = callers(graph, crossing, aliases)
    written: dict[str, int] = {}  # by root, where it is last changed in place
    for place, node in enumerate(graph.nodes):
        for name in node.writes:
            written[aliases.root(name)] = place
    found = {}
    for name, (source, _) in crossing.sent.items():
        root = graph.node(aliases.root(name))
        operator = graph.node(root.inputs[0]) if root.kind == ITEM else root
        why = _why_copied(root, operator, source, crossing)
        if not why and (root.name, source) in given:
            why = "the caller gets it"
        if not why and written.get(root.name, -1) > graph.place[name]:
            why = "it is changed in place after it was sent"
        found[name] = Birth(root.name, None if why else operator.name, root.index, why)
    return found


def _why_copied(root: Node, operator: Node, source: str, crossing: Crossings) -> str:
    if root.kind in GIVEN:
        return _WHY_GIVEN[root.kind]
    if source not in crossing.runs.get(operator.name, ()):
        return "it came from another host"
    return "" if operator.fresh else f"{operator.op} does not allocate it"
