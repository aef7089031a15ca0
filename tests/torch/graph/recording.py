"""A backend that notes which worker each node was given, and what dynamo captured."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd

from tensorwire.torch.graph.placement.scope import Scope


@dataclass(frozen=True)
class Graph:
    """``kind``: forward, backward or inference. ``workers``: name of operator and worker, a node each."""

    kind: str
    workers: list[tuple[str, int | None]]
    code: str

    def of(self, operator: str) -> list[int | None]:
        """The workers of the nodes of an operator."""
        return [worker for name, worker in self.workers if name == operator]

    @property
    def operators(self) -> list[str]:
        return [name for name, _ in self.workers]

    @property
    def all(self) -> set[int | None]:
        return {worker for _, worker in self.workers}


class Recorder:
    """A backend. With ``dummies``, or with options, which place the model, its graphs compute nothing and return zeros,
    or what ``stand_in`` makes of them."""

    def __init__(self, *, dummies: bool = False, stand_in: Callable[[str, torch.Tensor], Any] | None = None) -> None:
        self.graphs: list[Graph] = []
        self.dynamo: list[str] = []
        self._dummies, self._stand_in = dummies, stand_in

    def __call__(self, gm: torch.fx.GraphModule, inputs: Any, *, options: Any = None) -> Any:
        scope = Scope.of_frame((options or {}).get("workers"), worker=0)
        self._dummies = self._dummies or options is not None
        self.dynamo.append(plain(gm))

        def compiler(kind: str) -> Callable[[torch.fx.GraphModule, Any], Any]:
            return lambda graph, _: self._compiled(kind, graph, scope)

        return aot_autograd(
            fw_compiler=compiler("forward"),
            bw_compiler=compiler("backward"),
            inference_compiler=compiler("inference"),
            keep_inference_input_mutations=True,
        )(gm, inputs)

    def kinds(self) -> list[str]:
        return [g.kind for g in self.graphs]

    def _compiled(self, kind: str, graph: torch.fx.GraphModule, scope: Scope) -> Any:
        nodes = [n for n in graph.graph.nodes if n.op == "call_function"]
        workers = [(str(getattr(n.target, "_opname", n.target)), rank(scope.worker_of(n))) for n in nodes]
        self.graphs.append(Graph(kind, workers, plain(graph)))

        def run(*args: Any) -> Any:
            if kind != "backward":
                scope.enter()
            return self._dummies_of(graph, kind) if self._dummies else graph.forward(*args)

        return make_boxed_func(run)

    def _dummies_of(self, graph: torch.fx.GraphModule, kind: str) -> list[Any]:
        outputs = []
        for node in next(iter(reversed(graph.graph.nodes))).args[0]:
            value = node.meta["val"] if isinstance(node, torch.fx.Node) else node
            if isinstance(value, torch.Tensor):
                value = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype).zero_()
                value = self._stand_in(kind, value) if self._stand_in is not None else value
            outputs.append(value)
        return outputs


def rank(worker: str | None) -> int | None:
    """Of a worker as graphs call it."""
    return None if worker is None else int(worker.removeprefix("worker "))


def plain(gm: torch.fx.GraphModule) -> str:
    """The code of a graph, without comments."""
    lines = [re.sub(r"#.*", "", line).rstrip() for line in gm.print_readable(print_output=False).splitlines()]
    return "\n".join(line for line in lines if line)
