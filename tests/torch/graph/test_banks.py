"""Memory that runs of a graph share: who may overwrite what, and when."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tensorwire.device import Device, LoopbackDevice, TcpDevice
from tensorwire.graph import Analysis, Output, analyze
from tensorwire.graph.kinds import DYNAMIC
from tensorwire.graph.worker_group import WorkerGroup
from tensorwire.observe import counters
from tensorwire.torch.graph.capture.importer import InputOrigin, import_graph
from tensorwire.torch.graph.execution.partition import Partition
from tensorwire.torch.graph.execution.transfers import Transfers
from tests.torch.graph.graphs import captured
from tests.torch.graph.together import Together

WORKERS = ("worker 0", "worker 1")
devices = pytest.mark.parametrize("device", [LoopbackDevice, TcpDevice])


def moved(
    function: Callable[..., Any], example: torch.Tensor, origin: InputOrigin, **options: Any
) -> tuple[Any, Analysis]:
    """What ``function`` returns is made on worker 1, all else on worker 0."""
    module = captured(function, [example], **options)
    returned = list(next(iter(reversed(module.graph.nodes))).args[0])
    outputs = [Output(node.name, WORKERS[1:]) for node in returned]
    given = [node for node in module.graph.nodes if node.op == "placeholder"]
    graph = import_graph(
        module, "test", WORKERS, [origin] * len(given), outputs, lambda node: WORKERS[node in returned]
    )
    return module, analyze(graph)


class Runs:
    """One worker's part of a graph, run after run."""

    def __init__(self, group: WorkerGroup, module: Any, analysis: Analysis) -> None:
        self.edges = group.connect(analysis.plan)
        self._call = Partition(module, analysis, group.me, Transfers(self.edges, analysis.plan)).build()

    def __call__(self, value: torch.Tensor, use: Callable[[Any], Any] = lambda results: None) -> Any:
        """What ``use`` makes of the results before the run ends."""
        self.edges.begin()
        found = use(self._call([value]))
        self.edges.end()
        return found


@devices
def test_a_parameter_may_change_once_nobody_reads_it(device: Callable[[], Device]) -> None:
    """Worker 0's run ends, so that an optimizer may change its parameter, only after worker 1's."""
    weight = torch.ones(64, 64)
    module, analysis = moved(lambda w: (w.view(-1),), weight, InputOrigin("parameter", WORKERS[:1]))
    assert [edge.lent for edge in analysis.plan.edges] == [True]
    changed = threading.Event()

    def late(results: Any) -> float:
        changed.wait(1.0)  # time for worker 0 to change it and to lend it again, if nothing keeps it
        return float(results[0].sum())

    def run(group: WorkerGroup) -> list[float]:
        runs = Runs(group, module, analysis)
        found = []
        for step in range(2):
            if group.me == WORKERS[0]:
                runs(weight)
                weight.fill_(step + 2)
                if step:
                    changed.set()
            else:
                found.append(runs(weight, late))
        return found

    with Together(2, device) as together:
        assert together.each(run)[1] == [64 * 64, 2 * 64 * 64]


@devices
def test_tensors_of_any_size_stay_while_somebody_looks_at_them(device: Callable[[], Device]) -> None:
    """Worker 1 keeps what it made in every second run; the memory of the others is used again."""
    module, analysis = moved(
        lambda x: ((x + 1).t(),), torch.ones(3, 5), InputOrigin("saved", WORKERS[:1]), symbolic=True
    )
    assert [edge.kind for edge in analysis.plan.edges] == [DYNAMIC]
    sizes = [7, 0, 100, 3000, 1, 64, 2, 900, 5, 31]

    def run(group: WorkerGroup) -> list[torch.Tensor]:
        runs = Runs(group, module, analysis)
        results = [runs(torch.full((size, 5), float(step)), lambda results: results) for step, size in enumerate(sizes)]
        kept = [result[0] for result in results]
        del results
        del kept[1::2]
        for step in range(8):
            runs(torch.full((1000, 5), -1.0 - step))
        return kept

    with Together(2, device) as together:
        kept = together.each(run)[1]
        for step, (values, size) in enumerate(zip(kept, sizes[::2], strict=True)):
            assert torch.equal(values, torch.full((5, size), 2.0 * step + 1))


@devices
def test_memory_of_tensors_of_any_size_is_used_again(device: Callable[[], Device]) -> None:
    module, analysis = moved(
        lambda x: ((x + 1).t(),), torch.ones(3, 5), InputOrigin("saved", WORKERS[:1]), symbolic=True
    )

    step_by_step = threading.Barrier(2)  # a worker that runs ahead would need more memory

    def run(group: WorkerGroup) -> int:
        runs = Runs(group, module, analysis)
        for step in range(20):
            step_by_step.wait(60.0)
            runs.edges.drain(60.0)  # so would one that is not told yet that its tensor was read
            if step == 10:
                before = counters.snapshot()
            runs(torch.ones(50_000 + step, 5), lambda results: None)
        return counters.since(before).registrations

    with Together(2, device) as together:
        assert together.each(run) == [0, 0]
