"""What is changed in place: only where the memory is, and nobody elsewhere reads it later by an older name."""

from __future__ import annotations

from collections import defaultdict

from tensorwire.errors import ArgumentError
from tensorwire.graph.ir import GIVEN, Graph, Node
from tensorwire.graph.passes.aliases import Aliases

Hosts = frozenset[str]


def writers(graph: Graph, home: dict[str, str], aliases: Aliases, wandering: set[str]) -> dict[str, Hosts]:
    """The hosts of every node that changes something in place. ``wandering``: what runs where others want it.

    What several hosts were given is changed on each that reads it: there it has to be right when the graph runs again.
    """
    changed = [node for node in graph.nodes if node.writes]
    readers: dict[str, set[str]] = defaultdict(set)
    for node in graph.nodes if changed else ():
        if node.name in home and node.name not in wandering:
            _add_reader(readers, aliases, node, frozenset({home[node.name]}))
    found: dict[str, Hosts] = {}
    spreading = True
    while spreading:  # who changes one thing on more hosts reads others there
        spreading = False
        for node in changed:
            hosts = frozenset({home[node.name]})
            for root in map(aliases.root, node.writes):
                if root.kind in GIVEN:
                    hosts |= readers[root.name] & set(graph.hosts if root.present is None else root.present)
            if found.get(node.name) != hosts:
                spreading = True
                found[node.name] = hosts
                _add_reader(readers, aliases, node, hosts)
    return found


def _add_reader(readers: dict[str, set[str]], aliases: Aliases, node: Node, hosts: Hosts) -> None:
    for root in map(aliases.root, node.inputs):
        if root.name in aliases.written:
            readers[root.name] |= hosts


def check_writes(graph: Graph, runs: dict[str, Hosts], aliases: Aliases) -> None:
    """Raises `ArgumentError` for a change of what is on another host, and for a host that would read what was there
    before a change."""
    last: dict[str, Node] = {}  # by root
    own: dict[str, Hosts] = {}  # where each value is itself, and not what was received of it
    for node in graph.nodes if aliases.written else ():
        own[node.name] = _own(graph, node, runs, own)
        for name in node.inputs if node.name in runs else ():
            writer = last.get(aliases.root(name).name)
            if writer is None or graph.place[writer.name] <= graph.place[name]:
                continue
            if not runs[node.name] <= runs[writer.name] & own[name]:
                raise _stale(graph, node, name, runs[node.name] - runs[writer.name], writer, runs[writer.name])
        for name in node.writes:
            if not runs[node.name] <= own[name]:
                raise _elsewhere(graph, node, name, runs[node.name] - own[name], own[name])
            last[aliases.root(name).name] = node


def _own(graph: Graph, node: Node, runs: dict[str, Hosts], own: dict[str, Hosts]) -> Hosts:
    if node.name not in runs:
        return frozenset(graph.hosts if node.present is None else node.present)
    return runs[node.name] if node.alias is None else runs[node.name] & own[node.alias]


def _elsewhere(graph: Graph, node: Node, name: str, where: Hosts, own: Hosts) -> ArgumentError:
    return ArgumentError(
        f"graph {graph.name}: {node.name} runs on {_listed(where)} and changes {name} in place, which is on "
        f"{_listed(own)}: change on one host only what is there"
    )


def _stale(graph: Graph, node: Node, name: str, where: Hosts, writer: Node, there: Hosts) -> ArgumentError:
    return ArgumentError(
        f"graph {graph.name}: {node.name} runs on {_listed(where)} and reads {name} after {writer.name} changed it in "
        f"place on {_listed(there)}: let it read {writer.name}"
    )


def _listed(hosts: Hosts) -> str:
    return ", ".join(sorted(hosts)) or "no host"
