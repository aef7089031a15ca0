"""Which values cross to which workers: each at most once, and none that is cheap to compute there."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from tensorwire.errors import ArgumentError
from tensorwire.graph.ir import GIVEN, INPUT, ITEM, Graph, Node
from tensorwire.graph.passes.aliases import Aliases
from tensorwire.graph.passes.in_place_writes import Workers, check_writes, writers
from tensorwire.graph.passes.views import following


@dataclass(frozen=True)
class Crossings:
    """``runs``: where each operator runs. ``holds``: where each value is once the graph has run. ``sent``: from where
    and to whom each value that crosses is sent, in the graph's order. ``if_small``: what is sent only in runs in which
    it is small; its targets do not hold it for sure. All by name."""

    runs: dict[str, Workers]
    holds: dict[str, Workers]
    sent: dict[str, tuple[str, tuple[str, ...]]]
    if_small: frozenset[str] = frozenset()


def crossings(graph: Graph, assignment: dict[str, str], aliases: Aliases | None = None) -> Crossings:
    """Walks back from what is wanted. Raises `ArgumentError` for a value that is needed and that nobody has, and for
    one that another worker would read after it was changed in place."""
    aliases = aliases or Aliases(graph)
    need: dict[str, set[str]] = defaultdict(set)
    wished: dict[str, set[str]] = defaultdict(set)  # if it is small
    for output in graph.outputs:
        need[output.name].update(() if output.if_small else output.to)
        wished[output.name].update(output.to if output.if_small else ())
    kept = set(need)
    runs = _runs(graph, assignment, aliases, need)
    check_writes(graph, runs, aliases)
    holds: dict[str, Workers] = {}
    sent: dict[str, tuple[str, tuple[str, ...]]] = {}
    if_small = set()
    for node in graph.nodes:
        at = runs[node.name] if node.name in runs else _given(graph, node, need[node.name], node.name in kept)
        missing = Workers() if node.tuple_ else Workers(need[node.name]) - at
        others = Workers(wished[node.name]) - at if node.name in wished else Workers()
        if missing:  # it crosses anyway: then to all
            missing |= others
        elif others:
            if_small.add(node.name)
        if missing or others:
            sent[node.name] = (
                _source(graph, node, assignment, at, missing or others),
                _ordered(graph, missing or others),
            )
        holds[node.name] = at | missing
    return Crossings(runs, holds, sent, frozenset(if_small))


def _runs(graph: Graph, assignment: dict[str, str], aliases: Aliases, need: dict[str, set[str]]) -> dict[str, Workers]:
    """Where every operator runs. Notes in ``need`` where each value is wanted."""
    kept, everyone = set(need), Workers(graph.workers)
    replicable = _replicable(graph, aliases)
    follow = following(graph, assignment) | aliases.changed_views()
    for node in graph.nodes:
        if node.name in follow and (node.kind != ITEM or node.inputs[0] in replicable):
            replicable.setdefault(node.name, everyone)
    writing = writers(graph, assignment, aliases, set(replicable))
    runs: dict[str, Workers] = {}
    for node in reversed(graph.nodes):
        if node.kind in GIVEN:
            continue
        if node.name in replicable:
            wanted = Workers(need[node.name] or ({assignment[node.name]} if node.name in kept else ()))
            where = wanted & replicable[node.name]
            if wanted and not where:  # it crosses
                where = Workers({_one_of(graph, replicable[node.name], assignment[node.name])})
        else:
            where = writing.get(node.name) or frozenset({assignment[node.name]})
        runs[node.name] = where
        for name in node.inputs:
            need[name].update(where)
    return runs


def _replicable(graph: Graph, aliases: Aliases) -> dict[str, Workers]:
    """What several workers can compute, each by itself from what they all have: by name, which workers."""
    free: dict[str, Workers] = {}
    for node in graph.nodes:
        if aliases.root(node.name).name in aliases.written:
            continue
        where = Workers(graph.workers if node.present is None else node.present)
        if node.kind not in GIVEN:
            if not _cheap(node) or not all(name in free for name in node.inputs):
                continue
            where = where.intersection(*(free[name] for name in node.inputs))
        if len(where) > 1 or len(where) == len(graph.workers):
            free[node.name] = where
    return free


def _cheap(node: Node) -> bool:
    return not (node.random or node.writes) and (node.cheap or node.kind == ITEM or node.alias is not None)


def _source(graph: Graph, node: Node, assignment: dict[str, str], at: Workers, missing: Workers) -> str:
    if not at:
        where = ", ".join(sorted(missing))
        raise ArgumentError(f"graph {graph.name}: {node.name} ({node.op}) is needed on {where}; nobody has it")
    return _one_of(graph, at, assignment.get(node.name))


def _one_of(graph: Graph, workers: Workers, wanted: str | None) -> str:
    """``wanted`` if it is among them, else the first."""
    return wanted if wanted in workers else next(worker for worker in graph.workers if worker in workers)


def _given(graph: Graph, node: Node, need: set[str], kept: bool) -> Workers:
    """Where a value is from the beginning. What the caller passes to all has to be right only where it is read, and
    counts as present only there; what is kept without being read, everywhere."""
    if node.present is not None:
        return frozenset(node.present)
    if node.kind != INPUT or (kept and not need):
        return frozenset(graph.workers)
    return frozenset(need)


def _ordered(graph: Graph, workers: Workers) -> tuple[str, ...]:
    return tuple(worker for worker in graph.workers if worker in workers)
