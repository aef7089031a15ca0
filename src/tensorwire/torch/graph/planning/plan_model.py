"""The plans of a traced model: the place of each operator, and the tensors sent."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from torch import fx

from tensorwire.graph import Analysis, Graph, Output, analyze
from tensorwire.graph.ir import INPUT, PARAMETER, SAVED, worker_name
from tensorwire.torch.graph.capture.importer import InputOrigin, import_graph
from tensorwire.torch.graph.capture.joint import given, returned
from tensorwire.torch.graph.capture.module_paths import module_path
from tensorwire.torch.graph.execution.compiled_graph import output
from tensorwire.torch.graph.placement.scope import Scope, placed, worker_of
from tensorwire.torch.graph.planning.trace_model import ModelTrace, Traced


@dataclass(frozen=True)
class Planned:
    """One graph of a model with its plan. ``labels``: the module of each node by name, as far as one is known."""

    graph: Graph
    analysis: Analysis
    labels: Mapping[str, str]


def plan_model(found: ModelTrace, workers: int, placement: Mapping[str, int | str]) -> list[Planned]:
    """The plans of all graphs, each forward one before that of its gradients. What ``placement`` names by no path runs
    on worker 0.

    Raises `ArgumentError` for a module that is not there.
    """
    planned: list[Planned] = []
    names = tuple(map(worker_name, range(workers)))
    with placed(found.model, {"": 0, **placement}) as scope:
        for number, traced in enumerate(found.traced):
            name = f" {number}" if len(found.traced) > 1 else ""
            planned += _Planner(traced, names, scope).plans(name)
    return planned


class _Planner:
    def __init__(self, traced: Traced, workers: tuple[str, ...], scope: Scope) -> None:
        self.traced, self.workers, self.scope = traced, workers, scope

    def plans(self, name: str) -> list[Planned]:
        graph = self._import(self.traced.forward, f"forward{name}", self._origins(), self._outputs())
        forward = Planned(graph, analyze(graph), _labels(self.traced.forward))
        if self.traced.backward is None:
            return [forward]
        return [forward, self._backward(self.traced.backward, f"backward{name}", forward)]

    def _backward(self, module: fx.GraphModule, name: str, forward: Planned) -> Planned:
        saved = {node.name for node in self.traced.forward.graph.nodes}
        kinds = [InputOrigin(SAVED if node.name in saved else INPUT) for node in given(module)]
        origins = {node.name: node.present for node in forward.graph.nodes}
        outputs = [
            Output(value.name, origins[source.name] or self.workers, True)
            for source, value in zip(given(self.traced.forward), returned(module), strict=False)
            if isinstance(value, fx.Node)
        ]
        graph = _with_present(self._import(module, name, kinds, outputs), forward.analysis.crossing.holds)
        return Planned(graph, analyze(graph), _labels(module))

    def _import(
        self, module: fx.GraphModule, name: str, origins: Sequence[InputOrigin], outputs: Sequence[Output]
    ) -> Graph:
        said = partial(worker_of, self.scope, backward=module is self.traced.backward)
        return import_graph(module, name, self.workers, origins, outputs, said)

    def _origins(self) -> list[InputOrigin]:
        found = []
        for index, node in enumerate(given(self.traced.forward)):
            if index in self.traced.static:
                said = map(self.scope.worker_of, node.users)
                found.append(InputOrigin(PARAMETER, (next(filter(None, said), self.workers[0]),)))
            else:
                found.append(InputOrigin(INPUT))
        return found

    def _outputs(self) -> list[Output]:
        found = []
        for index, value in enumerate(returned(self.traced.forward)):
            if isinstance(value, fx.Node):
                found.append(output(value, self.workers, caller=index < self.traced.returns))
        return found


def _labels(module: fx.GraphModule) -> dict[str, str]:
    """The module of each node; one without, such as the sum of two gradients, belongs to its last operand's."""
    found: dict[str, str] = {}
    for node in module.graph.nodes:
        path = module_path(node)
        if path is None and node.op == "call_function":
            path = next((found[one.name] for one in reversed(node.all_input_nodes) if one.name in found), None)
        if path is not None:
            found[node.name] = path
    return found


def _with_present(graph: Graph, holds: Mapping[str, Iterable[str]]) -> Graph:
    """``graph``, whose saved values are where the forward graph left them."""
    nodes = []
    for node in graph.nodes:
        if node.kind == SAVED:
            held = set(holds[node.name])
            node = replace(node, present=tuple(worker for worker in graph.workers if worker in held))
        nodes.append(node)
    return replace(graph, nodes=tuple(nodes))
