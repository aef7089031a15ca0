"""Every node gets a home: where the user put it, else where its operands are, else where its users are."""

from __future__ import annotations

from tensorwire.graph.ir import CALL, ITEM, Graph


def homes(graph: Graph, default: str | None = None) -> dict[str, str]:
    """The host of every operator and item by name. ``default``: where what nothing binds runs; else the first host.

    Items live with their operator. What changes a parameter or an input in place runs where that is.
    """
    found: dict[str, str] = {}
    for node in graph.nodes:
        if node.kind == ITEM:
            if node.inputs[0] in found:
                found[node.name] = found[node.inputs[0]]
        elif node.kind == CALL:
            host = node.host or _of_written(graph, node.writes) or _last(found, node.inputs)
            host = host or _of_present(graph, node.inputs)
            if host is not None:
                found[node.name] = host
    users: dict[str, str] = {}
    for node in reversed(graph.nodes):
        if node.kind not in (CALL, ITEM):
            continue
        host = found.get(node.name) or users.get(node.name)
        if host is None:
            continue
        found[node.name] = host
        for name in node.inputs:
            users[name] = host
    for node in graph.nodes:
        if node.kind in (CALL, ITEM) and node.name not in found:
            found[node.name] = default or graph.hosts[0]
    for node in graph.nodes:
        if node.kind == ITEM:
            found[node.name] = found[node.inputs[0]]
    return found


def _last(found: dict[str, str], names: tuple[str, ...]) -> str | None:
    return next((found[name] for name in reversed(names) if name in found), None)


def _of_written(graph: Graph, names: tuple[str, ...]) -> str | None:
    """Where what is written to lies, if that is one host."""
    for name in names:
        present = graph.node(name).present
        if present is not None and len(present) == 1:
            return present[0]
    return None


def _of_present(graph: Graph, names: tuple[str, ...]) -> str | None:
    """Where an operand lies that is not everywhere."""
    for name in names:
        present = graph.node(name).present
        if present:
            return present[0]
    return None
