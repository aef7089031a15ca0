"""Memory that runs of a graph share: who may overwrite what, and when."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tensorwire.device import Device, LoopbackDevice, TcpDevice
from tensorwire.graph import Analysis, Output, analyze
from tensorwire.graph.party import Party
from tensorwire.torch.graph.importer import Origin, import_graph
from tensorwire.torch.graph.partition import partition
from tensorwire.torch.graph.post import Post
from tests.torch.graph.graphs import captured
from tests.torch.graph.together import Together

HOSTS = ("worker:0", "worker:1")
devices = pytest.mark.parametrize("device", [LoopbackDevice, TcpDevice])


def moved(function: Callable[..., Any], example: torch.Tensor, kind: str) -> tuple[Any, Analysis]:
    """``function`` runs on worker 1, its argument is on worker 0."""
    module = captured(function, [example])
    returned = [node.name for node in next(iter(reversed(module.graph.nodes))).args[0]]
    outputs = [Output(name, HOSTS[1:]) for name in returned]
    graph = import_graph(module, "test", HOSTS, [Origin(kind, HOSTS[:1])], outputs, lambda _: HOSTS[1])
    return module, analyze(graph)


class Runs:
    """One worker's part of a graph, run after run."""

    def __init__(self, party: Party, module: Any, analysis: Analysis) -> None:
        self.wires = party.connect(analysis.plan)
        self._call = partition(module, analysis, party.me, Post(self.wires))

    def __call__(self, value: torch.Tensor, use: Callable[[Any], Any] = lambda results: None) -> Any:
        """What ``use`` makes of the results before the run ends."""
        self.wires.begin()
        found = use(self._call([value]))
        self.wires.end()
        return found


@devices
def test_a_parameter_may_change_once_nobody_reads_it(device: Callable[[], Device]) -> None:
    """Worker 0's run ends, so that an optimizer may change its parameter, only after worker 1's."""
    weight = torch.ones(64, 64)
    module, analysis = moved(lambda w: (w.view(-1),), weight, "parameter")
    assert [edge.lent for edge in analysis.plan.edges] == [True]
    changed = threading.Event()

    def late(results: Any) -> float:
        changed.wait(1.0)  # time for worker 0 to change it and to lend it again, if nothing keeps it
        return float(results[0].sum())

    def run(party: Party) -> list[float]:
        runs = Runs(party, module, analysis)
        found = []
        for step in range(2):
            if party.me == HOSTS[0]:
                runs(weight)
                weight.fill_(step + 2)
                if step:
                    changed.set()
            else:
                found.append(runs(weight, late))
        return found

    with Together(2, device) as together:
        assert together.each(run)[1] == [64 * 64, 2 * 64 * 64]
