"""The plans of a model that was surveyed: what would run where, and what would be sent, if it ran on such hosts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from torch import fx

from tensorwire.errors import ArgumentError
from tensorwire.graph import Analysis, Graph, Output, analyze
from tensorwire.graph.cut import cut
from tensorwire.graph.ir import INPUT, PARAMETER, SAVED
from tensorwire.graph.repeat import Layer, find_layer, repeat, with_present
from tensorwire.torch.graph.capture import given, returned
from tensorwire.torch.graph.hosting import Scope
from tensorwire.torch.graph.importer import Origin, import_graph
from tensorwire.torch.graph.part import output
from tensorwire.torch.graph.paths import host_of, module_path, placed
from tensorwire.torch.graph.placement import host_at
from tensorwire.torch.graph.survey import Survey, Traced


@dataclass(frozen=True)
class Repeated:
    """The layer at ``path``, whose last part is a number, stands for ``times`` of them, numbered from there."""

    path: str
    times: int

    def paths(self) -> list[str]:
        """Of all of them."""
        stem, _, first = self.path.rpartition(".")
        return [f"{stem}.{int(first) + i}" if stem else str(int(first) + i) for i in range(self.times)]

    def covers(self, path: str | None) -> bool:
        """Whether the module ``path`` is the layer, or in it."""
        return path is not None and (path == self.path or path.startswith(f"{self.path}."))


@dataclass(frozen=True)
class Planned:
    """One graph of a model with its plan. ``labels``: the module of each node by name, as far as one is known."""

    graph: Graph
    analysis: Analysis
    labels: Mapping[str, str]


def parameters(found: Survey, repeated: Repeated | None = None) -> dict[str, tuple[int, int]]:
    """Bytes and elements of every parameter by name, those of repeated layers too."""
    every: dict[str, tuple[int, int]] = {}
    for name, size in found.parameters.items():
        if repeated is None or not repeated.covers(name):
            every[name] = size
        else:
            every.update((path + name.removeprefix(repeated.path), size) for path in repeated.paths())
    return every


def place(found: Survey, hosts: Sequence[str], repeated: Repeated | None = None) -> dict[str, str]:
    """A placement if none is given: as many bytes of parameters on each host, in the order of layers."""
    layers: dict[str, int] = {}
    inside = 0
    for path, nbytes in found.layers().items():
        if repeated is None or not repeated.covers(path):
            layers[path] = layers.get(path, 0) + nbytes
        else:
            layers.update(dict.fromkeys(repeated.paths(), inside := inside + nbytes))
    return cut(layers, hosts)


def plans(
    found: Survey, hosts: Sequence[str], placement: Mapping[str, str], repeated: Repeated | None = None
) -> list[Planned]:
    """The plans of all graphs, each forward one before that of its gradients. What ``placement`` names by no path runs
    on the first host.

    Raises `ArgumentError` for a module that is not there, and where ``repeated`` is no layer of the model.
    """
    if repeated is not None and len(found.traced) > 1:
        raise ArgumentError(f"the model is traced as {len(found.traced)} graphs: no layer of it can be repeated")
    said = {"": hosts[0], **placement}
    there: list[str] = []
    if repeated is not None:  # of the copies only the traced layer is a module
        there = [host_at(path, said) or hosts[0] for path in repeated.paths()]
        said = {path: host for path, host in said.items() if path not in repeated.paths()} | {repeated.path: there[0]}
    planned: list[Planned] = []
    with placed(found.model, said) as scope:
        for number, traced in enumerate(found.traced):
            name = f" {number}" if len(found.traced) > 1 else ""
            planned += _Planner(traced, tuple(hosts), scope, repeated, there).plans(name)
    return planned


class _Planner:
    def __init__(
        self, traced: Traced, hosts: tuple[str, ...], scope: Scope, repeated: Repeated | None, there: Sequence[str]
    ) -> None:
        self.traced, self.hosts, self.scope, self.repeated, self.there = traced, hosts, scope, repeated, there

    def plans(self, name: str) -> list[Planned]:
        forward = self._import(self.traced.forward, f"forward{name}", self._origins(), self._outputs())
        origins = {node.name: node.present for node in forward.nodes}
        labels = self._labels(self.traced.forward)
        layer = None
        if self.repeated is not None:
            layer = find_layer(forward, self._inside(labels), self.repeated.times)
            forward = repeat(forward, layer, self.there)
        planned = [self._planned(forward, labels)]
        if self.traced.backward is not None:
            planned.append(self._backward(name, planned[0], layer, origins))
        return planned

    def _backward(
        self, name: str, forward: Planned, layer: Layer | None, origins: Mapping[str, tuple[str, ...] | None]
    ) -> Planned:
        assert self.traced.backward is not None
        saved = {node.name for node in self.traced.forward.graph.nodes}
        kinds = [Origin(SAVED if node.name in saved else INPUT) for node in given(self.traced.backward)]
        outputs = [
            Output(value.name, origins[source.name] or self.hosts, True)
            for source, value in zip(given(self.traced.forward), returned(self.traced.backward), strict=False)
            if isinstance(value, fx.Node)
        ]
        graph = self._import(self.traced.backward, f"backward{name}", kinds, outputs)
        labels = self._labels(self.traced.backward)
        if layer is not None:
            own = find_layer(graph, self._inside(labels), layer.times, backward=True)
            graph = repeat(graph, own, self.there, forward=layer)
        return self._planned(with_present(graph, forward.analysis.crossing.holds), labels)

    def _import(self, module: fx.GraphModule, name: str, origins: Sequence[Origin], outputs: Sequence[Output]) -> Graph:
        backward = module is self.traced.backward
        said = partial(host_of, self.scope, backward=backward)
        return import_graph(module, name, self.hosts, origins, outputs, said)

    def _planned(self, graph: Graph, labels: Mapping[str, str]) -> Planned:
        return Planned(graph, analyze(graph), self._relabelled(graph, labels))

    def _origins(self) -> list[Origin]:
        found = []
        for index, node in enumerate(given(self.traced.forward)):
            if index in self.traced.static:
                said = map(self.scope.host_of, node.users)
                found.append(Origin(PARAMETER, (next(filter(None, said), self.hosts[0]),)))
            else:
                found.append(Origin(INPUT))
        return found

    def _outputs(self) -> list[Output]:
        found = []
        for index, value in enumerate(returned(self.traced.forward)):
            if isinstance(value, fx.Node):
                found.append(output(value, self.hosts, caller=index < self.traced.returns))
        return found

    def _labels(self, module: fx.GraphModule) -> dict[str, str]:
        """The module of each node; who has none, such as the sum of two gradients, belongs to its last operand's."""
        found: dict[str, str] = {}
        for node in module.graph.nodes:
            path = module_path(node)
            if path is None and node.op == "call_function":
                path = next((found[one.name] for one in reversed(node.all_input_nodes) if one.name in found), None)
            if path is not None:
                found[node.name] = path
        return found

    def _inside(self, labels: Mapping[str, str]) -> set[str]:
        assert self.repeated is not None
        inside = {name for name, path in labels.items() if self.repeated.covers(path)}
        if not inside:
            raise ArgumentError(f"no operator is in {self.repeated.path}: the model has no such module")
        return inside

    def _relabelled(self, graph: Graph, labels: Mapping[str, str]) -> dict[str, str]:
        """With those of copies, which are named after what they are copies of."""
        if self.repeated is None:
            return dict(labels)
        paths = self.repeated.paths()
        found = {}
        for node in graph.nodes:
            name, _, copy = node.name.partition(".")
            path = labels.get(name)
            if path is not None and self.repeated.covers(path):
                path = paths[int(copy or 0)] + path.removeprefix(self.repeated.path)
            if path is not None:
                found[node.name] = path
        return found
