"""A graph captured from a function, run over workers that live together in one process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from tensorwire.graph import Analysis, Output, analyze
from tensorwire.graph.worker_group import WorkerGroup
from tensorwire.torch.graph.capture.importer import InputOrigin, import_graph
from tensorwire.torch.graph.execution.partition import partition
from tensorwire.torch.graph.execution.transfers import Transfers
from tests.torch.graph.together import Together


def captured(
    function: Callable[..., Any], examples: Sequence[torch.Tensor], *, symbolic: bool = False
) -> fx.GraphModule:
    """The operators of ``function``; its result is a tuple. ``symbolic``: for any lengths."""
    return make_fx(torch.func.functionalize(function), tracing_mode="symbolic" if symbolic else "fake")(*examples)


def analyzed(
    module: fx.GraphModule,
    workers: tuple[str, ...],
    worker_of: Callable[[fx.Node], str | None],
    *,
    origins: Sequence[InputOrigin] | None = None,
    copies: bool = False,
) -> Analysis:
    """Its analysis, with every output wanted by all."""
    given = [node for node in module.graph.nodes if node.op == "placeholder"]
    returned = next(iter(reversed(module.graph.nodes))).args[0]
    outputs = [Output(value.name, workers, True) for value in returned if isinstance(value, fx.Node)]
    return analyze(
        import_graph(module, "test", workers, origins or [InputOrigin()] * len(given), outputs, worker_of),
        copies=copies,
    )


def run(
    together: Together,
    module: fx.GraphModule,
    analysis: Analysis,
    examples: Sequence[torch.Tensor],
    times: int = 3,
    transfers: Callable[[Any, Any], Transfers] = Transfers,
) -> list[list[Any]]:
    """What each worker returns at last."""

    def work(group: WorkerGroup) -> list[Any]:
        edges = group.connect(analysis.plan)
        call = partition(module, analysis, group.me, transfers(edges, analysis.plan))
        results: list[Any] = []
        for _ in range(times):
            edges.begin()
            results = call(list(examples))
            edges.end()
        return results

    return together.each(work)
