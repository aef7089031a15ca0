"""What each host can know of the others' progress, by what it has received: vector clocks over the global order.

A slot may be filled again, without asking anybody, once its host knows that everyone is done with what lay there.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from tensorwire.graph.ir import Graph
from tensorwire.graph.passes.crossing import Crossings

Clock = dict[str, int]  # by host, the place in the order up to which it is known to have come


def walk(graph: Graph, crossing: Crossings) -> Iterator[tuple[int, Mapping[str, Clock]]]:
    """For each node in order: its place, and what each host knows when it runs that node, its operands received.

    Values are sent when they were computed, and received where they are first used.
    """
    knows: dict[str, Clock] = {host: dict.fromkeys(graph.hosts, -1) for host in graph.hosts}
    letters: dict[str, Clock] = {}  # what a sent value tells of its sender's knowledge
    opened: set[tuple[str, str]] = set()
    for place, node in enumerate(graph.nodes):
        at = crossing.runs.get(node.name, ())
        for host in at:
            for name in node.inputs:
                if name in letters and host in crossing.sent[name][1] and (name, host) not in opened:
                    opened.add((name, host))
                    _merge(knows[host], letters[name])
        yield place, knows
        for host in at:
            knows[host][host] = place
        if node.name in crossing.sent:
            source = crossing.sent[node.name][0]
            knows[source][source] = max(knows[source][source], place)
            letters[node.name] = dict(knows[source])


def _merge(mine: Clock, theirs: Clock) -> None:
    for host, place in theirs.items():
        if place > mine[host]:
            mine[host] = place
