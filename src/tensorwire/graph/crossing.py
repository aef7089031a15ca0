"""Which values cross to which hosts: each at most once, and what is cheap to compute there not at all."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from tensorwire.errors import ArgumentError
from tensorwire.graph.ir import GIVEN, ITEM, Graph, Node

Hosts = frozenset[str]
_NOWHERE: Hosts = frozenset()


@dataclass(frozen=True)
class Crossings:
    """``runs``: where each operator runs. ``holds``: where each value is once the graph has run. ``sent``: from where
    and to whom each value that crosses is sent, in the graph's order. All by name."""

    runs: dict[str, Hosts]
    holds: dict[str, Hosts]
    sent: dict[str, tuple[str, tuple[str, ...]]]


def crossings(graph: Graph, home: dict[str, str]) -> Crossings:
    """Walks back from what is wanted. Raises `ArgumentError` for a value that is needed and that nobody has."""
    everywhere = frozenset(graph.hosts)
    free = _replicable(graph)
    following = _following(graph, home)
    need: dict[str, set[str]] = defaultdict(set)
    for output in graph.outputs:
        need[output.name].update(output.to)
    kept = {output.name for output in graph.outputs}
    runs: dict[str, Hosts] = {}
    for node in reversed(graph.nodes):
        if node.kind in GIVEN:
            continue
        wanted = need[node.name]
        if node.kind == ITEM:
            where = frozenset(wanted | ({home[node.name]} if node.name in kept else set()))
            if node.inputs[0] not in free and node.name not in following:
                where = frozenset({home[node.name]})
        elif node.name in free or node.name in following:
            where = frozenset(wanted | ({home[node.name]} if node.name in kept or node.writes else set()))
        else:
            where = frozenset({home[node.name]})
        runs[node.name] = where
        for name in node.inputs:
            need[name].update(where)
    holds, sent = {}, {}
    for node in graph.nodes:
        at = runs.get(node.name)
        if at is None:
            at = everywhere if node.present is None else frozenset(node.present)
        missing = _NOWHERE if node.tuple_ else frozenset(need[node.name]) - at
        if missing:
            if not at:
                raise ArgumentError(f"{node.name} ({node.op}) is needed on {', '.join(sorted(missing))}; nobody has it")
            source = home.get(node.name)
            if source not in at:
                source = next(host for host in graph.hosts if host in at)
            sent[node.name] = (source, tuple(host for host in graph.hosts if host in missing))
        holds[node.name] = at | missing
    return Crossings(runs, holds, sent)


def _replicable(graph: Graph) -> set[str]:
    """What any host can compute by itself from what all of them have."""
    free: set[str] = set()
    for node in graph.nodes:
        if node.kind in GIVEN:
            if node.present is None or len(node.present) == len(graph.hosts):
                free.add(node.name)
        elif _cheap(node) and all(name in free for name in node.inputs):
            free.add(node.name)
    return free


def _cheap(node: Node) -> bool:
    return not (node.random or node.writes) and (node.cheap or node.kind == ITEM or node.alias is not None)


def _following(graph: Graph, home: dict[str, str]) -> set[str]:
    """Views that are made where they are needed, because their base goes there: they show half of it or more.

    Several narrow views of one base that go to one host count together.
    """
    views = {node.name for node in graph.nodes if node.alias is not None and not node.writes and not node.random}
    following = {name for name in views if _is_wide(graph, graph.node(name))}
    narrow: dict[tuple[str, str], list[Node]] = defaultdict(list)
    seen: set[tuple[str, str]] = set()
    for node in graph.nodes:
        for name in node.inputs:
            host = home.get(node.name)
            if host is None or name not in views or name in following or home[name] == host:
                continue
            if (name, host) not in seen and not graph.node(name).tuple_:
                seen.add((name, host))
                narrow[_base(graph, name, views), host].append(graph.node(name))
    for (base, _), group in narrow.items():
        whole = _elements(graph.node(base))
        if whole and sum(_elements(node) or 0 for node in group) * 2 >= whole:
            for node in group:
                name = node.name
                while name != base:
                    following.add(name)
                    name = graph.node(name).alias or base
    return following


def _base(graph: Graph, name: str, views: set[str]) -> str:
    while name in views:
        alias = graph.node(name).alias
        assert alias is not None
        name = alias
    return name


def _is_wide(graph: Graph, node: Node) -> bool:
    assert node.alias is not None
    if node.tuple_:  # its items decide
        return True
    view, base = _elements(node), _elements(graph.node(node.alias))
    if view is None or base is None:  # of unknown length: as long as its base, or nobody knows
        return True
    return view * 2 >= base


def _elements(node: Node) -> int | None:
    return None if node.spec is None else node.spec.elements
