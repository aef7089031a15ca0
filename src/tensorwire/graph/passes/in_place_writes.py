"""In-place writes: allowed only where the memory is, and only if no other worker reads an older name of it later."""

from __future__ import annotations

from collections import defaultdict

from tensorwire.errors import ArgumentError
from tensorwire.graph.ir import GIVEN, Graph, Node
from tensorwire.graph.passes.aliases import Aliases

Workers = frozenset[str]


def writers(graph: Graph, assignment: dict[str, str], aliases: Aliases, replicable: set[str]) -> dict[str, Workers]:
    """The workers of every node that changes something in place. ``replicable``: what runs where others want it.

    What several workers were given is changed on each that reads it: there it has to be right when the graph runs
    again.
    """
    changed = [node for node in graph.nodes if node.writes]
    readers: dict[str, set[str]] = defaultdict(set)
    for node in graph.nodes if changed else ():
        if node.name in assignment and node.name not in replicable:
            _add_reader(readers, aliases, node, frozenset({assignment[node.name]}))
    found: dict[str, Workers] = {}
    spreading = True
    while spreading:  # a node that changes one value on more workers reads others there
        spreading = False
        for node in changed:
            workers = frozenset({assignment[node.name]})
            for root in map(aliases.root, node.writes):
                if root.kind in GIVEN:
                    workers |= readers[root.name] & set(graph.workers if root.present is None else root.present)
            if found.get(node.name) != workers:
                spreading = True
                found[node.name] = workers
                _add_reader(readers, aliases, node, workers)
    return found


def _add_reader(readers: dict[str, set[str]], aliases: Aliases, node: Node, workers: Workers) -> None:
    for root in map(aliases.root, node.inputs):
        if root.name in aliases.written:
            readers[root.name] |= workers


def check_writes(graph: Graph, runs: dict[str, Workers], aliases: Aliases) -> None:
    """Raises `ArgumentError` for a change of what is on another worker, and for a worker that would read what was there
    before a change."""
    last: dict[str, Node] = {}  # by root
    own: dict[str, Workers] = {}  # where each value is itself, and not what was received of it
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
                raise _wrong_worker(graph, node, name, runs[node.name] - own[name], own[name])
            last[aliases.root(name).name] = node


def _own(graph: Graph, node: Node, runs: dict[str, Workers], own: dict[str, Workers]) -> Workers:
    if node.name not in runs:
        return frozenset(graph.workers if node.present is None else node.present)
    return runs[node.name] if node.alias is None else runs[node.name] & own[node.alias]


def _wrong_worker(graph: Graph, node: Node, name: str, where: Workers, own: Workers) -> ArgumentError:
    return ArgumentError(
        f"graph {graph.name}: {node.name} runs on {_listed(where)} and changes {name} in place, which is on "
        f"{_listed(own)}: change on one worker only what is there"
    )


def _stale(graph: Graph, node: Node, name: str, where: Workers, writer: Node, there: Workers) -> ArgumentError:
    return ArgumentError(
        f"graph {graph.name}: {node.name} runs on {_listed(where)} and reads {name} after {writer.name} changed it in "
        f"place on {_listed(there)}: let it read {writer.name}"
    )


def _listed(workers: Workers) -> str:
    return ", ".join(sorted(workers)) or "no worker"
