"""A model of many equal layers from one that was traced: its nodes are copied under new names, each where it belongs.

So a model can be planned that nobody could trace in reasonable time.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from tensorwire.errors import ArgumentError
from tensorwire.graph.ir import GIVEN, INPUT, SAVED, Graph, Node, Output


@dataclass(frozen=True)
class Layer:
    """The traced layer: its ``nodes``, parameters included; ``enters``: the value that the one before gives it, and
    ``leaves``: what it gives to the next one. There are ``times``; ``backward``: they run from the last to the first.
    """

    nodes: frozenset[str]
    enters: str
    leaves: str
    times: int
    backward: bool = False

    def inside(self, name: str, copy: int) -> str:
        """What copy number ``copy`` calls ``name``."""
        if name in self.nodes:
            return _name(name, copy)
        if name == self.enters and copy != self._first:
            return _name(self.leaves, copy + 1 if self.backward else copy - 1)
        return name

    def outside(self, name: str) -> str:
        """What those behind all copies call ``name``."""
        return _name(self.leaves, 0 if self.backward else self.times - 1) if name == self.leaves else name

    @property
    def copies(self) -> range:
        """Their numbers, in the order in which they run."""
        return range(self.times)[:: -1 if self.backward else 1]

    @property
    def _first(self) -> int:
        return self.copies[0]


def find_layer(graph: Graph, nodes: Collection[str], times: int, *, backward: bool = False) -> Layer:
    """The layer that those operators are, with what only they are given.

    One value leaves it, and one of its shape enters. Raises `ArgumentError` if it is not plain which.
    """
    made = {node.name for node in graph.nodes if node.name in nodes and node.kind not in GIVEN}
    users: dict[str, set[str]] = {}
    for node in graph.nodes:
        for name in node.inputs:
            users.setdefault(name, set()).add(node.name)
    given = {node.name for node in graph.nodes if node.kind in GIVEN and users.get(node.name, set()) & made}
    own = {name for name in given if users[name] <= made and graph.node(name).kind != INPUT}
    leaving = [name for name in graph.place if name in made and users.get(name, set()) - made]
    kept = {name for name in given if graph.node(name).kind != INPUT}
    entering = [name for name in graph.place if name not in made | kept and users.get(name, set()) & made]
    if len(leaving) != 1:
        raise ArgumentError(
            f"graph {graph.name}: {len(leaving)} values leave the layer ({', '.join(leaving)}), not one"
        )
    alike = [name for name in entering if graph.node(name).spec == graph.node(leaving[0]).spec]
    if len(alike) != 1:
        what = ", ".join(alike) or "nothing"
        raise ArgumentError(f"graph {graph.name}: {leaving[0]} leaves the layer, and {what} of its shape enters")
    return Layer(frozenset(made | own), alike[0], leaving[0], times, backward)


def repeat(graph: Graph, layer: Layer, hosts: Sequence[str], *, forward: Layer | None = None) -> Graph:
    """``graph`` with ``layer`` as often as it says, copy *i* on ``hosts[i]``. What is said of it for the first of them
    is said of each copy for its own. ``forward``: of a backward graph, the layer whose values it was left.
    """
    if len(hosts) != layer.times:
        raise ArgumentError(f"{layer.times} layers have as many hosts, not {len(hosts)}")
    return _Copier(graph, layer, hosts, forward).graph()


def with_present(graph: Graph, holds: Mapping[str, Iterable[str]]) -> Graph:
    """``graph``, whose saved values are where the forward graph left them."""
    nodes = []
    for node in graph.nodes:
        if node.kind == SAVED:
            held = set(holds[node.name])
            node = replace(node, present=tuple(host for host in graph.hosts if host in held))
        nodes.append(node)
    return replace(graph, nodes=tuple(nodes))


class _Copier:
    def __init__(self, graph: Graph, layer: Layer, hosts: Sequence[str], forward: Layer | None) -> None:
        self.old, self.layer, self.hosts, self.forward = graph, layer, hosts, forward
        self.used = {name for node in graph.nodes if node.name in layer.nodes for name in node.inputs}

    def graph(self) -> Graph:
        given: dict[str, Node] = {}
        before: list[Node] = []
        copied: list[Node] = []
        behind: list[Node] = []
        late = set(self.layer.nodes)  # the layer, and what depends on it
        for node in self.old.nodes:
            if node.kind in GIVEN:
                given.update((one.name, one) for one in self._given(node))
            elif node.name in self.layer.nodes:
                copied.append(node)
            elif late.intersection(node.inputs):
                late.add(node.name)
                behind.append(self._behind(node))
            else:
                before.append(self._behind(node))
        copies = (self._copy(node, number) for number in self.layer.copies for node in copied)
        nodes = (*given.values(), *before, *copies, *behind)
        return Graph(self.old.name, self.old.hosts, nodes, tuple(self._outputs()))

    def _inside(self, name: str, copy: int) -> str:
        if self.forward is not None and self.old.node(name).kind == SAVED:
            return self.forward.inside(name, copy)
        return self.layer.inside(name, copy)

    def _outside(self, name: str) -> str:
        if self.forward is not None and self.old.node(name).kind == SAVED:
            return self.forward.outside(name)
        return self.layer.outside(name)

    def _copy(self, node: Node, copy: int) -> Node:
        def inside(names: tuple[str, ...]) -> tuple[str, ...]:
            return tuple(self._inside(name, copy) for name in names)

        return replace(
            node,
            name=self._inside(node.name, copy),
            inputs=inside(node.inputs),
            writes=inside(node.writes),
            alias=None if node.alias is None else self._inside(node.alias, copy),
            host=self._there(node.host, copy),
            present=None if node.present is None else tuple(self._there(host, copy) or host for host in node.present),
        )

    def _behind(self, node: Node) -> Node:
        inputs = tuple(map(self._outside, node.inputs))
        alias = None if node.alias is None else self._outside(node.alias)
        return replace(node, inputs=inputs, writes=tuple(map(self._outside, node.writes)), alias=alias)

    def _given(self, node: Node) -> list[Node]:
        """One a copy of what is the layer's; of what forward left, by the names that it has for each copy."""
        if node.name in self.layer.nodes:
            return [self._copy(node, copy) for copy in range(self.layer.times)]
        names = [self._outside(node.name)]
        if node.kind == SAVED and node.name in self.used:
            names += [self._inside(node.name, copy) for copy in range(self.layer.times)]
        return [replace(node, name=name) for name in names]

    def _there(self, host: str | None, copy: int) -> str | None:
        return self.hosts[copy] if host == self.hosts[0] else host

    def _outputs(self) -> Iterable[Output]:
        found: dict[str, Output] = {}
        for output in self.old.outputs:
            own = output.name in self.layer.nodes
            for copy in range(self.layer.times) if own or output.name == self.layer.enters else ():
                name, to = self._inside(output.name, copy), output.to
                if own and len(to) == 1:
                    to = (self._there(to[0], copy) or to[0],)
                found.setdefault(name, replace(output, name=name, to=to))
            if not own:
                found.setdefault(output.name, output)
        return found.values()


def _name(name: str, copy: int) -> str:
    return f"{name}.{copy}" if copy else name
