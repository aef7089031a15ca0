"""Views made at their reader, because their base crosses anyway: they span half of it or more.

The span of a view counts, gaps included, because that many bytes of a tensor with gaps are sent.
"""

from __future__ import annotations

from collections import defaultdict

from tensorwire.graph.ir import Graph, Node


def following(graph: Graph, assignment: dict[str, str]) -> set[str]:
    """The views, by name, that run where they are wanted instead of crossing.

    Several narrow views of one base that go to one worker count together.
    """
    views = {node.name: node for node in graph.nodes if node.alias is not None and not (node.writes or node.random)}
    bases = _bases(graph, views)
    found: set[str] = set()
    # With those on the way: `as_strided` may show more than the view that it was given, and counts from the base.
    _add_chains(found, views, [name for name, node in views.items() if _is_wide(node, bases[name])])
    narrow: dict[tuple[str, str], list[str]] = defaultdict(list)
    seen: set[tuple[str, str]] = set()
    for node in graph.nodes:
        worker = assignment.get(node.name)
        if worker is None:
            continue
        for name in node.inputs:
            if name in views and name not in found and assignment[name] != worker and (name, worker) not in seen:
                seen.add((name, worker))
                narrow[bases[name].name, worker].append(name)
    for (base, _), group in narrow.items():
        whole = _nbytes(graph.node(base))
        if whole and sum(_nbytes(views[name]) or 0 for name in group) * 2 >= whole:
            _add_chains(found, views, group)
    return found


def _bases(graph: Graph, views: dict[str, Node]) -> dict[str, Node]:
    """Of each view the node, no view itself, that it goes back to."""
    bases: dict[str, Node] = {}
    for name, node in views.items():
        assert node.alias is not None
        bases[name] = bases.get(node.alias) or graph.node(node.alias)
    return bases


def _is_wide(node: Node, base: Node) -> bool:
    if node.tuple_:  # its items decide
        return True
    view, whole = _nbytes(node), _nbytes(base)
    if view is None or whole is None:  # of unknown length: as long as its base, or nobody knows
        return True
    return view * 2 >= whole


def _add_chains(found: set[str], views: dict[str, Node], names: list[str]) -> None:
    """Adds views, and those on the way to their base."""
    added: set[str] = set()
    for first in names:
        name: str | None = first
        while name in views and name not in added:
            added.add(name)
            name = views[name].alias
    found |= added


def _nbytes(node: Node) -> int | None:
    return None if node.spec is None else node.spec.nbytes
