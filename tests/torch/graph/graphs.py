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
from tensorwire.torch.graph.execution.partition import Partition
from tensorwire.torch.graph.execution.transfers import Transfers
from tests.torch.graph.cuts import same_bits
from tests.torch.graph.together import Together


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
        edges = group.connect(analysis.plan)
        call = Partition(module, analysis, group.me, transfers(edges, analysis.plan)).build()
        returned, copies = [], []
        for given in (*before, *[examples] * times):
            edges.begin()
            returned.append(call(list(given)))
            copies.append([value.clone() for value in returned[-1]])
            edges.end()
        for results, copied in zip(returned, copies, strict=True):
            assert all(same_bits(*values) for values in zip(results, copied, strict=True))
        return returned[-1]

    return together.each(work)
