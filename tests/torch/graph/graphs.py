"""A graph captured from a function, run over workers that live together in one process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from tensorwire.graph import Analysis, Graph, Output, analyze
from tensorwire.graph.worker_group import WorkerGroup
from tensorwire.torch.graph.capture.importer import InputOrigin, import_graph
from tensorwire.torch.graph.execution.partition import Partition
from tensorwire.torch.graph.execution.transfers import Transfers
from tests.torch.graph.cuts import same_bits
from tests.torch.graph.together import Together

WORKERS = ("worker 0", "worker 1")


def captured(
    function: Callable[..., Any], examples: Sequence[torch.Tensor], *, symbolic: bool = False
) -> fx.GraphModule:
    """The operators of ``function``; its result is a tuple. ``symbolic``: for any lengths."""
    return make_fx(torch.func.functionalize(function), tracing_mode="symbolic" if symbolic else "fake")(*examples)


def fits(module: fx.GraphModule, arguments: Sequence[torch.Tensor]) -> bool:
    """Whether the operators were captured for lengths like these: some pick another way by what is longer."""
    traced = [node.meta["val"] for node in module.graph.nodes if node.op == "placeholder"]
    return bool(traced[0].fake_mode.shape_env.evaluate_guards_for_args(traced, arguments))


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


def moved(module: fx.GraphModule, origin: InputOrigin) -> Graph:
    """What is returned is made on worker 1, where it is wanted, and all else on worker 0."""
    given = [node for node in module.graph.nodes if node.op == "placeholder"]
    returned = [node for node in next(iter(reversed(module.graph.nodes))).args[0] if isinstance(node, fx.Node)]
    outputs = [Output(node.name, WORKERS[1:]) for node in returned]
    return import_graph(module, "test", WORKERS, [origin] * len(given), outputs, lambda node: WORKERS[node in returned])


class Runs:
    """One worker's part of a graph, run after run."""

    def __init__(
        self,
        group: WorkerGroup,
        module: fx.GraphModule,
        analysis: Analysis,
        transfers: Callable[[Any, Any], Transfers] = Transfers,
    ) -> None:
        self.edges = group.connect(analysis.plan)
        self.transfers = transfers(self.edges, analysis.plan)
        self._call = Partition(module, analysis, group.me, self.transfers).build()

    def __call__(self, *values: torch.Tensor, use: Callable[[Any], Any] = list) -> Any:
        """What ``use`` makes of the results before the run ends."""
        self.edges.begin()
        found = use(self._call(list(values)))
        self.edges.end()
        return found


def run(
    together: Together,
    module: fx.GraphModule,
    analysis: Analysis,
    examples: Sequence[torch.Tensor],
    times: int = 3,
    transfers: Callable[[Any, Any], Transfers] = Transfers,
    before: Sequence[Sequence[torch.Tensor]] = (),
) -> list[list[Any]]:
    """What each worker returns at last, while what each run returned stays as it was.

    ``before``: the arguments of runs in front of ``times`` with ``examples``.
    """

    def work(group: WorkerGroup) -> list[Any]:
        runs = Runs(group, module, analysis, transfers)
        returned = [
            runs(*given, use=lambda results: (results, [value.clone() for value in results]))
            for given in (*before, *[examples] * times)
        ]
        for results, copied in returned:
            assert all(same_bits(*values) for values in zip(results, copied, strict=True))
        return list(returned[-1][0])

    return together.each(work)
