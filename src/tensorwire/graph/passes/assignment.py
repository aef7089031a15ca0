"""Assigns every node to a worker: where the user placed it, else that of its operands, else that of its users."""

from __future__ import annotations

from tensorwire.graph.ir import CALL, ITEM, Graph, Node
from tensorwire.graph.passes.aliases import Aliases


def assign(graph: Graph, default: str | None = None, aliases: Aliases | None = None) -> dict[str, str]:
    """The worker of every operator and item by name. ``default``: where what nothing binds runs; else the first worker.

    Items live with their operator. Views, and what changes memory in place, live where that memory is, whatever was
    said of them: what was said still counts for those who use them.
    """
    aliases = aliases or Aliases(graph)
    made = [node for node in graph.nodes if node.kind in (CALL, ITEM)]
    found = _by_operands(graph, made, aliases)
    _by_users(made, found)
    for node in made:
        found.setdefault(node.name, default or graph.workers[0])
    for node in made:
        if node.kind == ITEM:
            found[node.name] = found.get(node.inputs[0], found[node.name])
        for name in node.writes or ((node.alias,) if node.alias else ()):
            root = aliases.root(name)
            held = _held(root, found[node.name])
            found[node.name] = found.get(root.name) or held or found[node.name]
    return found


def _by_operands(graph: Graph, made: list[Node], aliases: Aliases) -> dict[str, str]:
    """What was said, and what follows from it onwards."""
    found: dict[str, str] = {}
    for node in made:
        worker = None
        if node.kind == CALL:
            written = (_held(aliases.root(name), node.worker) for name in node.writes)
            worker = next(filter(None, written), None) or node.worker
        worker = worker or next((found[name] for name in reversed(node.inputs) if name in found), None)
        worker = worker or next(filter(None, (_held(graph.node(name), None) for name in node.inputs)), None)
        if worker is not None:
            found[node.name] = worker
    return found


def _by_users(made: list[Node], found: dict[str, str]) -> None:
    """Who has none is with its first user."""
    users: dict[str, str] = {}
    for node in reversed(made):
        worker = found.get(node.name) or users.get(node.name)
        if worker is not None:
            found[node.name] = worker
            users.update(dict.fromkeys(node.inputs, worker))


def _held(node: Node, wanted: str | None) -> str | None:
    """Where a given value is that is not everywhere: ``wanted`` if it is there, too."""
    if not node.present:
        return None
    return wanted if wanted in node.present else node.present[0]
